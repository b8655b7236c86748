/* SPDX-License-Identifier: Apache-2.0
 *
 * Sixteen fp32 lanes, spelled once for AVX2 (two registers), AVX-512 (one) and NEON (four, vec16_neon.h), so that a
 * kernel's vector text stands once and is compiled for each. Included by files of one instruction set only. Every
 * function does what its scalar counterpart does, with the same bits; nothing here fuses a multiply and an add but
 * v16_fma, as fmaf does. h16 are sixteen 16-bit elements, b16 sixteen bytes.
 *
 * 16-bit dtypes convert as zpp_bf16_from_f32 and zpp_f16_from_f32 do (AVX512_BF16 flushes subnormals: not used).
 */
#ifndef ZPP_OPS_VEC16_H
#define ZPP_OPS_VEC16_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/dtype.h"
#include "isa.h"

#define V16_FN static inline __attribute__((always_inline, unused))
enum { V16_LANES = 16 };

#if ZPP_ISA_NEON
#include "vec16_neon.h"
#else
#include <immintrin.h>

typedef __m256i h16;
typedef __m128i b16;
V16_FN h16 h16_load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
V16_FN void h16_store(void *to, h16 a) { _mm256_storeu_si256((__m256i *)to, a); }
V16_FN void h16_stream(void *to, h16 a) { _mm256_stream_si256((__m256i *)to, a); } /* aligned to 32 bytes */
V16_FN b16 b16_load(const void *from) { return _mm_loadu_si128((const __m128i *)from); }
V16_FN void b16_store(void *to, b16 a) { _mm_storeu_si128((__m128i *)to, a); }
#endif

#if defined(__AVX512F__)

typedef __m512 v16;
V16_FN v16 v16_set1(float value) { return _mm512_set1_ps(value); }
V16_FN v16 v16_load(const float *from) { return _mm512_loadu_ps(from); }
V16_FN void v16_store(float *to, v16 a) { _mm512_storeu_ps(to, a); }
V16_FN void v16_stream(float *to, v16 a) { _mm512_stream_ps(to, a); } /* `to` aligned to 64 bytes */
V16_FN v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
V16_FN v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
V16_FN v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
V16_FN v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
V16_FN v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
V16_FN v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
V16_FN v16 v16_sqrt(v16 a) { return _mm512_sqrt_ps(a); }
V16_FN v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
/* `a`, and 0 in lanes where x < least (a NaN is not). */
V16_FN v16 v16_zero_below(v16 a, v16 x, v16 least) {
    return _mm512_mask_mov_ps(_mm512_setzero_ps(), _mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), a);
}
/* `a`, and 0 in lanes where x is 0 (a NaN is not). */
V16_FN v16 v16_zero_at_zero(v16 a, v16 x) {
    return _mm512_mask_mov_ps(_mm512_setzero_ps(), _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ), a);
}
V16_FN v16 v16_abs(v16 a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MAX)));
}
/* The greater by bits as signed integers: for magnitudes the greater number, and a NaN beats all. */
V16_FN v16 v16_max_bits(v16 a, v16 b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
V16_FN float v16_greatest(v16 a) { return _mm512_reduce_max_ps(a); } /* of numbers; which zero wins is not promised */
V16_FN float v16_least(v16 a) { return _mm512_reduce_min_ps(a); }
V16_FN uint32_t v16_greatest_bits(v16 a) { return (uint32_t)_mm512_reduce_max_epi32(_mm512_castps_si512(a)); }
V16_FN v16 v16_halved(v16 a) { return _mm512_shuffle_f32x4(a, a, _MM_SHUFFLE(1, 0, 3, 2)); } /* lane l is l + 8 */
V16_FN v16 v16_add_tree(v16 a) {
    a = _mm512_add_ps(a, v16_halved(a));
    a = _mm512_add_ps(a, _mm512_shuffle_f32x4(a, a, _MM_SHUFFLE(2, 3, 0, 1)));
    a = _mm512_add_ps(a, _mm512_permute_ps(a, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm512_add_ps(a, _mm512_permute_ps(a, _MM_SHUFFLE(2, 3, 0, 1)));
}
V16_FN v16 v16_max_tree(v16 a) {
    a = _mm512_max_ps(a, v16_halved(a));
    a = _mm512_max_ps(a, _mm512_shuffle_f32x4(a, a, _MM_SHUFFLE(2, 3, 0, 1)));
    a = _mm512_max_ps(a, _mm512_permute_ps(a, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm512_max_ps(a, _mm512_permute_ps(a, _MM_SHUFFLE(2, 3, 0, 1)));
}
V16_FN float v16_lane0(v16 a) { return _mm512_cvtss_f32(a); }
V16_FN __mmask16 v16_few(size_t count) { return (__mmask16)(count < V16_LANES ? (1u << count) - 1 : UINT16_MAX); }
V16_FN v16 v16_first(v16 a, size_t count) { return _mm512_mask_mov_ps(_mm512_setzero_ps(), v16_few(count), a); }
V16_FN v16 v16_load_first(const float *from, size_t count, v16 rest) {
    return _mm512_mask_loadu_ps(rest, v16_few(count), from);
}
V16_FN v16 v16_without(v16 a, size_t lane) {
    return _mm512_mask_mov_ps(a, (__mmask16)(1u << lane), _mm512_set1_ps(-INFINITY));
}
V16_FN uint16_t v16_equal(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
/* Bit l: lane l >= 0 (no for NaN, yes for -0). */
V16_FN uint16_t v16_not_negative(v16 a) { return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GE_OQ); }
/* +a where the lane's bit is set, -a elsewhere. */
V16_FN v16 v16_signed(v16 a, uint16_t positive) {
    const __m512i bits = _mm512_castps_si512(a);
    return _mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, (__mmask16)~positive, bits, _mm512_set1_epi32(INT32_MIN)));
}
/* `a` with the sign of b where b is a number other than zero; b itself elsewhere. a >= 0. */
V16_FN v16 v16_step(v16 a, v16 b) {
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(b), _mm512_set1_epi32(INT32_MIN));
    const v16 step = _mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_castps_si512(a)));
    return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(b, _mm512_setzero_ps(), _CMP_NEQ_OQ), step);
}
/* The greater; a NaN on either side stays. */
V16_FN v16 v16_maximum(v16 a, v16 b) {
    const __mmask16 greater = _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps((__mmask16)(greater | is_nan), b, a);
}
/* To nearest even, then saturated to int8. */
V16_FN __m128i v16_to_i8(v16 a) { return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)); }
V16_FN __m256i v16_pair_to_i8(v16 a, v16 b) { return _mm256_set_m128i(v16_to_i8(b), v16_to_i8(a)); }
V16_FN v16 v16_from_i8(__m128i a) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a)); }
V16_FN v16 v16_load_i8(const void *from) { return v16_from_i8(_mm_loadu_si128((const __m128i *)from)); }
V16_FN v16 v16_from_bf16(__m256i a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16)); }
V16_FN v16 v16_from_f16(__m256i a) { return _mm512_cvtph_ps(a); }
V16_FN __m256i v16_to_f16(v16 a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT); }
V16_FN __m256i v16_to_bf16(v16 a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16));
}

