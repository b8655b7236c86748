/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation on CUDA: the argument of its kernels, shared by quant_cuda.cu and the launcher quant_cuda.c.
 */
#ifndef ZPP_OPS_QUANT_CUDA_H
#define ZPP_OPS_QUANT_CUDA_H

#include <stdint.h>

#include "quant_body.h"

enum { ZPP_QUANT_CUDA_THREADS = 64, ZPP_QUANT_CUDA_PAIRS = 4096 }; /* pairs of elements a block dequantises */

struct zpp_quant_cuda_args {
    void *floats; /* read when quantised, written when dequantised */
    uint8_t *codes;
    float *scales, *mids; /* mids NULL: symmetric */
    uint64_t elems, block_elems;
    uint8_t kind, bits, accumulate; /* kind: element_cuda.h */
};

#endif
