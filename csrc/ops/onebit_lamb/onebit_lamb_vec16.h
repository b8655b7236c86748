/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms sixteen elements at once: the text of the AVX2 and the AVX-512 version, which
 * differ in vec16.h only. Operation by operation the order of onebit_lamb_body.h.
 */
#ifndef ZPP_OPS_ONEBIT_LAMB_VEC16_H
#define ZPP_OPS_ONEBIT_LAMB_VEC16_H

#include "../vec16.h"
#include "elements.h"

V16_FN v16 root_of(v16 square, float per_root, float eps) {
    return v16_add(v16_mul(v16_sqrt(square), v16_set1(per_root)), v16_set1(eps));
}

static void fresh(const struct zpp_onebit_lamb_segment *segment, const struct zpp_onebit_lamb_consts *consts,
                  size_t begin, size_t end, struct zpp_onebit_lamb_lanes *lanes) {
    const struct zpp_onebit_lamb_segment s = *segment; /* copies: the compiler may not assume that stores leave them */
    const struct zpp_onebit_lamb_consts c = *consts;
    v16 alones = v16_load(lanes->alone), boths = v16_load(lanes->both), largest = v16_load(lanes->largest);
    size_t i = begin;
    for (; i + V16_LANES <= end; i += V16_LANES) {
        const v16 m = v16_load(s.exp_avg + i), v = v16_load(s.exp_avg_sq + i);
        const v16 g = v16_mul(v16_sub(m, v16_mul(v16_set1(c.beta1), v16_load(s.before + i))),
                              v16_set1(c.per_gradient));
        const v16 next = v16_add(v16_mul(v16_set1(c.beta2), v16_load(s.fresh_sq + i)),
                                 v16_mul(v16_set1(c.one_minus_beta2), v16_mul(g, g)));
        v16_store(s.fresh_sq + i, next);
        const v16 below = root_of(v, c.per_root_frozen, c.eps), real = root_of(next, c.per_root_fresh, c.eps);
        const v16 ratio = v16_zero_at_zero(v16_div(below, real), v);
        const v16 alone = v16_zero_at_zero(v16_div(v16_mul(m, v16_set1(c.per_momentum)), below), v);
        const v16 both = v16_add(alone, v16_mul(v16_set1(c.weight_decay), v16_load(s.param + i)));
        alones = v16_add(alones, v16_mul(alone, alone));
        boths = v16_add(boths, v16_mul(both, both));
        largest = v16_max_bits(largest, v16_abs(ratio));
    }
    v16_store(lanes->alone, alones);
    v16_store(lanes->both, boths);
    v16_store(lanes->largest, largest);
    zpp_onebit_lamb_elements(segment, consts, i, end, lanes);
}

#endif
