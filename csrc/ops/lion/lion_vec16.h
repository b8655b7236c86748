/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion sixteen elements at once: the text of the AVX2 and the AVX-512 version, which differ in vec16.h only. Operation
 * by operation the order of lion_body.h.
 */
#ifndef ZPP_OPS_LION_VEC16_H
#define ZPP_OPS_LION_VEC16_H

#include "../vec16.h"
#include "elements.h"


V16_FN v16 step_sixteen(const struct zpp_lion_segment *s, const struct zpp_lion_consts *c, size_t i,
                        const zpp_dtype grad_dtype) {
    const v16 m = v16_load(s->exp_avg + i);
    const v16 g = v16_mul(v16_load_as(s->grad, i, grad_dtype), v16_set1(c->grad_scale));
    const v16 way = v16_add(v16_mul(v16_set1(c->beta1), m), v16_mul(v16_set1(c->one_minus_beta1), g));
    const v16 moved = v16_step(v16_set1(c->lr), way);
    const v16 p = v16_sub(v16_mul(v16_load(s->param + i), v16_set1(c->keep)), moved);
    v16_store(s->param + i, p);
    v16_store(s->exp_avg + i, v16_add(v16_mul(v16_set1(c->beta2), m), v16_mul(v16_set1(c->one_minus_beta2), g)));
    return p;
}

#define STEP_SEGMENT struct zpp_lion_segment
#define STEP_CONSTS struct zpp_lion_consts
#define step_elements zpp_lion_elements
#include "../step_vec16.h"

#endif
