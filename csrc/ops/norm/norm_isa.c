/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum of squares of one block, compiled once for each instruction set. The 32 lanes are four registers of eight
 * doubles with AVX-512, eight of four with AVX2 and sixteen of two with NEON, enough to hide the latency of an
 * addition.
 */
#include "kernels.h"

#include "../element.h"

/* Adds elements [begin, elems), begin being a multiple of the lanes, then the lanes. */
static double finish(double lanes[ZPP_NORM_LANES], const void *data, zpp_dtype dtype, size_t begin, size_t elems) {
    for (size_t i = begin; i < elems; ++i) {
        const double x = zpp_element_load(data, dtype, i);
        lanes[i % ZPP_NORM_LANES] += x * x;
    }
    return zpp_norm_add_lanes(lanes);
}

#if ZPP_LANES == 1

static double block(const void *data, zpp_dtype dtype, size_t elems) {
    double lanes[ZPP_NORM_LANES] = { 0 };
    return finish(lanes, data, dtype, 0, elems);
}

#else

#if ZPP_ISA_NEON
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

enum { LANES = ZPP_NORM_LANES, GROUPS = LANES / 8 };

#define INLINE static inline __attribute__((always_inline))

#if ZPP_ISA_NEON
typedef struct { float64x2_t at[4]; } v8d;
typedef struct { float32x4_t low, high; } v8f;
INLINE v8d v8d_zero(void) {
    const float64x2_t zero = vdupq_n_f64(0.0);
    return (v8d){ { zero, zero, zero, zero } };
}
INLINE void v8d_store(double *to, v8d a) {
    for (int k = 0; k < 4; ++k) vst1q_f64(to + 2 * k, a.at[k]);
}
INLINE v8d v8d_add_squares(v8d sums, v8f values) {
    const float64x2_t x[4] = { vcvt_f64_f32(vget_low_f32(values.low)), vcvt_high_f64_f32(values.low),
                               vcvt_f64_f32(vget_low_f32(values.high)), vcvt_high_f64_f32(values.high) };
    for (int k = 0; k < 4; ++k) sums.at[k] = vfmaq_f64(sums.at[k], x[k], x[k]);
    return sums;
}
INLINE v8f load_eight(const void *data, size_t i, const zpp_dtype dtype) {
    if (dtype == ZPP_F32) return (v8f){ vld1q_f32((const float *)data + i), vld1q_f32((const float *)data + i + 4) };
    const uint16x8_t half = vld1q_u16((const uint16_t *)data + i);
    const float16x8_t floats = vreinterpretq_f16_u16(half);
    if (dtype == ZPP_F16) return (v8f){ vcvt_f32_f16(vget_low_f16(floats)), vcvt_high_f32_f16(floats) };
    return (v8f){ vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16)),
                  vreinterpretq_f32_u32(vshll_high_n_u16(half, 16)) };
}
#else
#if defined(__AVX512F__)
typedef __m512d v8d;
INLINE v8d v8d_zero(void) { return _mm512_setzero_pd(); }
INLINE void v8d_store(double *to, v8d a) { _mm512_storeu_pd(to, a); }
INLINE v8d v8d_add_squares(v8d sums, __m256 values) {
    const __m512d x = _mm512_cvtps_pd(values);
    return _mm512_fmadd_pd(x, x, sums);
}
#else
typedef struct { __m256d low, high; } v8d;
INLINE v8d v8d_zero(void) { return (v8d){ _mm256_setzero_pd(), _mm256_setzero_pd() }; }
INLINE void v8d_store(double *to, v8d a) { _mm256_storeu_pd(to, a.low), _mm256_storeu_pd(to + 4, a.high); }
INLINE v8d v8d_add_squares(v8d sums, __m256 values) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
    return (v8d){ _mm256_fmadd_pd(low, low, sums.low), _mm256_fmadd_pd(high, high, sums.high) };
}
#endif

INLINE __m256 load_eight(const void *data, size_t i, const zpp_dtype dtype) {
    if (dtype == ZPP_F32) return _mm256_loadu_ps((const float *)data + i);
    const __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)data + i));
    if (dtype == ZPP_F16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
#endif

INLINE double block_of(const void *data, size_t elems, const zpp_dtype dtype) {
    v8d sums[GROUPS]; /* lanes 8g..8g+7 */
    for (int g = 0; g < GROUPS; ++g) sums[g] = v8d_zero();
    size_t i = 0;
    for (; i + LANES <= elems; i += LANES) {
        for (size_t g = 0; g < GROUPS; ++g) sums[g] = v8d_add_squares(sums[g], load_eight(data, i + 8 * g, dtype));
    }
    double lanes[LANES];
    for (int g = 0; g < GROUPS; ++g) v8d_store(lanes + 8 * g, sums[g]);
    return finish(lanes, data, dtype, i, elems);
}

static double block(const void *data, zpp_dtype dtype, size_t elems) {
    switch (dtype) {
    case ZPP_BF16: return block_of(data, elems, ZPP_BF16);
    case ZPP_F16: return block_of(data, elems, ZPP_F16);
    default: return block_of(data, elems, ZPP_F32);
    }
}

#endif

const struct zpp_norm_kernels ZPP_ISA_NAME(zpp_norm) = { block };
