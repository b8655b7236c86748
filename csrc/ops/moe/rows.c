/* SPDX-License-Identifier: Apache-2.0
 *
 * Dispatch, combine and the backward of combine. All walk tokens, not rows of the buffer: a token's row is read once
 * from memory however many experts it goes to, and no inverse of the plan is needed. Only the empty rows of a buffer
 * with capacity are visited by expert.
 */
#include "moe.h"

#include <assert.h>
#include <string.h>

#include "../element.h"
#include "../streamed.h"
#include "kernels.h"

enum {
    PIECE_BYTES = 128 * 1024,
    STREAM_BYTES = 8 * 1024 * 1024, /* results of this size leave the caches before anybody reads them */
};

struct job {
    const struct zpp_moe_rows *rows;
    const struct zpp_moe_kernels *kernels;
    const char *tokens_in, *buffer_in; /* x or grad_y; buffer */
    char *tokens_out, *buffer_out;
    const float *weights;
    float *grad_weights;
    size_t row_bytes;
    bool stream;
};

size_t zpp_moe_buffer_rows(const struct zpp_moe_rows *rows) {
    return rows->capacity ? rows->experts * rows->capacity : rows->tokens * rows->k;
}

static struct job job_of(const struct zpp_moe_rows *rows, size_t rows_out) {
    assert(zpp_element_is_float(rows->dtype) && rows->k >= 1 && rows->k <= ZPP_MOE_MAX_CHOICES);
    const size_t row_bytes = rows->width_elems * zpp_dtype_bytes(rows->dtype);
    return (struct job){ .rows = rows, .kernels = zpp_moe_kernels(), .row_bytes = row_bytes,
                         .stream = rows_out * row_bytes >= STREAM_BYTES };
}

static void each_token(const struct job *job, zpp_range_fn body, zpp_pool *pool) {
    const size_t per_token = job->row_bytes * (job->rows->k + 1);
    const size_t grain = per_token < PIECE_BYTES ? PIECE_BYTES / (per_token + 1) : 1;
    zpp_pool_run(pool, job->rows->tokens, grain, body, (void *)(uintptr_t)job);
}

static void zero_expert_ends(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    for (size_t e = begin; e < end; ++e) {
        const size_t used = (size_t)job->rows->kept[e], capacity = job->rows->capacity;
        memset(job->buffer_out + (e * capacity + used) * job->row_bytes, 0, (capacity - used) * job->row_bytes);
    }
}

static void zero_empty_rows(const struct job *job, zpp_pool *pool) {
    if (job->rows->capacity) zpp_pool_run(pool, job->rows->experts, 1, zero_expert_ends, (void *)(uintptr_t)job);
}

static void dispatch_tokens(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    const size_t k = job->rows->k;
    for (size_t t = begin; t < end; ++t) {
        const char *from = job->tokens_in + t * job->row_bytes;
        for (size_t j = 0; j < k; ++j) {
            const int32_t slot = job->rows->slots[t * k + j];
            if (slot < 0) continue;
            job->kernels->copy(job->buffer_out + (size_t)slot * job->row_bytes, from, job->row_bytes, job->stream);
        }
    }
    if (job->stream) zpp_streamed();
}

void zpp_moe_dispatch(const struct zpp_moe_rows *rows, const void *x, void *buffer, zpp_pool *pool) {
    struct job job = job_of(rows, zpp_moe_buffer_rows(rows));
    job.tokens_in = x;
    job.buffer_out = buffer;
    each_token(&job, dispatch_tokens, pool);
    zero_empty_rows(&job, pool);
}

static void combine_tokens(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    const struct zpp_moe_rows *rows = job->rows;
    for (size_t t = begin; t < end; ++t) {
        const void *from[ZPP_MOE_MAX_CHOICES];
        float weights[ZPP_MOE_MAX_CHOICES];
        size_t count = 0;
        for (size_t j = 0; j < rows->k; ++j) {
            const int32_t slot = rows->slots[t * rows->k + j];
            if (slot < 0) continue;
            weights[count] = job->weights ? job->weights[t * rows->k + j] : 1.0f;
            from[count++] = job->buffer_in + (size_t)slot * job->row_bytes;
        }
        char *out = job->tokens_out + t * job->row_bytes;
        if (count == 0) memset(out, 0, job->row_bytes);
        else if (count == 1 && !job->weights) job->kernels->copy(out, from[0], job->row_bytes, job->stream);
        else job->kernels->combine(out, from, job->weights ? weights : NULL, count, rows->width_elems, rows->dtype,
                                   job->stream);
    }
    if (job->stream) zpp_streamed();
}

void zpp_moe_combine(const struct zpp_moe_rows *rows, const void *buffer, const float *weights, void *y,
                     zpp_pool *pool) {
    struct job job = job_of(rows, rows->tokens);
    job.buffer_in = buffer;
    job.weights = weights;
    job.tokens_out = y;
    each_token(&job, combine_tokens, pool);
}

static void backward_tokens(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    const struct zpp_moe_rows *rows = job->rows;
    for (size_t t = begin; t < end; ++t) {
        const char *grad = job->tokens_in + t * job->row_bytes;
        for (size_t j = 0; j < rows->k; ++j) {
            const size_t a = t * rows->k + j;
            if (rows->slots[a] < 0) {
                job->grad_weights[a] = 0.0f;
                continue;
            }
            const size_t at = (size_t)rows->slots[a] * job->row_bytes;
            job->grad_weights[a] = job->kernels->dot(job->buffer_in + at, grad, rows->width_elems, rows->dtype);
            job->kernels->scale(job->buffer_out + at, grad, job->weights[a], rows->width_elems, rows->dtype,
                                job->stream);
        }
    }
    if (job->stream) zpp_streamed();
}

void zpp_moe_combine_backward(const struct zpp_moe_rows *rows, const void *buffer, const float *weights,
                              const void *grad_y, void *grad_buffer, float *grad_weights, zpp_pool *pool) {
    struct job job = job_of(rows, zpp_moe_buffer_rows(rows));
    job.buffer_in = buffer;
    job.weights = weights;
    job.tokens_in = grad_y;
    job.buffer_out = grad_buffer;
    job.grad_weights = grad_weights;
    each_token(&job, backward_tokens, pool);
    zero_empty_rows(&job, pool);
}
