/* SPDX-License-Identifier: Apache-2.0
 *
 * 0/1 Adam's step on CUDA: the arguments of the kernel, shared by zero_one_cuda.cu and the launcher zero_one_cuda.c.
 */
#ifndef ZPP_OPS_ZERO_ONE_CUDA_H
#define ZPP_OPS_ZERO_ONE_CUDA_H

#include <stdint.h>

#include "zero_one_body.h"

enum {
    ZPP_ZERO_ONE_CUDA_SEGMENTS = 39, /* a launch: what fits the 4096 bytes that kernel arguments may have */
    ZPP_ZERO_ONE_CUDA_THREADS = 256,
    ZPP_ZERO_ONE_CUDA_CHUNK_ELEMS = 32 * 1024, /* a block works on one chunk of one segment */
};

struct zpp_zero_one_cuda_segment {
    float *param, *exp_avg, *moved, *anchor; /* the last two: or NULL */
    const float *exp_avg_sq;
    const void *grad;
    void *param_out;
    uint64_t elems;
    struct zpp_zero_one_consts consts;
    uint32_t first_block; /* the block of the grid that has this segment's first chunk */
    uint8_t grad_kind, out_kind; /* element_cuda.h */
};

struct zpp_zero_one_cuda_batch {
    uint32_t count, padding;
    struct zpp_zero_one_cuda_segment segments[ZPP_ZERO_ONE_CUDA_SEGMENTS];
};

#endif
