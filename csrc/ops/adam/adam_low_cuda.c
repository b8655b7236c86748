/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches Adam on moments in bf16 or 8 bits on CUDA (adam_low_cuda.cu).
 */
#include "adam_low_cuda.h"

#include "../element_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_adam_consts) <= ZPP_LOW_CUDA_CONSTS_BYTES, "constants must fit their room");

struct job {
    const struct zpp_optim_segment *segments;
    float grad_scale;
};

static void describe(const void *arg, size_t index, struct zpp_low_cuda_segment *segment, void *consts) {
    const struct job *job = arg;
    const struct zpp_optim_segment *s = &job->segments[index];
    *segment = (struct zpp_low_cuda_segment){
        .param = s->param, .grad = s->grad, .param_out = s->param_out, .elems = s->elems,
        .grad_kind = zpp_cuda_kind_of(s->grad_dtype),
        .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE,
    };
    zpp_low_cuda_hold(segment, &s->how, s->moments, s->moments[ZPP_MOMENT_MAX].codes ? 3 : 2, ZPP_MOMENT_FIRST);
    *(struct zpp_adam_consts *)consts = zpp_adam_consts_of(s, job->grad_scale);
}

size_t zpp_adam_low_cuda_fill(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale,
                              struct zpp_adam_low_cuda_batch *batch, unsigned int *blocks) {
    const struct job job = { segments, grad_scale };
    const struct zpp_low_cuda_source source = { "zpp_adam_low_cuda", segments_count, sizeof batch->consts[0], describe,
                                                &job };
    return zpp_low_cuda_fill(&source, 0, batch, blocks);
}

zpp_status zpp_adam_low_step_cuda(zpp_device *device, void *native, const struct zpp_optim_segment *segments,
                                  size_t segments_count, float grad_scale, struct zpp_err *err) {
    const struct job job = { segments, grad_scale };
    const struct zpp_low_cuda_source source = { "zpp_adam_low_cuda", segments_count, sizeof(struct zpp_adam_consts),
                                                describe, &job };
    return zpp_low_cuda_run(device, native, &source, err);
}
