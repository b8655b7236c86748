/* SPDX-License-Identifier: Apache-2.0
 *
 * e^x of sixteen elements, operation by operation as exp.h does it. Included by files of one instruction set only.
 */
#ifndef ZPP_OPS_EXP_VEC16_H
#define ZPP_OPS_EXP_VEC16_H

#include "exp.h"
#include "words16.h"

/* 2^n, where `shifted` has n in its low bits. */
V16_FN v16 v16_power(v16 shifted) { return w16_float(w16_shl(w16_add(w16_of(shifted), w16_set1(127)), 23)); }

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
