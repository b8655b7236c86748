/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches Adam on moments in bf16 or 8 bits on CUDA (adam_low_cuda.cu): segments in groups of 25, each group one grid
 * with a block a chunk.
 */
#include "adam_low_cuda.h"

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_adam_low_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert((int)ZPP_ADAM_LOW_CUDA_THREADS == (int)ZPP_MOMENTS_BLOCK_ELEMS, "a thread an element of a block");

static struct zpp_adam_low_cuda_segment describe(const struct zpp_adam_segment *s, float grad_scale) {
    struct zpp_adam_low_cuda_segment to = {
        .param = s->param, .grad = s->grad, .param_out = s->param_out, .elems = s->elems, .key = s->how.key,
        .index = (uint32_t)s->how.first_elems, .grad_kind = zpp_cuda_kind_of(s->grad_dtype),
        .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE,
        .moments = s->moments[ZPP_MOMENT_MAX].codes ? 3 : 2, .int8 = s->how.kind == ZPP_MOMENTS_INT8,
        .consts = zpp_adam_consts_of(s, grad_scale),
    };
    for (int k = 0; k < 3; ++k) to.codes[k] = s->moments[k].codes, to.scales[k] = s->moments[k].scales;
    return to;
}

size_t zpp_adam_low_cuda_fill(const struct zpp_adam_segment *segments, size_t segments_count, float grad_scale,
                              struct zpp_adam_low_cuda_batch *batch, unsigned int *blocks) {
    size_t taken = 0;
    *blocks = 0;
    batch->segments_count = 0;
    for (; taken < segments_count && batch->segments_count < ZPP_ADAM_LOW_CUDA_SEGMENTS; ++taken) {
        const struct zpp_adam_segment *s = &segments[taken];
        if (s->elems == 0) continue;
        const size_t line = s->elems + s->how.first_elems % ZPP_MOMENTS_BLOCK_ELEMS;
        struct zpp_adam_low_cuda_segment *at = &batch->segments[batch->segments_count++];
        *at = describe(s, grad_scale);
        at->first_block = *blocks;
        *blocks += (unsigned int)((line - 1) / ZPP_ADAM_LOW_CUDA_CHUNK_ELEMS + 1);
    }
    return taken;
}

struct job {
    const struct zpp_adam_segment *segments;
    size_t count;
    float grad_scale;
};

static size_t fill(const void *arg, size_t begin, void *batch, unsigned int *blocks) {
    const struct job *job = arg;
    return zpp_adam_low_cuda_fill(job->segments + begin, job->count - begin, job->grad_scale, batch, blocks);
}

zpp_status zpp_adam_low_step_cuda(zpp_device *device, void *native, const struct zpp_adam_segment *segments,
                                  size_t segments_count, float grad_scale, struct zpp_err *err) {
    struct zpp_adam_low_cuda_batch batch = { 0 };
    const struct job job = { segments, segments_count, grad_scale };
    const struct zpp_launch_cuda_list list = { "zpp_adam_low_cuda", ZPP_ADAM_LOW_CUDA_THREADS, segments_count, fill, &job,
                                               &batch };
    return zpp_launch_cuda_list(device, native, &list, err);
}
