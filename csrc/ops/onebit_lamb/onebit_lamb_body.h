/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of 1-bit LAMB's fresh variance and norms, written once for all instruction sets and CUDA.
 */
#ifndef ZPP_OPS_ONEBIT_LAMB_BODY_H
#define ZPP_OPS_ONEBIT_LAMB_BODY_H

#include "../optim/lanes.h"

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
    lanes alone, both, largest;
};

LANES_FN lanes zpp_onebit_lamb_root(lanes square, float per_root, float eps) {
    return lanes_add(lanes_mul(lanes_sqrt(square), lanes_set(per_root)), lanes_set(eps));
}

/* Adds one element to `lane`; the new v'. */
LANES_FN lanes zpp_onebit_lamb_element(const struct zpp_onebit_lamb_consts *c, lanes p, lanes m, lanes before, lanes v,
                                       lanes fresh, struct zpp_onebit_lamb_lane *lane) {
    const lanes g = lanes_mul(lanes_sub(m, lanes_mul(lanes_set(c->beta1), before)), lanes_set(c->per_gradient));
    const lanes next = lanes_add(lanes_mul(lanes_set(c->beta2), fresh),
                                 lanes_mul(lanes_set(c->one_minus_beta2), lanes_mul(g, g)));
    const lanes below = zpp_onebit_lamb_root(v, c->per_root_frozen, c->eps);
    const lanes real = zpp_onebit_lamb_root(next, c->per_root_fresh, c->eps);
    const lanes ratio = lanes_zero_at_zero(lanes_div(below, real), v);
    const lanes alone = lanes_zero_at_zero(lanes_div(lanes_mul(m, lanes_set(c->per_momentum)), below), v);
    const lanes both = lanes_add(alone, lanes_mul(lanes_set(c->weight_decay), p));
    lane->alone = lanes_add(lane->alone, lanes_mul(alone, alone));
    lane->both = lanes_add(lane->both, lanes_mul(both, both));
    lane->largest = lanes_max_bits(lane->largest, lanes_abs(ratio));
    return next;
}

#endif
