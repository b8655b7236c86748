/* SPDX-License-Identifier: Apache-2.0
 *
 * 8-bit floats on CUDA: the argument of their kernels, shared by fp8_cuda.cu and the launcher fp8_cuda.c.
 */
#ifndef ZPP_OPS_QUANT_FP8_CUDA_H
#define ZPP_OPS_QUANT_FP8_CUDA_H

#include <stdint.h>

enum { ZPP_FP8_CUDA_THREADS = 64, ZPP_FP8_CUDA_ELEMS = 4096 }; /* elements a block dequantises */

struct zpp_fp8_cuda_args {
    void *floats; /* read when quantised, written when dequantised */
    uint8_t *codes;
    float *scales;
    uint64_t elems, block_elems;
    uint8_t dtype, format, accumulate; /* dtype: element_cuda.h */
};

#endif
