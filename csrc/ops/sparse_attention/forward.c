/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention, forward: a unit of work is a block of queries. Scores stand transposed, keys by queries, so
 * that the softmax runs down the columns of a tile and needs no sums across lanes, and only q is transposed, once.
 */
#include "sparse_attention.h"

#include <math.h>
#include <string.h>

#include "tiles.h"

enum { STEP_KEYS = 64 }; /* the softmax takes so many keys at once, where blocks are smaller */

struct forward {
    struct zpp_sparse_shape shape;
    void *out;
    float *lse;
};

/* A thread's memory. */
struct scratch {
    float *q, *row, *out, *scores; /* q transposed; a tile for whatever is converted; the sums; STEP_KEYS or a block */
    float *most, *sum, *factor;    /* of each query */
};

static size_t step_blocks(size_t block) { return block < STEP_KEYS ? STEP_KEYS / block : 1; }

static size_t scratch_elems(const struct zpp_sparse_shape *shape) {
    return 3 * shape->tile_elems + step_blocks(shape->block) * shape->block * shape->block + 3 * shape->block;
}

static struct scratch scratch_of(const struct zpp_sparse_shape *shape, float *at) {
    struct scratch scratch;
    scratch.q = at;
    scratch.row = scratch.q + shape->tile_elems;
    scratch.out = scratch.row + shape->tile_elems;
    scratch.scores = scratch.out + shape->tile_elems;
    scratch.most = scratch.scores + step_blocks(shape->block) * shape->block * shape->block;
    scratch.sum = scratch.most + shape->block;
    scratch.factor = scratch.sum + shape->block;
    return scratch;
}

/* Blocks from *next on, as many as a step takes: their scores, the softmax, their part of the sums. */
static void step(const struct zpp_sparse_shape *shape, size_t head, size_t row, const int32_t **next,
                 const int32_t *end, const struct scratch *scratch) {
    const struct zpp_sparse_attention *at = shape->at;
    const struct zpp_sparse_kernels *kernels = shape->kernels;
    const size_t block = shape->block, width = shape->width, square = block * block;
    const int32_t *first = *next;
    size_t count = 0;
    for (; *next < end && count < step_blocks(block); ++*next, ++count) {
        const size_t column = (size_t)**next;
        const struct zpp_sparse_rows k = zpp_sparse_load(shape, at->k, head, column, scratch->row);
        const struct zpp_sparse_sizes sizes = { block, block, width };
        kernels->matmul(scratch->scores + count * square, block, (struct zpp_sparse_tile){ k.at, k.ld, 1 }, scratch->q,
                        block, sizes, false);
        zpp_sparse_hide(shape, head, row, column, scratch->scores + count * square, 1, block);
    }
    kernels->softmax(scratch->scores, count * block, block, at->scale, scratch->most, scratch->sum, scratch->factor);
    if (first != zpp_sparse_row(shape, head, row).begin) {
        kernels->scale_rows(scratch->out, block, width, scratch->factor);
    }
    for (size_t c = 0; c < count; ++c) {
        const struct zpp_sparse_rows v = zpp_sparse_load(shape, at->v, head, (size_t)first[c], scratch->row);
        const struct zpp_sparse_sizes sizes = { block, width, block };
        kernels->matmul(scratch->out, width, (struct zpp_sparse_tile){ scratch->scores + c * square, 1, block }, v.at,
                        v.ld, sizes, true);
    }
}

static void finish(const struct forward *job, size_t head, size_t row, const struct scratch *scratch) {
    const struct zpp_sparse_shape *shape = &job->shape;
    const size_t seq = shape->at->seq, first = row * shape->block;
    for (size_t i = 0; i < shape->block; ++i) {
        const float sum = scratch->sum[i];
        scratch->factor[i] = sum == 0.0f ? 0.0f : 1.0f / sum; /* a query that sees nothing; a NaN stays one */
        if (first + i < seq) job->lse[head * seq + first + i] = sum == 0.0f ? -INFINITY : scratch->most[i] + logf(sum);
    }
    shape->kernels->scale_rows(scratch->out, shape->block, shape->width, scratch->factor);
    zpp_sparse_store(shape, scratch->out, job->out, head, row);
}

static void forward_row(void *arg, size_t unit, float *memory) {
    const struct forward *job = arg;
    const struct zpp_sparse_shape *shape = &job->shape;
    const size_t head = unit / shape->blocks, row = unit % shape->blocks;
    const struct scratch scratch = scratch_of(shape, memory);
    zpp_sparse_transpose(shape, zpp_sparse_load(shape, shape->at->q, head, row, scratch.row), scratch.q);
    memset(scratch.out, 0, shape->tile_elems * sizeof *scratch.out);
    for (size_t i = 0; i < shape->block; ++i) scratch.most[i] = -INFINITY, scratch.sum[i] = 0.0f;
    struct zpp_sparse_span span = zpp_sparse_row(shape, head, row);
    if (shape->at->causal) {
        while (span.end > span.begin && (size_t)span.end[-1] > row) --span.end;
    }
    for (const int32_t *next = span.begin; next < span.end;) step(shape, head, row, &next, span.end, &scratch);
    finish(job, head, row, &scratch);
}

zpp_status zpp_sparse_attention_forward(const struct zpp_sparse_attention *at, void *out, float *lse, zpp_pool *pool,
                                        struct zpp_err *err) {
    struct forward job = { zpp_sparse_shape_of(at), out, lse };
    return zpp_sparse_run(pool, at->batch * at->heads * job.shape.blocks, scratch_elems(&job.shape), forward_row, &job,
                          err);
}
