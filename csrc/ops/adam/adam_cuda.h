/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on CUDA: the argument of the kernel, shared by adam_cuda.cu and the launcher adam_cuda.c.
 */
#ifndef ZPP_OPS_ADAM_CUDA_H
#define ZPP_OPS_ADAM_CUDA_H

#include <stdint.h>

#include "adam_body.h"

/* A launch takes as many segments as fit the 4096 bytes that kernel arguments may have on every GPU and driver, so
 * nothing is copied to the device beforehand. A block works on one chunk of one segment. */
enum {
    ZPP_ADAM_CUDA_SEGMENTS = 32,
    ZPP_ADAM_CUDA_THREADS = 256,
    ZPP_ADAM_CUDA_UNROLL = 4,      /* elements in flight a thread: 16 loads, enough to cover memory's latency */
    ZPP_ADAM_CUDA_CHUNK_ELEMS = 32 * 1024,
};

struct zpp_adam_cuda_segment {
    float *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq; /* device memory; the last NULL without amsgrad */
    const void *grad;
    void *param_out;
    uint64_t elems;
    uint32_t first_block;     /* the block of the grid that has this segment's first chunk */
    uint8_t grad_kind, out_kind; /* element_cuda.h */
    struct zpp_adam_consts consts;
};

struct zpp_adam_cuda_batch {
    uint32_t segments_count, padding;
    struct zpp_adam_cuda_segment segments[ZPP_ADAM_CUDA_SEGMENTS];
};

#endif
