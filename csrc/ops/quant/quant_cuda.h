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
    uint8_t dtype, bits, accumulate; /* dtype: element_cuda.h */
};

/* Sums of several arrays: as many as fit the 4096 bytes of a kernel's arguments. */
enum { ZPP_QUANT_CUDA_SOURCES = 128 };

struct zpp_quant_sum_cuda_args {
    struct zpp_quant_cuda_args to; /* sum: floats and dtype are written; reduce: codes, scales and mids */
    uint64_t block_elems;          /* of the sources, as bits is */
    const uint64_t *halt;          /* NULL, or a word that is not 0 once nothing is to be written */
    float factor;
    uint32_t sources_count;
    uint8_t bits;
    struct {
        const uint8_t *codes;
        const float *scales, *mids; /* mids NULL: symmetric */
    } sources[ZPP_QUANT_CUDA_SOURCES];
};

#endif
