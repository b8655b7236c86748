/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of SGD with momentum: the arithmetic, stated once for the scalar C version, the ends of the vector
 * versions and the CUDA kernel. The vector versions repeat it operation by operation; tests hold all of them to the
 * same bits.
 */
#ifndef ZPP_OPS_SGD_BODY_H
#define ZPP_OPS_SGD_BODY_H

#include "../round.h"

/* What is equal for all elements of a segment, computed in double and rounded once (sgd.c). */
struct zpp_sgd_consts {
    float grad_scale; /* negated for maximize: the sign of a product is exact */
    float l2;         /* weight_decay, used if `use_l2` */
    float momentum, one_minus_dampening;
    float lr;
    unsigned char use_l2, first, nesterov;
};

/* p: one element, read and written; buffer too, or NULL. */
ZPP_FN void zpp_sgd_element(const struct zpp_sgd_consts *c, float grad, float *p, float *buffer) {
    float g = ZPP_MUL(grad, c->grad_scale);
    if (c->use_l2) g = ZPP_ADD(g, ZPP_MUL(c->l2, *p));
    if (buffer) {
        const float b = c->first ? g : ZPP_ADD(ZPP_MUL(c->momentum, *buffer), ZPP_MUL(c->one_minus_dampening, g));
        *buffer = b;
        g = c->nesterov ? ZPP_ADD(g, ZPP_MUL(c->momentum, b)) : b;
    }
    *p = ZPP_SUB(*p, ZPP_MUL(c->lr, g));
}

#endif
