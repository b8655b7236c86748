/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of moments in fewer bits, stated once for the scalar version, the ends of the vector versions and the
 * CUDA kernels. moments.h has the formulas.
 */
#ifndef ZPP_OPS_MOMENTS_BODY_H
#define ZPP_OPS_MOMENTS_BODY_H

#include <stdint.h>

#include "../round.h"

#ifdef __CUDACC__
#define MOMENTS_INTEGER(a) __float2uint_rn(a)
#else
#define MOMENTS_INTEGER(a) ((uint32_t)lrintf(a)) /* to nearest even */
#endif

#define ZPP_MOMENTS_ABS 0x7fffffffu
#define ZPP_MOMENTS_INFINITY 0x7f800000u
#define ZPP_MOMENTS_TOO_BIG 0x7e800000u /* 2^126: from here on the reciprocal is subnormal */
#define ZPP_MOMENTS_HALF 0x8000u        /* in place of random bits: to nearest */
#define ZPP_MOMENTS_SEVENTH 0.142857142857142857f
#define ZPP_MOMENTS_WHICH_KEY 0x9e3779b97f4a7c15u /* odd: moments of one tensor have streams of their own */

/* Sixteen random bits of one element: a hash of 32-bit multiplications (Wellons' lowbias32, keyed twice). It repeats
 * after 2^32 elements of a tensor. */
ZPP_FN uint32_t zpp_moments_random(uint64_t key, uint32_t index) {
    uint32_t x = index + (uint32_t)key;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x += (uint32_t)(key >> 32);
    x *= 0x846ca68bu;
    return x >> 16;
}

/* random: 0 .. 65535. */
ZPP_FN uint16_t zpp_moments_to_bf16(float value, uint32_t random) {
    const uint32_t bits = ZPP_BITS(value);
    if ((bits & ZPP_MOMENTS_ABS) > ZPP_MOMENTS_INFINITY) return (uint16_t)((bits >> 16) | 0x0040u);
    return (uint16_t)((bits + random) >> 16); /* an infinity has nothing below bit 16 that could carry */
}

ZPP_FN float zpp_moments_from_bf16(uint16_t code) { return ZPP_FLOAT((uint32_t)code << 16); }

/* Scale and reciprocal of a block whose greatest magnitude is `top_bits`; 0: not finite, its codes are 0. */
ZPP_FN int zpp_moments_scale_of(uint32_t top_bits, float *scale, float *inverse) {
    *inverse = 0.0f;
    *scale = ZPP_FLOAT(0x7fc00000u);
    if (top_bits >= ZPP_MOMENTS_TOO_BIG) return 0;
    *scale = ZPP_FLOAT(top_bits < 0x00800000u ? 0x00800000u : top_bits); /* at least 2^-126 */
    *inverse = ZPP_DIV(1.0f, *scale);
    return 1;
}

/* level(n), K = 7 (first moments) or 8. Exact. */
ZPP_FN float zpp_moments_level(uint32_t n, uint32_t k) {
    if (n == 0) return 0.0f;
    const uint32_t bits = ZPP_BITS((float)(n + 1));
    const uint32_t i = (bits >> 23) - 127;
    const float f = ZPP_FLOAT((bits & 0x007fffffu) | 0x3f800000u);
    const float y = ZPP_SUB(ZPP_MUL(7.0f, f), 6.0f);
    return ZPP_FLOAT(ZPP_BITS(y) + ((3 * i - 3 * k) << 23));
}

/* The code's magnitude for x in a finite block. */
ZPP_FN uint32_t zpp_moments_code(float x, float inverse, uint32_t k, uint32_t random) {
    const uint32_t magnitude = ZPP_BITS(x) & ZPP_MOMENTS_ABS;
    float a = ZPP_MUL(ZPP_FLOAT(magnitude), inverse);
    if (a > 1.0f) a = 1.0f;
    const uint32_t bits = ZPP_BITS(a);
    const int32_t above = (int32_t)(bits >> 23) - 127 + 3 * (int32_t)k; /* binary orders above 8^-K; i is a third */
    uint32_t fixed;                                                     /* n with 16 bits of fraction */
    if (above < 3) {                                                    /* below level(1): linear from 0 */
        fixed = MOMENTS_INTEGER(ZPP_MUL(a, ZPP_FLOAT((127u + 16 + 3 * k - 3) << 23)));
    } else {
        const uint32_t i = (uint32_t)above * 11 >> 5;
        const float y = ZPP_FLOAT(bits - ((3 * i - 3 * k) << 23)); /* 1 .. 8 */
        const float f = ZPP_MUL(ZPP_ADD(y, 6.0f), ZPP_MOMENTS_SEVENTH);
        fixed = MOMENTS_INTEGER(ZPP_MUL(f, ZPP_FLOAT((127u + 16 + i) << 23))) - 65536u;
    }
    const uint32_t most = k == 7 ? 127 : 255;
    uint32_t n = (fixed + random) >> 16;
    if (n > most) n = most;
    if (k == 8 && n == 0 && magnitude != 0) n = 1;
    return k == 7 ? n | (ZPP_BITS(x) >> 31) << 7 : n;
}

ZPP_FN float zpp_moments_value(uint32_t code, float scale, uint32_t k) {
    if (k == 8) return ZPP_MUL(zpp_moments_level(code, 8), scale);
    const float value = ZPP_MUL(zpp_moments_level(code & 127, 7), scale);
    return ZPP_FLOAT(ZPP_BITS(value) ^ (code & 128) << 24);
}

#endif
