/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches SGD on CUDA (sgd_cuda.cu).
 */
#include "sgd_cuda.h"

#include "../element_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_sgd_consts) <= ZPP_LIST_CUDA_CONSTS_BYTES, "constants must fit their room");

struct job {
    const struct zpp_sgd_segment *segments;
    float grad_scale;
};

static void describe(const void *arg, size_t index, struct zpp_list_cuda_segment *segment, void *consts) {
    const struct job *job = arg;
    const struct zpp_sgd_segment *s = &job->segments[index];
    *segment = (struct zpp_list_cuda_segment){
        .param = s->param, .state = s->momentum_buffer, .grad = s->grad, .param_out = s->param_out, .elems = s->elems,
        .grad_kind = zpp_cuda_kind_of(s->grad_dtype),
        .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE,
    };
    *(struct zpp_sgd_consts *)consts = zpp_sgd_consts_of(s, job->grad_scale);
}

size_t zpp_sgd_cuda_fill(const struct zpp_sgd_segment *segments, size_t segments_count, float grad_scale,
                         struct zpp_sgd_cuda_batch *batch, unsigned int *blocks) {
    const struct job job = { segments, grad_scale };
    const struct zpp_list_cuda_source source = { "zpp_sgd_cuda", segments_count, sizeof batch->consts[0], describe,
                                                 &job };
    return zpp_list_cuda_fill(&source, 0, batch, blocks);
}

zpp_status zpp_sgd_step_cuda(zpp_device *device, void *native, const struct zpp_sgd_segment *segments,
                             size_t segments_count, float grad_scale, struct zpp_err *err) {
    const struct job job = { segments, grad_scale };
    const struct zpp_list_cuda_source source = { "zpp_sgd_cuda", segments_count, sizeof(struct zpp_sgd_consts),
                                                 describe, &job };
    return zpp_list_cuda_run(device, native, &source, err);
}
