/* SPDX-License-Identifier: Apache-2.0
 *
 * Moves of rows over the memory of several GPUs: the argument of their kernels, shared by peers_cuda.cu and the
 * launcher peers_cuda.c.
 */
#ifndef ZPP_OPS_MOE_PEERS_CUDA_H
#define ZPP_OPS_MOE_PEERS_CUDA_H

#include <stdint.h>

enum {
    ZPP_PEERS_CUDA_THREADS = 128,
    ZPP_PEERS_CUDA_WIDE = 8, /* elements that a thread loads at once, where addresses and width allow it */
    ZPP_PEERS_CUDA_LANES = 16, /* as kernels.h has it; peers_cuda.c compares this and the next */
    ZPP_PEERS_CUDA_RANKS = 64,
};

struct zpp_peers_cuda_taken {
    int32_t assignment, row; /* struct zpp_moe_taken */
};

struct zpp_peers_cuda_args {
    const uint64_t *halt; /* NULL, or a word that is not 0 once the group has failed: then nothing is written */
    const struct zpp_peers_cuda_taken *taken;
    const int64_t *slots;
    const void *made;     /* of the scaled gather: what `values` are products with */
    const float *weights; /* of a sum; NULL: all 1 */
    void *out;
    float *values; /* products of a scaled gather (NULL: none), or picked numbers */
    uint64_t k, width_elems, row_words, count; /* count: of picked numbers */
    uint32_t word_bytes;                       /* copy_words_cuda.h */
    uint8_t dtype;                             /* element_cuda.h */
    uint8_t wide; /* rows begin at multiples of 16 bytes and have whole ZPP_PEERS_CUDA_WIDE elements */
    int64_t starts[ZPP_PEERS_CUDA_RANKS + 1];
    const void *bases[ZPP_PEERS_CUDA_RANKS];
    const float *weights_of[ZPP_PEERS_CUDA_RANKS];
};

#endif
