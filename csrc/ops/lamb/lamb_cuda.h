/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB on CUDA: the arguments of its kernels, shared by lamb_cuda.cu, lamb_low_cuda.cu and the launcher lamb_cuda.c.
 */
#ifndef ZPP_OPS_LAMB_CUDA_H
#define ZPP_OPS_LAMB_CUDA_H

#include <stdint.h>

#include "../moments/low_cuda.h"
#include "lamb_body.h"

enum {
    ZPP_LAMB_CUDA_SEGMENTS = 32,     /* a launch: what fits the 4096 bytes that kernel arguments may have */
    ZPP_LAMB_CUDA_THREADS = 256,
    ZPP_LAMB_CUDA_LANES = 16,        /* as kernels.h and lamb.h have it; lamb_cuda.c compares */
    ZPP_LAMB_CUDA_BLOCK_ELEMS = 4096,
};

struct zpp_lamb_cuda_segment {
    float *param, *exp_avg, *exp_avg_sq;
    const void *grad;
    void *param_out;
    uint64_t elems;
    double lr, trust_least, trust_most;
    struct zpp_lamb_consts consts; /* its rate is found on the device */
    uint32_t first_block;          /* of the launch's blocks of 4096 elements */
    uint8_t grad_dtype, out_dtype; /* element_cuda.h */
};

struct zpp_lamb_cuda_batch {
    float *lanes;  /* [blocks][2][16]: squares of parameters and of updates that a lane adds up */
    double *sums;  /* [blocks][2] */
    float *rates;  /* [count]: lr r */
    double *norms; /* [taken][2], the result where there is no step */
    struct zpp_grad_scale scale;
    uint32_t count, blocks;
    uint32_t taken; /* segments, with those without elements, which have no place here */
    uint32_t places[ZPP_LAMB_CUDA_SEGMENTS]; /* of each in what was taken */
    struct zpp_lamb_cuda_segment segments[ZPP_LAMB_CUDA_SEGMENTS];
};

/* The same segments where moments are not fp32: for the first and the last of the four kernels. */
struct zpp_lamb_low_consts {
    struct zpp_lamb_consts lamb;
    const float *rate; /* on the device */
};

struct zpp_lamb_low_cuda_batch {
    struct zpp_low_cuda_segments list;
    struct zpp_lamb_low_consts consts[ZPP_LOW_CUDA_SEGMENTS];
    float *lanes;
    uint32_t blocks; /* of 4096 elements, and the first one of each segment: */
    uint32_t firsts[ZPP_LOW_CUDA_SEGMENTS];
};

#endif
