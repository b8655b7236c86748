/* SPDX-License-Identifier: Apache-2.0
 *
 * Adagrad sixteen elements at once: the text of the AVX2 and the AVX-512 version, which differ in vec16.h only.
 * Operation by operation the order of adagrad_body.h.
 */
#ifndef ZPP_OPS_ADAGRAD_VEC16_H
#define ZPP_OPS_ADAGRAD_VEC16_H

#include "../vec16.h"
#include "elements.h"

V16_FN v16 step_sixteen(const struct zpp_adagrad_segment *s, const struct zpp_adagrad_consts *c, size_t i,
                        const zpp_dtype grad_dtype) {
    const v16 old = v16_load(s->param + i);
    v16 g = v16_mul(v16_load_as(s->grad, i, grad_dtype), v16_set1(c->grad_scale));
    if (c->use_l2) g = v16_add(g, v16_mul(v16_set1(c->l2), old));
    const v16 sum = v16_add(v16_load(s->sum + i), v16_mul(g, g));
    const v16 denominator = v16_add(v16_sqrt(sum), v16_set1(c->eps));
    const v16 p = v16_sub(old, v16_div(v16_mul(v16_set1(c->step_size), g), denominator));
    v16_store(s->sum + i, sum);
    v16_store(s->param + i, p);
    return p;
}

#define STEP_SEGMENT struct zpp_adagrad_segment
#define STEP_CONSTS struct zpp_adagrad_consts
#define step_elements zpp_adagrad_elements
#include "../step_vec16.h"

#endif
