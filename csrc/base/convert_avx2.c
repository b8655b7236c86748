/* SPDX-License-Identifier: Apache-2.0
 *
 * Conversions of convert.h, eight elements at once, then one at a time. There is no AVX-512 version: memory bandwidth
 * bounds these loops already.
 */
#include "convert.h"

#include <immintrin.h>

#include "dtype.h"

enum { LANES = 8 };

void zpp_convert_bf16_to_f32_avx2(void *dst_elems, const void *src_elems, size_t elems) {
    float *dst = dst_elems;
    const uint16_t *src = src_elems;
    size_t i = 0;
    for (; i + LANES <= elems; i += LANES) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(src + i)));
        _mm256_storeu_si256((__m256i *)(dst + i), _mm256_slli_epi32(wide, 16));
    }
    for (; i < elems; ++i) dst[i] = zpp_bf16_to_f32(src[i]);
}

/* zpp_bf16_from_f32 on eight lanes: add 0x7fff plus the lowest kept bit, and truncate; a NaN is truncated and made
 * quiet. */
static __m256i bf16_lanes(__m256i bits) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}

void zpp_convert_f32_to_bf16_avx2(void *dst_elems, const void *src_elems, size_t elems) {
    uint16_t *dst = dst_elems;
    const float *src = src_elems;
    size_t i = 0;
    for (; i + LANES <= elems; i += LANES) {
        const __m256i wide = bf16_lanes(_mm256_loadu_si256((const __m256i *)(src + i)));
        const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
        _mm_storeu_si128((__m128i *)(dst + i), narrow);
    }
    for (; i < elems; ++i) dst[i] = zpp_bf16_from_f32(src[i]);
}

void zpp_convert_f16_to_f32_avx2(void *dst_elems, const void *src_elems, size_t elems) {
    float *dst = dst_elems;
    const uint16_t *src = src_elems;
    size_t i = 0;
    for (; i + LANES <= elems; i += LANES) {
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
    }
    for (; i < elems; ++i) dst[i] = _cvtsh_ss(src[i]);
}

void zpp_convert_f32_to_f16_avx2(void *dst_elems, const void *src_elems, size_t elems) {
    uint16_t *dst = dst_elems;
    const float *src = src_elems;
    size_t i = 0;
    for (; i + LANES <= elems; i += LANES) {
        const __m128i narrow = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(dst + i), narrow);
    }
    for (; i < elems; ++i) dst[i] = (uint16_t)_cvtss_sh(src[i], _MM_FROUND_TO_NEAREST_INT);
}