#elif !ZPP_ISA_NEON

typedef struct { __m256 lo, hi; } v16;
#define V16_BOTH(expression_lo, expression_hi) ((v16){(expression_lo), (expression_hi)})
V16_FN v16 v16_set1(float value) { return V16_BOTH(_mm256_set1_ps(value), _mm256_set1_ps(value)); }
V16_FN v16 v16_load(const float *from) { return V16_BOTH(_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)); }
V16_FN void v16_store(float *to, v16 a) { _mm256_storeu_ps(to, a.lo), _mm256_storeu_ps(to + 8, a.hi); }
V16_FN void v16_stream(float *to, v16 a) { _mm256_stream_ps(to, a.lo), _mm256_stream_ps(to + 8, a.hi); }
V16_FN v16 v16_add(v16 a, v16 b) { return V16_BOTH(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)); }
V16_FN v16 v16_sub(v16 a, v16 b) { return V16_BOTH(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)); }
V16_FN v16 v16_mul(v16 a, v16 b) { return V16_BOTH(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)); }
V16_FN v16 v16_div(v16 a, v16 b) { return V16_BOTH(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)); }
V16_FN v16 v16_min(v16 a, v16 b) { return V16_BOTH(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)); }
V16_FN v16 v16_max(v16 a, v16 b) { return V16_BOTH(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)); }
V16_FN v16 v16_sqrt(v16 a) { return V16_BOTH(_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)); }
V16_FN v16 v16_fma(v16 a, v16 b, v16 c) {
    return V16_BOTH(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
V16_FN v16 v16_zero_below(v16 a, v16 x, v16 least) {
    return V16_BOTH(_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, least.lo, _CMP_NLT_UQ)),
                    _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, least.hi, _CMP_NLT_UQ)));
}
V16_FN v16 v16_zero_at_zero(v16 a, v16 x) {
    return V16_BOTH(_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, _mm256_setzero_ps(), _CMP_NEQ_UQ)),
                    _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
}
V16_FN v16 v16_abs(v16 a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return V16_BOTH(_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask));
}
V16_FN __m256 v8_max_bits(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
V16_FN v16 v16_max_bits(v16 a, v16 b) { return V16_BOTH(v8_max_bits(a.lo, b.lo), v8_max_bits(a.hi, b.hi)); }
V16_FN float v16_greatest(v16 a) {
    __m256 m = _mm256_max_ps(a.lo, a.hi);
    m = _mm256_max_ps(m, _mm256_permute2f128_ps(m, m, 1));
    m = _mm256_max_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm256_cvtss_f32(_mm256_max_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(2, 3, 0, 1))));
}
V16_FN float v16_least(v16 a) {
    __m256 m = _mm256_min_ps(a.lo, a.hi);
    m = _mm256_min_ps(m, _mm256_permute2f128_ps(m, m, 1));
    m = _mm256_min_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm256_cvtss_f32(_mm256_min_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(2, 3, 0, 1))));
}
V16_FN uint32_t v16_greatest_bits(v16 a) {
    __m256i m = _mm256_max_epi32(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi));
    m = _mm256_max_epi32(m, _mm256_permute2x128_si256(m, m, 1));
    m = _mm256_max_epi32(m, _mm256_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm256_max_epi32(m, _mm256_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return (uint32_t)_mm256_cvtsi256_si32(m);
}
/* In lane 0: of lanes l and l + 8, of those l and l + 4, ..., as scalar versions do; a NaN goes their way, too. */
V16_FN v16 v16_add_tree(v16 a) {
    __m256 m = _mm256_add_ps(a.lo, a.hi);
    m = _mm256_add_ps(m, _mm256_permute2f128_ps(m, m, 1));
    m = _mm256_add_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm256_add_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return V16_BOTH(m, m);
}
V16_FN v16 v16_max_tree(v16 a) {
    __m256 m = _mm256_max_ps(a.lo, a.hi);
    m = _mm256_max_ps(m, _mm256_permute2f128_ps(m, m, 1));
    m = _mm256_max_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm256_max_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return V16_BOTH(m, m);
}
V16_FN float v16_lane0(v16 a) { return _mm256_cvtss_f32(a.lo); }
V16_FN __m256i v8_few(size_t count, int first) { /* of eight lanes from `first` on: all ones where below count */
    const __m256i lanes = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count < V16_LANES ? (int)count : V16_LANES), lanes);
}
V16_FN v16 v16_first(v16 a, size_t count) { /* lanes below count, and zeros */
    return V16_BOTH(_mm256_and_ps(a.lo, _mm256_castsi256_ps(v8_few(count, 0))),
                    _mm256_and_ps(a.hi, _mm256_castsi256_ps(v8_few(count, 8))));
}
/* Reads `count` elements, sixteen at most; lanes beyond are those of `rest`. */
V16_FN v16 v16_load_first(const float *from, size_t count, v16 rest) {
    if (count >= V16_LANES) return v16_load(from);
    const __m256i lo = v8_few(count, 0), hi = v8_few(count, 8);
    return V16_BOTH(
        _mm256_blendv_ps(rest.lo, _mm256_maskload_ps(from, lo), _mm256_castsi256_ps(lo)),
        _mm256_blendv_ps(rest.hi, _mm256_maskload_ps(from + 8, hi), _mm256_castsi256_ps(hi)));
}
V16_FN __m256 v8_without(__m256 a, int lane) {
    const __m256i here = _mm256_cmpeq_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(lane));
    return _mm256_blendv_ps(a, _mm256_set1_ps(-INFINITY), _mm256_castsi256_ps(here));
}
V16_FN v16 v16_without(v16 a, size_t lane) { /* that lane becomes -inf */
    return V16_BOTH(v8_without(a.lo, (int)lane), v8_without(a.hi, (int)lane - 8));
}
V16_FN uint16_t v16_equal(v16 a, v16 b) { /* bit l: the lanes are equal numbers */
    const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ));
    const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
    return (uint16_t)(lo | hi << 8);
}
V16_FN uint16_t v16_not_negative(v16 a) {
    const __m256 zero = _mm256_setzero_ps();
    const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, zero, _CMP_GE_OQ));
    const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, zero, _CMP_GE_OQ));
    return (uint16_t)(lo | hi << 8);
}
V16_FN __m256 v8_signed(__m256 a, int positive) { /* bits 0..7; moves lane l's bit to the place of the sign */
    const __m256i shifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i at_sign = _mm256_sllv_epi32(_mm256_set1_epi32(~positive), shifts);
    return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_and_si256(at_sign, _mm256_set1_epi32(INT32_MIN))));
}
V16_FN v16 v16_signed(v16 a, uint16_t positive) {
    return V16_BOTH(v8_signed(a.lo, positive), v8_signed(a.hi, positive >> 8));
}
V16_FN __m256 v8_step(__m256 a, __m256 b) {
    const __m256 sign = _mm256_and_ps(b, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)));
    return _mm256_blendv_ps(b, _mm256_or_ps(sign, a), _mm256_cmp_ps(b, _mm256_setzero_ps(), _CMP_NEQ_OQ));
}
V16_FN v16 v16_step(v16 a, v16 b) { return V16_BOTH(v8_step(a.lo, b.lo), v8_step(a.hi, b.hi)); }
V16_FN __m256 v8_maximum(__m256 a, __m256 b) {
    const __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    return _mm256_blendv_ps(b, a, _mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), is_nan));
}
V16_FN v16 v16_maximum(v16 a, v16 b) { return V16_BOTH(v8_maximum(a.lo, b.lo), v8_maximum(a.hi, b.hi)); }
/* Sixteen 32-bit lanes to 16-bit ones: pack works within 128-bit halves, so the middle quarters change places. */
V16_FN __m256i v16_unlace(__m256i packed) { return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)); }
V16_FN __m128i v16_to_i8(v16 a) {
    const __m256i words = v16_unlace(_mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)));
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
/* Packing works within 128-bit halves: what comes out in fours is put in order once, at the end. */
V16_FN __m256i v16_pair_to_i8(v16 a, v16 b) {
    const __m256i first = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    const __m256i second = _mm256_packs_epi32(_mm256_cvtps_epi32(b.lo), _mm256_cvtps_epi32(b.hi));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
}
V16_FN v16 v16_from_i8(__m128i a) {
    return V16_BOTH(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))));
}
/* Two loads that widen are cheaper than one and a shift. */
V16_FN v16 v16_load_i8(const void *from) {
    const char *at = from;
    const __m256i lo = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
    const __m256i hi = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8)));
    return V16_BOTH(_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi));
}
V16_FN __m256 v8_from_bf16(__m128i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)); }
V16_FN v16 v16_from_bf16(__m256i a) {
    return V16_BOTH(v8_from_bf16(_mm256_castsi256_si128(a)), v8_from_bf16(_mm256_extracti128_si256(a, 1)));
}
V16_FN v16 v16_from_f16(__m256i a) {
    return V16_BOTH(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
V16_FN __m256i v16_to_f16(v16 a) {
    return _mm256_set_m128i(_mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
}
V16_FN __m256i v8_bf16_lanes(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
V16_FN __m256i v16_to_bf16(v16 a) { return v16_unlace(_mm256_packus_epi32(v8_bf16_lanes(a.lo), v8_bf16_lanes(a.hi))); }

#endif

/* Sixteen elements from index i of an array of F32, BF16 or F16. `dtype` is a constant where this is inlined. */
V16_FN v16 v16_load_as(const void *from, size_t i, const zpp_dtype dtype) {
    if (dtype == ZPP_F32) return v16_load((const float *)from + i);
    const h16 half = h16_load((const uint16_t *)from + i);
    return dtype == ZPP_F16 ? v16_from_f16(half) : v16_from_bf16(half);
}

V16_FN void v16_store_as(void *to, size_t i, const zpp_dtype dtype, v16 a) {
    if (dtype == ZPP_F32) v16_store((float *)to + i, a);
    else h16_store((uint16_t *)to + i, dtype == ZPP_F16 ? v16_to_f16(a) : v16_to_bf16(a));
}

/* The same past the cache, for what nobody reads soon; the place is aligned to 64 (F32) or 32 bytes, and the caller
 * ends with zpp_streamed(). */
V16_FN void v16_stream_as(void *to, size_t i, const zpp_dtype dtype, v16 a) {
    if (dtype == ZPP_F32) v16_stream((float *)to + i, a);
    else h16_stream((uint16_t *)to + i, dtype == ZPP_F16 ? v16_to_f16(a) : v16_to_bf16(a));
}

/* Elements of an array of F32, BF16 or F16 from index i to the next multiple of 64 bytes. */
V16_FN size_t v16_elems_to_line(const void *to, size_t i, const zpp_dtype dtype) {
    const size_t elem_bytes = dtype == ZPP_F32 ? 4 : 2;
    return ((0 - ((uintptr_t)to + i * elem_bytes)) & 63u) / elem_bytes;
}

/* Thirty-two elements from index i past the cache; `to` + i is aligned to 64 bytes. */
V16_FN void v16_stream_pair_as(void *to, size_t i, const zpp_dtype dtype, v16 a, v16 b) {
#if defined(__AVX512F__) /* 16-bit dtypes: one whole line a store */
    if (dtype != ZPP_F32) {
        const __m256i low = dtype == ZPP_F16 ? v16_to_f16(a) : v16_to_bf16(a);
        const __m256i high = dtype == ZPP_F16 ? v16_to_f16(b) : v16_to_bf16(b);
        _mm512_stream_si512((__m512i *)((uint16_t *)to + i), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
        return;
    }
#endif
    v16_stream_as(to, i, dtype, a);
    v16_stream_as(to, i + V16_LANES, dtype, b);
}

#endif
