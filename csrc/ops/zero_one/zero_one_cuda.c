/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches 0/1 Adam's step on CUDA (zero_one_cuda.cu): segments in groups of 39, each one grid with a block a chunk.
 */
#include "zero_one_cuda.h"

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_zero_one_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");

size_t zpp_zero_one_cuda_fill(const struct zpp_zero_one_segment *segments, size_t segments_count, float grad_scale,
                              struct zpp_zero_one_cuda_batch *batch, unsigned int *blocks) {
    size_t taken = 0;
    *blocks = 0;
    batch->count = 0;
    for (; taken < segments_count && batch->count < ZPP_ZERO_ONE_CUDA_SEGMENTS; ++taken) {
        const struct zpp_zero_one_segment *s = &segments[taken];
        if (s->elems == 0) continue; /* the next one takes its place */
        batch->segments[batch->count++] = (struct zpp_zero_one_cuda_segment){
            .param = s->param, .exp_avg = s->exp_avg, .moved = s->moved, .anchor = s->decay != 0.0 ? s->anchor : NULL,
            .exp_avg_sq = s->exp_avg_sq, .grad = s->grad, .param_out = s->param_out, .elems = s->elems,
            .consts = zpp_zero_one_consts_of(s, grad_scale), .first_block = *blocks,
            .grad_kind = zpp_cuda_kind_of(s->grad_dtype),
            .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE };
        /* 2^31 blocks of 2^15 elements: more than any memory */
        *blocks += (unsigned int)((s->elems - 1) / ZPP_ZERO_ONE_CUDA_CHUNK_ELEMS + 1);
    }
    return taken;
}

struct job {
    const struct zpp_zero_one_segment *segments;
    size_t count;
    float grad_scale;
};

static size_t fill(const void *arg, size_t begin, void *batch, unsigned int *blocks) {
    const struct job *job = arg;
    return zpp_zero_one_cuda_fill(job->segments + begin, job->count - begin, job->grad_scale, batch, blocks);
}

zpp_status zpp_zero_one_step_cuda(zpp_device *device, void *native, const struct zpp_zero_one_segment *segments,
                                  size_t segments_count, float grad_scale, struct zpp_err *err) {
    const struct job job = { segments, segments_count, grad_scale };
    struct zpp_zero_one_cuda_batch batch = { .count = 0 };
    const struct zpp_launch_cuda_list list = { "zpp_zero_one_cuda", ZPP_ZERO_ONE_CUDA_THREADS, segments_count, fill,
                                               &job, &batch };
    return zpp_launch_cuda_list(device, native, &list, err);
}
