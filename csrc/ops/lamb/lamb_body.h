/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of LAMB, written once for all instruction sets and CUDA.
 */
#ifndef ZPP_OPS_LAMB_BODY_H
#define ZPP_OPS_LAMB_BODY_H

#include "../optim/lanes.h"

/* What is equal for all elements of a segment, computed in double and rounded once (lamb.c). */
struct zpp_lamb_consts {
    float grad_scale; /* negated for maximize */
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float per_correction1;      /* 1 / (1 - beta1^t) */
    float per_root_correction2; /* 1 / sqrt(1 - beta2^t) */
    float eps, weight_decay;
    float rate; /* lr r: known for the second pass only */
};

LANES_FN lanes zpp_lamb_update(const struct zpp_lamb_consts *c, lanes p, lanes m, lanes v) {
    const lanes root = lanes_add(lanes_mul(lanes_sqrt(v), lanes_set(c->per_root_correction2)), lanes_set(c->eps));
    return lanes_add(lanes_div(lanes_mul(m, lanes_set(c->per_correction1)), root),
                     lanes_mul(lanes_set(c->weight_decay), p));
}

/* The first pass: updates m and v, and returns u. */
LANES_FN lanes zpp_lamb_moments(const struct zpp_lamb_consts *c, lanes grad, lanes p, lanes *m, lanes *v) {
    const lanes g = lanes_mul(grad, lanes_set(c->grad_scale));
    *m = lanes_add(lanes_mul(lanes_set(c->beta1), *m), lanes_mul(lanes_set(c->one_minus_beta1), g));
    *v = lanes_add(lanes_mul(lanes_set(c->beta2), *v), lanes_mul(lanes_set(c->one_minus_beta2), lanes_mul(g, g)));
    return zpp_lamb_update(c, p, *m, *v);
}

/* The second pass: returns the new parameters. */
LANES_FN lanes zpp_lamb_moved(const struct zpp_lamb_consts *c, lanes p, lanes m, lanes v) {
    return lanes_sub(p, lanes_mul(lanes_set(c->rate), zpp_lamb_update(c, p, m, v)));
}

#endif
