/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of Adagrad: the arithmetic, stated once for the scalar C version, the ends of the vector versions and the
 * CUDA kernel. The vector versions repeat it operation by operation; tests hold all of them to the same bits.
 */
#ifndef ZPP_OPS_ADAGRAD_BODY_H
#define ZPP_OPS_ADAGRAD_BODY_H

#include "../round.h"

/* What is equal for all elements of a segment, computed in double and rounded once (adagrad.c). */
struct zpp_adagrad_consts {
    float grad_scale; /* negated for maximize: the sign of a product is exact */
    float l2;         /* weight_decay, used if `use_l2` */
    float eps;
    float step_size;  /* lr / (1 + (t - 1) * lr_decay) */
    unsigned char use_l2;
};

/* p, sum: one element each, read and written. */
ZPP_FN void zpp_adagrad_element(const struct zpp_adagrad_consts *c, float grad, float *p, float *sum) {
    float g = ZPP_MUL(grad, c->grad_scale);
    if (c->use_l2) g = ZPP_ADD(g, ZPP_MUL(c->l2, *p));
    *sum = ZPP_ADD(*sum, ZPP_MUL(g, g));
    *p = ZPP_SUB(*p, ZPP_DIV(ZPP_MUL(c->step_size, g), ZPP_ADD(ZPP_SQRT(*sum), c->eps)));
}

#endif
