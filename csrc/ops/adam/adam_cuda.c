/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches Adam on CUDA (adam_cuda.cu): segments in groups of 32, each group one grid with a block a chunk.
 */
#include "adam.h"

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "adam_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_adam_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");

static struct zpp_adam_cuda_segment describe(const struct zpp_optim_segment *s, float grad_scale) {
    return (struct zpp_adam_cuda_segment){
        .param = s->param, .exp_avg = s->exp_avg, .exp_avg_sq = s->exp_avg_sq, .max_exp_avg_sq = s->max_exp_avg_sq,
        .grad = s->grad, .param_out = s->param_out, .elems = s->elems, .grad_kind = zpp_cuda_kind_of(s->grad_dtype),
        .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE,
        .consts = zpp_adam_consts_of(s, grad_scale),
    };
}

size_t zpp_adam_cuda_fill(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale,
                          struct zpp_adam_cuda_batch *batch, unsigned int *blocks) {
    size_t taken = 0;
    *blocks = 0;
    batch->segments_count = 0;
    for (; taken < segments_count && batch->segments_count < ZPP_ADAM_CUDA_SEGMENTS; ++taken) {
        if (segments[taken].elems == 0) continue;
        const size_t chunks = (segments[taken].elems - 1) / ZPP_ADAM_CUDA_CHUNK_ELEMS + 1;
        struct zpp_adam_cuda_segment *at = &batch->segments[batch->segments_count++];
        *at = describe(&segments[taken], grad_scale);
        at->first_block = *blocks;
        *blocks += (unsigned int)chunks; /* 2^31 blocks of 2^15 elements: more than any memory */
    }
    return taken;
}

struct job {
    const struct zpp_optim_segment *segments;
    size_t count;
    float grad_scale;
};

static size_t fill(const void *arg, size_t begin, void *batch, unsigned int *blocks) {
    const struct job *job = arg;
    return zpp_adam_cuda_fill(job->segments + begin, job->count - begin, job->grad_scale, batch, blocks);
}

zpp_status zpp_adam_step_cuda(zpp_device *device, void *native, const struct zpp_optim_segment *segments,
                              size_t segments_count, float grad_scale, struct zpp_err *err) {
    struct zpp_adam_cuda_batch batch = { 0 };
    const struct job job = { segments, segments_count, grad_scale };
    const struct zpp_launch_cuda_list list = { "zpp_adam_cuda", ZPP_ADAM_CUDA_THREADS, segments_count, fill, &job,
                                               &batch };
    return zpp_launch_cuda_list(device, native, &list, err);
}
