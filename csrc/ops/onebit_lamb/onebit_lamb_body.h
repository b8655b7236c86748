/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of 1-bit LAMB's fresh variance and norms: the arithmetic, stated once for the scalar version, the ends of
 * the vector versions and the CUDA kernel. The vector versions repeat it operation by operation.
 */
#ifndef ZPP_OPS_ONEBIT_LAMB_BODY_H
#define ZPP_OPS_ONEBIT_LAMB_BODY_H

#include "../round.h"

/* What is equal for all elements of a segment, computed in double and rounded once (onebit_lamb.c). */
struct zpp_onebit_lamb_consts {
    float beta1, beta2, one_minus_beta2;
    float per_gradient;    /* 1 / (c (1 - beta1)) */
    float per_momentum;    /* 1 / (c (1 - beta1^t)) */
    float per_root_fresh;  /* 1 / sqrt(1 - beta2^t) */
    float per_root_frozen; /* 1 / sqrt(1 - beta2^min(t, freeze_step)) */
    float eps, weight_decay;
};

/* What one lane adds up, and its largest ratio, which has no sign. */
struct zpp_onebit_lamb_lane {
    float alone, both, largest;
};

/* The greater of two without sign, and a NaN beats all: by bits. */
ZPP_FN float zpp_onebit_lamb_greater(float a, float b) { return ZPP_BITS(a) > ZPP_BITS(b) ? a : b; }

/* Adds one element to `lane`; the new v'. */
ZPP_FN float zpp_onebit_lamb_element(const struct zpp_onebit_lamb_consts *c, float p, float m, float before, float v,
                                     float fresh, struct zpp_onebit_lamb_lane *lane) {
    const float g = ZPP_MUL(ZPP_SUB(m, ZPP_MUL(c->beta1, before)), c->per_gradient);
    const float next = ZPP_ADD(ZPP_MUL(c->beta2, fresh), ZPP_MUL(c->one_minus_beta2, ZPP_MUL(g, g)));
    const float below = ZPP_ADD(ZPP_MUL(ZPP_SQRT(v), c->per_root_frozen), c->eps);
    const float real = ZPP_ADD(ZPP_MUL(ZPP_SQRT(next), c->per_root_fresh), c->eps);
    const float ratio = v == 0.0f ? 0.0f : ZPP_DIV(below, real);
    const float alone = v == 0.0f ? 0.0f : ZPP_DIV(ZPP_MUL(m, c->per_momentum), below);
    const float both = ZPP_ADD(alone, ZPP_MUL(c->weight_decay, p));
    lane->alone = ZPP_ADD(lane->alone, ZPP_MUL(alone, alone));
    lane->both = ZPP_ADD(lane->both, ZPP_MUL(both, both));
    lane->largest = zpp_onebit_lamb_greater(lane->largest, ZPP_FLOAT(ZPP_BITS(ratio) & 0x7fffffffu));
    return next;
}

#endif
