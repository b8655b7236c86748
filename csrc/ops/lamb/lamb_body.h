/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of LAMB: the arithmetic, stated once for the scalar version and the ends of the vector versions, which
 * repeat it operation by operation.
 */
#ifndef ZPP_OPS_LAMB_BODY_H
#define ZPP_OPS_LAMB_BODY_H

#include "../round.h"

/* What is equal for all elements of a segment, computed in double and rounded once (lamb.c). */
struct zpp_lamb_consts {
    float grad_scale; /* negated for maximize */
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float per_correction1;      /* 1 / (1 - beta1^t) */
    float per_root_correction2; /* 1 / sqrt(1 - beta2^t) */
    float eps, weight_decay;
    float rate; /* lr r: known for the second pass only */
};

ZPP_FN float zpp_lamb_update(const struct zpp_lamb_consts *c, float p, float m, float v) {
    const float root = ZPP_ADD(ZPP_MUL(ZPP_SQRT(v), c->per_root_correction2), c->eps);
    return ZPP_ADD(ZPP_DIV(ZPP_MUL(m, c->per_correction1), root), ZPP_MUL(c->weight_decay, p));
}

/* First pass: m and v are updated; u. */
ZPP_FN float zpp_lamb_moments(const struct zpp_lamb_consts *c, float grad, float p, float *m, float *v) {
    const float g = ZPP_MUL(grad, c->grad_scale);
    *m = ZPP_ADD(ZPP_MUL(c->beta1, *m), ZPP_MUL(c->one_minus_beta1, g));
    *v = ZPP_ADD(ZPP_MUL(c->beta2, *v), ZPP_MUL(c->one_minus_beta2, ZPP_MUL(g, g)));
    return zpp_lamb_update(c, p, *m, *v);
}

/* Second pass. */
ZPP_FN float zpp_lamb_moved(const struct zpp_lamb_consts *c, float p, float m, float v) {
    return ZPP_SUB(p, ZPP_MUL(c->rate, zpp_lamb_update(c, p, m, v)));
}

#endif
