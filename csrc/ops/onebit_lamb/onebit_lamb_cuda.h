/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms on CUDA: the arguments of its kernels, shared by onebit_lamb_cuda.cu and the
 * launcher onebit_lamb_cuda.c.
 */
#ifndef ZPP_OPS_ONEBIT_LAMB_CUDA_H
#define ZPP_OPS_ONEBIT_LAMB_CUDA_H

#include <stdint.h>

#include "onebit_lamb_body.h"

enum {
    ZPP_ONEBIT_LAMB_CUDA_SEGMENTS = 40,     /* a launch: what fits the 4096 bytes that kernel arguments may have */
    ZPP_ONEBIT_LAMB_CUDA_THREADS = 256,
    ZPP_ONEBIT_LAMB_CUDA_LANES = 16,        /* as kernels.h and onebit_lamb.h have it; onebit_lamb_cuda.c compares */
    ZPP_ONEBIT_LAMB_CUDA_BLOCK_ELEMS = 4096,
};

struct zpp_onebit_lamb_cuda_segment {
    const float *param, *exp_avg, *before, *exp_avg_sq;
    float *fresh_sq;
    uint64_t elems;
    struct zpp_onebit_lamb_consts consts;
    uint32_t first_block; /* of the launch's blocks of 4096 elements; of one without elements, that of the next */
};

struct zpp_onebit_lamb_cuda_batch {
    struct zpp_onebit_lamb_lane *lanes; /* [blocks][16] */
    double *block_sums;                 /* [blocks][2] */
    float *block_largest;               /* [blocks] */
    double *sums;                       /* [count][2], the result */
    float *largest;                     /* [count], the result */
    uint32_t count, blocks;
    struct zpp_onebit_lamb_cuda_segment segments[ZPP_ONEBIT_LAMB_CUDA_SEGMENTS];
};

#endif
