/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum of squares on CUDA: the argument of its kernels, shared by norm_cuda.cu and the launcher norm_cuda.c.
 */
#ifndef ZPP_OPS_NORM_CUDA_H
#define ZPP_OPS_NORM_CUDA_H

#include <stdint.h>

enum {
    ZPP_NORM_CUDA_SEGMENTS = 128,      /* a launch: what fits the 4096 bytes that kernel arguments may have */
    ZPP_NORM_CUDA_THREADS = 256,
    ZPP_NORM_CUDA_LANES = 32,          /* as norm.h has it, repeated for device code; norm_cuda.c compares */
    ZPP_NORM_CUDA_BLOCK_ELEMS = 4096,
};

struct zpp_norm_cuda_segment {
    const void *data;
    uint64_t elems;
    uint32_t first_block; /* of the launch's blocks of 4096 elements */
    uint32_t dtype;       /* element_cuda.h */
};

struct zpp_norm_cuda_batch {
    double *lanes; /* [blocks * 32]: what a lane adds up; then a block's sum in its first */
    double *sums;  /* [count]: of this launch's segments, as is the next */
    unsigned long long *nonfinite;
    uint32_t count, blocks;
    struct zpp_norm_cuda_segment segments[ZPP_NORM_CUDA_SEGMENTS];
};

#endif
