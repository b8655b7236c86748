/* SPDX-License-Identifier: Apache-2.0
 *
 * Token moves on CUDA: the arguments of their kernels, shared by tokens_cuda.cu and the launcher tokens_cuda.c.
 */
#ifndef ZPP_OPS_TOKENS_CUDA_H
#define ZPP_OPS_TOKENS_CUDA_H

#include <stdint.h>

enum { ZPP_TOKENS_CUDA_THREADS = 128 };

struct zpp_tokens_cuda_args {
    int32_t *kept; /* read by moves, written by sample */
    const void *full, *part;
    void *out;
    uint64_t batch, seq, keep, row_words, seed, layer, first;
    uint32_t word_bytes; /* 16, 8, 4, 2 or 1: rows are moved in words, which all pointers are aligned to */
};

#endif
