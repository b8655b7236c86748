/* SPDX-License-Identifier: Apache-2.0
 *
 * The step with a frozen variance sixteen elements at once: the text of the AVX2 and the AVX-512 version, which differ
 * in vec16.h only. Operation by operation the order of frozen_body.h.
 */
#ifndef ZPP_OPS_FROZEN_VEC16_H
#define ZPP_OPS_FROZEN_VEC16_H

#include "../vec16.h"
#include "elements.h"

V16_FN v16 step_sixteen(const struct zpp_frozen_segment *s, const struct zpp_frozen_consts *c, size_t i,
                        const zpp_dtype grad_dtype) {
    (void)grad_dtype; /* no gradient is read */
    const v16 v = v16_load(s->exp_avg_sq + i);
    const v16 denominator = v16_add(v16_mul(v16_sqrt(v), v16_set1(c->root_scale)), v16_set1(c->eps));
    const v16 way = v16_div(v16_mul(v16_set1(c->step_size), v16_load(s->exp_avg + i)), denominator);
    const v16 kept = v16_mul(v16_load(s->param + i), v16_set1(c->keep));
    const v16 p = v16_sub(kept, v16_zero_at_zero(way, v));
    v16_store(s->param + i, p);
    return p;
}

#define STEP_SEGMENT struct zpp_frozen_segment
#define STEP_CONSTS struct zpp_frozen_consts
#define STEP_GRAD_DTYPE(s) ZPP_F32
#define step_elements zpp_frozen_elements
#include "../step_vec16.h"

#endif
