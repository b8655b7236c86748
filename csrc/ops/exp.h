/* SPDX-License-Identifier: Apache-2.0
 *
 * e^x of one element, every operation rounded once, so that the vector versions, which repeat it operation by
 * operation, give the same bits.
 *
 *   n = nearest(x / ln 2),  r = x - n ln 2 (in two parts),  e^x = 2^n (1 + r + r^2 P(r))
 *
 * P has the coefficients of Cephes' expf. x is held within [-87, 88]: 2^n neither overflows nor is subnormal. Nearest
 * is an addition of 1.5 2^23, which leaves n in the low bits; shifted to the exponent they are 2^n.
 */
#ifndef ZPP_OPS_EXP_H
#define ZPP_OPS_EXP_H

#include <stdint.h>
#include <string.h>

#include "round.h"

#define ZPP_EXP_LEAST (-87.0f)
#define ZPP_EXP_MOST 88.0f
#define ZPP_EXP_PER_LN2 1.44269504088896341f
#define ZPP_EXP_NEAREST 12582912.0f
#define ZPP_EXP_LN2_HIGH 0.693359375f
#define ZPP_EXP_LN2_LOW (-2.12194440e-4f)
#define ZPP_EXP_P0 1.9875691500e-4f
#define ZPP_EXP_P1 1.3981999507e-3f
#define ZPP_EXP_P2 8.3334519073e-3f
#define ZPP_EXP_P3 4.1665795894e-2f
#define ZPP_EXP_P4 1.6666665459e-1f
#define ZPP_EXP_P5 5.0000001201e-1f

ZPP_FN float zpp_exp(float x) {
    x = ZPP_EXP_LEAST > x ? ZPP_EXP_LEAST : x; /* a NaN stays one */
    x = ZPP_EXP_MOST < x ? ZPP_EXP_MOST : x;
    const float shifted = ZPP_ADD(ZPP_MUL(x, ZPP_EXP_PER_LN2), ZPP_EXP_NEAREST);
    const float n = ZPP_SUB(shifted, ZPP_EXP_NEAREST);
    const float r = ZPP_SUB(ZPP_SUB(x, ZPP_MUL(n, ZPP_EXP_LN2_HIGH)), ZPP_MUL(n, ZPP_EXP_LN2_LOW));
    float p = ZPP_EXP_P0;
    p = ZPP_ADD(ZPP_MUL(p, r), ZPP_EXP_P1);
    p = ZPP_ADD(ZPP_MUL(p, r), ZPP_EXP_P2);
    p = ZPP_ADD(ZPP_MUL(p, r), ZPP_EXP_P3);
    p = ZPP_ADD(ZPP_MUL(p, r), ZPP_EXP_P4);
    p = ZPP_ADD(ZPP_MUL(p, r), ZPP_EXP_P5);
    p = ZPP_ADD(ZPP_ADD(ZPP_MUL(p, ZPP_MUL(r, r)), r), 1.0f);
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return ZPP_MUL(p, power);
}

/* The same, and 0 where x is below ZPP_EXP_LEAST, -inf among it: for weights that a mask takes away. */
ZPP_FN float zpp_exp_or_zero(float x) { return x < ZPP_EXP_LEAST ? 0.0f : zpp_exp(x); }

#endif
