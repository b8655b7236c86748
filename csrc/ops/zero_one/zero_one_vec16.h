/* SPDX-License-Identifier: Apache-2.0
 *
 * 0/1 Adam's step sixteen elements at once: the text of the AVX2 and the AVX-512 version, which differ in vec16.h only.
 * Operation by operation the order of zero_one_body.h and frozen_body.h.
 */
#ifndef ZPP_OPS_ZERO_ONE_VEC16_H
#define ZPP_OPS_ZERO_ONE_VEC16_H

#include "../vec16.h"
#include "elements.h"

V16_FN v16 step_sixteen(const struct zpp_zero_one_segment *s, const struct zpp_zero_one_consts *c, size_t i,
                        const zpp_dtype grad_dtype) {
    const v16 g = v16_mul(v16_load_as(s->grad, i, grad_dtype), v16_set1(c->grad_scale));
    const v16 m = v16_add(v16_mul(v16_set1(c->beta1), v16_load(s->exp_avg + i)),
                          v16_mul(v16_set1(c->one_minus_beta1), g));
    const v16 step = v16_mul(v16_set1(c->walk.step_size), m), keep = v16_set1(c->walk.keep);
    v16_store(s->exp_avg + i, m);
    if (s->moved) v16_store(s->moved + i, v16_add(v16_load(s->moved + i), step));
    if (s->anchor) v16_store(s->anchor + i, v16_mul(v16_load(s->anchor + i), keep));
    const v16 v = v16_load(s->exp_avg_sq + i);
    const v16 denominator = v16_add(v16_mul(v16_sqrt(v), v16_set1(c->walk.root_scale)), v16_set1(c->walk.eps));
    const v16 way = v16_zero_at_zero(v16_div(step, denominator), v);
    const v16 p = v16_sub(v16_mul(v16_load(s->param + i), keep), way);
    v16_store(s->param + i, p);
    return p;
}

#define STEP_SEGMENT struct zpp_zero_one_segment
#define STEP_CONSTS struct zpp_zero_one_consts
#define step_elements zpp_zero_one_elements
#include "../step_vec16.h"

#endif
