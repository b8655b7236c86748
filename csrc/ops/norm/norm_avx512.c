/* SPDX-License-Identifier: Apache-2.0
 *
 * Sum of squares with AVX-512: the 32 lanes are four registers of eight doubles.
 */
#include "kernels.h"

#include <immintrin.h>

enum { LANES = ZPP_NORM_LANES, GROUPS = LANES / 8 };

#define INLINE static inline __attribute__((always_inline))

INLINE __m512d load_eight(const void *data, size_t i, const zpp_dtype dtype) {
    if (dtype == ZPP_F32) return _mm512_cvtps_pd(_mm256_loadu_ps((const float *)data + i));
    const __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)data + i));
    if (dtype == ZPP_F16) return _mm512_cvtps_pd(_mm256_cvtph_ps(half));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
}

INLINE double block(const void *data, size_t elems, const zpp_dtype dtype) {
    __m512d sums[GROUPS]; /* lanes 8g..8g+7 */
    for (int g = 0; g < GROUPS; ++g) sums[g] = _mm512_setzero_pd();
    size_t i = 0;
    for (; i + LANES <= elems; i += LANES) {
        for (size_t g = 0; g < GROUPS; ++g) {
            const __m512d x = load_eight(data, i + 8 * g, dtype);
            sums[g] = _mm512_fmadd_pd(x, x, sums[g]);
        }
    }
    double lanes[LANES];
    for (int g = 0; g < GROUPS; ++g) _mm512_storeu_pd(lanes + 8 * g, sums[g]);
    return zpp_norm_finish(lanes, data, dtype, i, elems);
}

double zpp_norm_avx512(const void *data, zpp_dtype dtype, size_t elems) {
    switch (dtype) {
    case ZPP_BF16: return block(data, elems, ZPP_BF16);
    case ZPP_F16: return block(data, elems, ZPP_F16);
    default: return block(data, elems, ZPP_F32);
    }
}
