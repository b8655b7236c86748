/* SPDX-License-Identifier: Apache-2.0
 *
 * The launches of a step over a list on CUDA, of an optimizer with at most one state. Included once a file, after
 *
 *     LAUNCH_KERNEL, LAUNCH_LOW_KERNEL                   names of its kernels: state in fp32, and in fewer bits
 *     LAUNCH_SEGMENT, LAUNCH_CONSTS                      its structs
 *     LAUNCH_STATE                                       the segment's field for the state in fp32
 *     LAUNCH_WHICH                                       which moment the state is where it is not fp32
 *     LAUNCH_CONSTS launch_consts_of(const LAUNCH_SEGMENT *, float grad_scale)
 *
 * It gives launch_step(); and for tests launch_fill() and launch_low_fill(), which pack as many segments as one launch
 * takes, and return how many.
 */
#ifndef ZPP_OPS_LIST_LAUNCH_CUDA_H
#define ZPP_OPS_LIST_LAUNCH_CUDA_H

#include "element_cuda.h"
#include "list_cuda.h"
#include "moments/low_cuda.h"

_Static_assert(sizeof(LAUNCH_CONSTS) <= ZPP_LIST_CUDA_CONSTS_BYTES, "constants must fit their room");
_Static_assert(sizeof(LAUNCH_CONSTS) <= ZPP_LOW_CUDA_CONSTS_BYTES, "constants must fit their room");

struct launch_job {
    const LAUNCH_SEGMENT *segments;
    float grad_scale;
};

static void launch_describe(const void *arg, size_t index, struct zpp_list_cuda_segment *segment, void *consts) {
    const struct launch_job *job = arg;
    const LAUNCH_SEGMENT *s = &job->segments[index];
    *segment = (struct zpp_list_cuda_segment){
        .param = s->param, .state = s->LAUNCH_STATE, .grad = s->grad, .param_out = s->param_out, .elems = s->elems,
        .grad_kind = zpp_cuda_kind_of(s->grad_dtype),
        .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE,
    };
    *(LAUNCH_CONSTS *)consts = launch_consts_of(s, job->grad_scale);
}

static void launch_describe_low(const void *arg, size_t index, struct zpp_low_cuda_segment *segment, void *consts) {
    const struct launch_job *job = arg;
    const LAUNCH_SEGMENT *s = &job->segments[index];
    *segment = (struct zpp_low_cuda_segment){
        .param = s->param, .grad = s->grad, .param_out = s->param_out, .elems = s->elems,
        .grad_kind = zpp_cuda_kind_of(s->grad_dtype),
        .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE,
    };
    zpp_low_cuda_hold(segment, &s->how, &s->moment, 1, LAUNCH_WHICH);
    *(LAUNCH_CONSTS *)consts = launch_consts_of(s, job->grad_scale);
}

static size_t launch_fill(const LAUNCH_SEGMENT *segments, size_t segments_count, float grad_scale, void *batch,
                          unsigned int *blocks) {
    const struct launch_job job = { segments, grad_scale };
    const struct zpp_list_cuda_source source = { LAUNCH_KERNEL, segments_count, sizeof(LAUNCH_CONSTS), launch_describe,
                                                 &job };
    return zpp_list_cuda_fill(&source, 0, batch, blocks);
}

static size_t launch_low_fill(const LAUNCH_SEGMENT *segments, size_t segments_count, float grad_scale, void *batch,
                              unsigned int *blocks) {
    const struct launch_job job = { segments, grad_scale };
    const struct zpp_low_cuda_source source = { LAUNCH_LOW_KERNEL, segments_count, sizeof(LAUNCH_CONSTS),
                                                launch_describe_low, &job };
    return zpp_low_cuda_fill(&source, 0, batch, blocks);
}

static zpp_status launch_step(zpp_device *device, void *native, const LAUNCH_SEGMENT *segments, size_t segments_count,
                              float grad_scale, struct zpp_err *err) {
    const struct launch_job job = { segments, grad_scale };
    const struct zpp_list_cuda_source source = { LAUNCH_KERNEL, segments_count, sizeof(LAUNCH_CONSTS), launch_describe,
                                                 &job };
    const struct zpp_low_cuda_source low = { LAUNCH_LOW_KERNEL, segments_count, sizeof(LAUNCH_CONSTS),
                                             launch_describe_low, &job };
    const bool is_low = segments_count && segments[0].how.kind != ZPP_MOMENTS_F32; /* all are alike */
    return is_low ? zpp_low_cuda_run(device, native, &low, err) : zpp_list_cuda_run(device, native, &source, err);
}

#endif
