/* SPDX-License-Identifier: Apache-2.0
 *
 * e^x of sixteen elements, operation by operation as exp.h does it. Included by files of one instruction set only.
 */
#ifndef ZPP_OPS_EXP_VEC16_H
#define ZPP_OPS_EXP_VEC16_H

#include "exp.h"
#include "vec16.h"

/* 2^n, where `shifted` has n in its low bits. */
#if defined(__AVX512F__)
V16_FN v16 v16_power(v16 shifted) {
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
#else
V16_FN __m256 v8_power(__m256 shifted) {
    const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
V16_FN v16 v16_power(v16 shifted) { return V16_BOTH(v8_power(shifted.lo), v8_power(shifted.hi)); }
#endif

V16_FN v16 v16_exp(v16 x) {
    x = v16_max(v16_set1(ZPP_EXP_LEAST), x); /* in this order a NaN stays one */
    x = v16_min(v16_set1(ZPP_EXP_MOST), x);
    const v16 shifted = v16_add(v16_mul(x, v16_set1(ZPP_EXP_PER_LN2)), v16_set1(ZPP_EXP_NEAREST));
    const v16 n = v16_sub(shifted, v16_set1(ZPP_EXP_NEAREST));
    const v16 r = v16_sub(v16_sub(x, v16_mul(n, v16_set1(ZPP_EXP_LN2_HIGH))), v16_mul(n, v16_set1(ZPP_EXP_LN2_LOW)));
    v16 p = v16_set1(ZPP_EXP_P0);
    p = v16_add(v16_mul(p, r), v16_set1(ZPP_EXP_P1));
    p = v16_add(v16_mul(p, r), v16_set1(ZPP_EXP_P2));
    p = v16_add(v16_mul(p, r), v16_set1(ZPP_EXP_P3));
    p = v16_add(v16_mul(p, r), v16_set1(ZPP_EXP_P4));
    p = v16_add(v16_mul(p, r), v16_set1(ZPP_EXP_P5));
    p = v16_add(v16_add(v16_mul(p, v16_mul(r, r)), r), v16_set1(1.0f));
    return v16_mul(p, v16_power(shifted));
}

V16_FN v16 v16_exp_or_zero(v16 x) { return v16_zero_below(v16_exp(x), x, v16_set1(ZPP_EXP_LEAST)); }

#endif
