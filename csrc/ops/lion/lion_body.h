/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of Lion: the arithmetic, stated once for the scalar C version, the ends of the vector versions and the
 * CUDA kernel. The vector versions repeat it operation by operation; tests hold all of them to the same bits.
 */
#ifndef ZPP_OPS_LION_BODY_H
#define ZPP_OPS_LION_BODY_H

#include "../round.h"

/* What is equal for all elements of a segment, computed in double and rounded once (lion.c). */
struct zpp_lion_consts {
    float grad_scale; /* negated for maximize: the sign of a product is exact */
    float keep;       /* 1 - lr * weight_decay */
    float lr;
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
};

/* p, m: one element each, read and written. */
ZPP_FN void zpp_lion_element(const struct zpp_lion_consts *c, float grad, float *p, float *m) {
    const float g = ZPP_MUL(grad, c->grad_scale);
    const float way = ZPP_ADD(ZPP_MUL(c->beta1, *m), ZPP_MUL(c->one_minus_beta1, g));
    const float moved = way > 0.0f ? c->lr : way < 0.0f ? -c->lr : way; /* lr * sign; zero and NaN as they are */
    *p = ZPP_SUB(ZPP_MUL(*p, c->keep), moved);
    *m = ZPP_ADD(ZPP_MUL(c->beta2, *m), ZPP_MUL(c->one_minus_beta2, g));
}

#endif
