/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches the element-wise optimizers on CUDA (optim_cuda.cu): segments in groups, each one grid with a block a chunk.
 */
#include "optim_cuda.h"

#include <assert.h>
#include <string.h>

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "optim_kernels.h"

_Static_assert(sizeof(union zpp_optim_consts) <= ZPP_LOW_CUDA_CONSTS_BYTES, "constants must fit their place");

/* An optimizer's kernels, with fp32 states and with states in fewer bits, and where the arrays of its batch begin. */
struct kernel {
    const char *name, *low;
    size_t segments, states_at, consts_at, consts_bytes;
};

#define KERNEL(NAME, op, name, low)                                                                                   \
    [ZPP_OPTIM_##NAME] = { name, low, ZPP_OPTIM_CUDA_##NAME##_SEGMENTS,                                               \
                           offsetof(struct zpp_##op##_cuda_batch, states_of),                                         \
                           offsetof(struct zpp_##op##_cuda_batch, consts), sizeof(struct zpp_##op##_consts) }
static const struct kernel kernels[ZPP_OPTIMIZERS] = {
    KERNEL(ADAM, adam, "zpp_adam_cuda", "zpp_adam_low_cuda"),
    KERNEL(LION, lion, "zpp_lion_cuda", "zpp_lion_low_cuda"),
    KERNEL(ADAGRAD, adagrad, "zpp_adagrad_cuda", "zpp_adagrad_low_cuda"),
    KERNEL(SGD, sgd, "zpp_sgd_cuda", "zpp_sgd_low_cuda"),
    KERNEL(FROZEN, frozen, "zpp_frozen_cuda", NULL),
    KERNEL(ZERO_ONE, zero_one, "zpp_zero_one_cuda", NULL),
};

struct job {
    const struct zpp_optim_segment *segments;
    size_t count;
    struct zpp_grad_scale scale;
};

/* True if parameters have no fp32 copy: all are alike, but an empty one has no address either. */
static bool is_no_master(const struct job *job) {
    size_t first = 0;
    while (first < job->count && !job->segments[first].elems) first++;
    if (first == job->count || job->segments[first].param) return false;
    assert(job->segments[first].optimizer == ZPP_OPTIM_ADAM);
    return true;
}

static uint8_t out_dtype_of(const struct zpp_optim_segment *s) {
    return s->param_out ? zpp_cuda_dtype_of(s->out_dtype) : ZPP_CUDA_NONE;
}

static uint8_t grad_dtype_of(const struct zpp_optim_segment *s) {
    return s->grad ? zpp_cuda_dtype_of(s->grad_dtype) : ZPP_CUDA_NONE;
}

/* Segments from `begin` on, all with fp32 states. */
static size_t fill(const void *arg, size_t begin, void *batch, unsigned int *blocks) {
    const struct job *job = arg;
    const struct kernel *kernel = &kernels[job->segments[0].optimizer];
    const struct zpp_optim_shape *shape = &zpp_optim_shapes[job->segments[0].optimizer];
    struct zpp_optim_cuda_head *head = batch;
    struct zpp_optim_cuda_segment *at = (void *)(head + 1);
    uint32_t *count = &head->count;
    float **states = (void *)((char *)batch + kernel->states_at);
    char *consts = (char *)batch + kernel->consts_at;
    size_t index = begin;
    *blocks = 0;
    *head = (struct zpp_optim_cuda_head){.scale = job->scale};
    for (; index < job->count && *count < kernel->segments; ++index) {
        const struct zpp_optim_segment *s = &job->segments[index];
        assert(s->optimizer == job->segments[0].optimizer);
        if (s->elems == 0) continue; /* the next one takes its place */
        const union zpp_optim_consts one = zpp_optim_consts_of(s, zpp_grad_scale_on_host(&job->scale));
        at[*count] = (struct zpp_optim_cuda_segment){
            .param = s->param, .grad = s->grad, .param_out = s->param_out, .elems = s->elems, .first_block = *blocks,
            .grad_dtype = grad_dtype_of(s), .out_dtype = out_dtype_of(s),
        };
        if (is_no_master(job)) at[*count].param_key = s->param_key;
        memcpy(states + *count * shape->states, s->state + shape->first, shape->states * sizeof *states);
        memcpy(consts + *count * kernel->consts_bytes, &one, kernel->consts_bytes);
        /* 2^31 blocks of 2^15 elements: more than any memory */
        *blocks += (unsigned int)((s->elems - 1) / ZPP_OPTIM_CUDA_CHUNK_ELEMS + 1);
        ++*count;
    }
    return index - begin;
}

/* For zpp_low_cuda_fill: one segment whose states are in fewer bits. */
static void describe_low(const void *arg, size_t index, struct zpp_low_cuda_segment *segment, void *consts) {
    const struct job *job = arg;
    const struct zpp_optim_segment *s = &job->segments[index];
    const int first = zpp_optim_shapes[s->optimizer].first;
    const union zpp_optim_consts one = zpp_optim_consts_of(s, zpp_grad_scale_on_host(&job->scale));
    *segment = (struct zpp_low_cuda_segment){
        .param = s->param, .grad = s->grad, .param_out = s->param_out, .elems = s->elems,
        .grad_dtype = grad_dtype_of(s), .out_dtype = out_dtype_of(s),
    };
    if (is_no_master(job)) segment->param_key = s->param_key;
    const size_t count = (size_t)__builtin_popcount(one.options & 0x7u);
    zpp_low_cuda_hold(segment, &s->how, s->moments + first, count, (enum zpp_moments_which)first);
    memcpy(consts, &one, kernels[s->optimizer].consts_bytes);
}

static struct zpp_low_cuda_source low_source(const struct job *job) {
    const struct kernel *kernel = &kernels[job->segments[0].optimizer];
    const char *name = is_no_master(job) ? "zpp_adam_low_no_master_cuda" : kernel->low;
    assert(name);
    return (struct zpp_low_cuda_source){name, job->count, kernel->consts_bytes, describe_low, job, job->scale};
}

static bool is_low(const struct job *job) { return job->segments[0].how.kind != ZPP_MOMENTS_F32; } /* all are alike */

size_t zpp_optim_cuda_fill(const struct zpp_optim_segment *segments, size_t segments_count, struct zpp_grad_scale scale,
                           void *batch, unsigned int *blocks) {
    const struct job job = {segments, segments_count, scale};
    if (!is_low(&job)) return fill(&job, 0, batch, blocks);
    const struct zpp_low_cuda_source source = low_source(&job);
    return zpp_low_cuda_fill(&source, 0, batch, blocks);
}

zpp_status zpp_optim_step_cuda(zpp_device *device, void *native, const struct zpp_optim_segment *segments,
                               size_t segments_count, struct zpp_grad_scale scale, struct zpp_err *err) {
    const struct job job = {segments, segments_count, scale};
    if (segments_count == 0) return ZPP_OK;
    if (is_low(&job)) {
        const struct zpp_low_cuda_source source = low_source(&job);
        return zpp_low_cuda_run(device, native, &source, err);
    }
    _Alignas(16) char batch[ZPP_OPTIM_CUDA_BATCH_BYTES] = { 0 };
    const char *name = is_no_master(&job) ? "zpp_adam_no_master_cuda" : kernels[segments[0].optimizer].name;
    const struct zpp_launch_cuda_list list = { name, ZPP_OPTIM_CUDA_THREADS, segments_count, fill, &job, batch };
    return zpp_launch_cuda_list(device, native, &list, err);
}
