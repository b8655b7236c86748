/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB sixteen elements at once: the text of the AVX2 and the AVX-512 version, which differ in vec16.h only. Operation
 * by operation the order of lamb_body.h.
 */
#ifndef ZPP_OPS_LAMB_VEC16_H
#define ZPP_OPS_LAMB_VEC16_H

#include "../vec16.h"
#include "elements.h"

V16_FN v16 update_sixteen(const struct zpp_lamb_consts *c, v16 p, v16 m, v16 v) {
    const v16 root = v16_add(v16_mul(v16_sqrt(v), v16_set1(c->per_root_correction2)), v16_set1(c->eps));
    return v16_add(v16_div(v16_mul(m, v16_set1(c->per_correction1)), root), v16_mul(v16_set1(c->weight_decay), p));
}

V16_FN size_t moments_turns(const struct zpp_lamb_segment *segment, const struct zpp_lamb_consts *consts, size_t begin,
                            size_t end, struct zpp_lamb_sums *sums, const zpp_dtype grad_dtype) {
    const struct zpp_lamb_segment s = *segment; /* copies: the compiler may not assume that stores leave them alone */
    const struct zpp_lamb_consts c = *consts;
    v16 params = v16_load(sums->params), updates = v16_load(sums->updates);
    size_t i = begin;
    for (; i + V16_LANES <= end; i += V16_LANES) {
        const v16 p = v16_load(s.param + i);
        const v16 g = v16_mul(v16_load_as(s.grad, i, grad_dtype), v16_set1(c.grad_scale));
        const v16 m = v16_add(v16_mul(v16_set1(c.beta1), v16_load(s.exp_avg + i)),
                              v16_mul(v16_set1(c.one_minus_beta1), g));
        const v16 v = v16_add(v16_mul(v16_set1(c.beta2), v16_load(s.exp_avg_sq + i)),
                              v16_mul(v16_set1(c.one_minus_beta2), v16_mul(g, g)));
        v16_store(s.exp_avg + i, m);
        v16_store(s.exp_avg_sq + i, v);
        const v16 u = update_sixteen(&c, p, m, v);
        params = v16_add(params, v16_mul(p, p));
        updates = v16_add(updates, v16_mul(u, u));
    }
    v16_store(sums->params, params);
    v16_store(sums->updates, updates);
    return i;
}

static void moments(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *c, size_t begin, size_t end,
                    struct zpp_lamb_sums *sums) {
    size_t done;
    switch (s->grad_dtype) {
    case ZPP_BF16: done = moments_turns(s, c, begin, end, sums, ZPP_BF16); break;
    case ZPP_F16: done = moments_turns(s, c, begin, end, sums, ZPP_F16); break;
    default: done = moments_turns(s, c, begin, end, sums, ZPP_F32); break;
    }
    zpp_lamb_moments_elements(s, c, done, end, sums);
}

V16_FN v16 step_sixteen(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *c, size_t i,
                        const zpp_dtype grad_dtype) {
    (void)grad_dtype; /* the second pass reads no gradient */
    const v16 p = v16_load(s->param + i);
    const v16 u = update_sixteen(c, p, v16_load(s->exp_avg + i), v16_load(s->exp_avg_sq + i));
    const v16 moved = v16_sub(p, v16_mul(v16_set1(c->rate), u));
    v16_store(s->param + i, moved);
    return moved;
}

#define STEP_SEGMENT struct zpp_lamb_segment
#define STEP_CONSTS struct zpp_lamb_consts
#define step_elements zpp_lamb_move_elements
#include "../step_vec16.h"

static void move(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *c, size_t begin, size_t end) {
    step_walk(s, c, begin, end);
}

#endif
