/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches the step with a frozen variance on CUDA (frozen_cuda.cu).
 */
#include "frozen_cuda.h"

#include "../element_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_frozen_consts) <= ZPP_LIST_CUDA_CONSTS_BYTES, "constants must fit their room");

static void describe(const void *arg, size_t index, struct zpp_list_cuda_segment *segment, void *consts) {
    const struct zpp_frozen_segment *s = (const struct zpp_frozen_segment *)arg + index;
    *segment = (struct zpp_list_cuda_segment){
        .param = s->param, .state = (float *)(uintptr_t)s->exp_avg_sq, .grad = s->exp_avg, .param_out = s->param_out,
        .elems = s->elems, .grad_kind = ZPP_CUDA_F32,
        .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE,
    };
    *(struct zpp_frozen_consts *)consts = zpp_frozen_consts_of(s);
}

static struct zpp_list_cuda_source source_of(const struct zpp_frozen_segment *segments, size_t segments_count) {
    return (struct zpp_list_cuda_source){ "zpp_frozen_cuda", segments_count, sizeof(struct zpp_frozen_consts), describe,
                                          segments };
}

size_t zpp_frozen_cuda_fill(const struct zpp_frozen_segment *segments, size_t segments_count,
                            struct zpp_frozen_cuda_batch *batch, unsigned int *blocks) {
    const struct zpp_list_cuda_source source = source_of(segments, segments_count);
    return zpp_list_cuda_fill(&source, 0, batch, blocks);
}

zpp_status zpp_frozen_step_cuda(zpp_device *device, void *native, const struct zpp_frozen_segment *segments,
                                size_t segments_count, struct zpp_err *err) {
    const struct zpp_list_cuda_source source = source_of(segments, segments_count);
    return zpp_list_cuda_run(device, native, &source, err);
}
