/* SPDX-License-Identifier: Apache-2.0
 *
 * SGD sixteen elements at once: the text of the AVX2 and the AVX-512 version, which differ in vec16.h only. Operation
 * by operation the order of sgd_body.h.
 */
#ifndef ZPP_OPS_SGD_VEC16_H
#define ZPP_OPS_SGD_VEC16_H

#include "../vec16.h"
#include "elements.h"

V16_FN v16 step_sixteen(const struct zpp_sgd_segment *s, const struct zpp_sgd_consts *c, size_t i,
                        const zpp_dtype grad_dtype) {
    const v16 old = v16_load(s->param + i);
    v16 g = v16_mul(v16_load_as(s->grad, i, grad_dtype), v16_set1(c->grad_scale));
    if (c->use_l2) g = v16_add(g, v16_mul(v16_set1(c->l2), old));
    if (s->momentum_buffer) {
        v16 b = g;
        if (!c->first) {
            b = v16_add(v16_mul(v16_set1(c->momentum), v16_load(s->momentum_buffer + i)),
                        v16_mul(v16_set1(c->one_minus_dampening), g));
        }
        v16_store(s->momentum_buffer + i, b);
        g = c->nesterov ? v16_add(g, v16_mul(v16_set1(c->momentum), b)) : b;
    }
    const v16 p = v16_sub(old, v16_mul(v16_set1(c->lr), g));
    v16_store(s->param + i, p);
    return p;
}

#define STEP_SEGMENT struct zpp_sgd_segment
#define STEP_CONSTS struct zpp_sgd_consts
#define step_elements zpp_sgd_elements
#include "../step_vec16.h"

#endif
