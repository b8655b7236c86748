/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of bytes on CUDA, moved by the threads of a block in the widest words that their addresses allow.
 */
#ifndef ZPP_OPS_COPY_WORDS_CUDA_H
#define ZPP_OPS_COPY_WORDS_CUDA_H

#include <stdint.h>

#if defined(__CUDACC__) || defined(ZPP_ON_CPU)
struct zpp_word16 {
    uint64_t low, high;
}
#ifdef __CUDACC__
__attribute__((aligned(16))) /* one load of 16 bytes, not two of 8 */
#endif
;

#define ZPP_WORDS(type, zero)                                                                             \
    for (uint64_t i = threadIdx.x; i < words; i += threads) {                                             \
        const type none = zero;                                                                           \
        ((type *)to)[i] = from ? ((const type *)from)[i] : none;                                          \
    }

/* `words` words of 16, 8, 4, 2 or 1 bytes; from NULL: zeros. */
static __device__ __forceinline__ void zpp_words_copy(void *to, const void *from, uint64_t words, uint32_t word_bytes,
                                                      unsigned int threads) {
    switch (word_bytes) {
    case 16: ZPP_WORDS(struct zpp_word16, { 0 }) break;
    case 8: ZPP_WORDS(uint64_t, 0) break;
    case 4: ZPP_WORDS(uint32_t, 0) break;
    case 2: ZPP_WORDS(uint16_t, 0) break;
    default: ZPP_WORDS(uint8_t, 0) break;
    }
}
#else
/* The widest word that divides all of them. */
static inline uint32_t zpp_words_bytes(uint64_t row_bytes, const void *a, const void *b, const void *c) {
    const uint64_t all = row_bytes | (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | 16;
    return (uint32_t)(all & (0 - all));
}
#endif

#endif
