/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of Adam: the arithmetic, stated once for the scalar C version, the tails of the vector versions and the
 * CUDA kernel. The vector versions repeat it operation by operation; tests hold all of them to the same bits.
 */
#ifndef ZPP_OPS_ADAM_BODY_H
#define ZPP_OPS_ADAM_BODY_H

#include "../round.h"

/* What is equal for all elements of a segment, computed in double and rounded once (adam.c). */
struct zpp_adam_consts {
    float grad_scale;      /* negated for maximize: the sign of a product is exact */
    float keep;            /* AdamW: 1 - lr * weight_decay; else 1, which leaves p as it is */
    float l2;              /* Adam: weight_decay, used if `use_l2` */
    float lerp;            /* 1 - beta1 */
    float lerp_far;        /* 1 - (1 - beta1), used if `use_far` */
    float beta2, one_minus_beta2;
    float root_scale;      /* 1 / sqrt(1 - beta2^t) */
    float eps;
    float step_size;       /* lr / (1 - beta1^t) */
    unsigned char use_l2, use_far; /* use_far: 1 - beta1 >= 0.5, where torch's lerp starts from the other end */
};

/* p, m, v: one element each, read and written. top: amsgrad's running maximum of v, or NULL. */
ZPP_FN void zpp_adam_element(const struct zpp_adam_consts *c, float grad, float *p, float *m, float *v, float *top) {
    float g = ZPP_MUL(grad, c->grad_scale);
    const float kept = ZPP_MUL(*p, c->keep);                           /* p = p * (1 - lr * weight_decay) */
    if (c->use_l2) g = ZPP_ADD(g, ZPP_MUL(c->l2, *p));                /* g = g + weight_decay * p */
    const float away = ZPP_SUB(g, *m);
    *m = c->use_far ? ZPP_SUB(g, ZPP_MUL(away, c->lerp_far))          /* m = lerp(m, g, 1 - beta1) */
                    : ZPP_ADD(*m, ZPP_MUL(c->lerp, away));
    *v = ZPP_ADD(ZPP_MUL(c->beta2, *v), ZPP_MUL(ZPP_MUL(c->one_minus_beta2, g), g));
    float second = *v;
    if (top) {
        if (*v > *top || *v != *v) *top = *v;                           /* maximum; a NaN on either side stays */
        second = *top;
    }
    const float denominator = ZPP_ADD(ZPP_MUL(ZPP_SQRT(second), c->root_scale), c->eps);
    *p = ZPP_SUB(kept, ZPP_DIV(ZPP_MUL(c->step_size, *m), denominator));
}

#endif
