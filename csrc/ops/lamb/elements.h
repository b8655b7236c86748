/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB element by element: the scalar version, and the ends of the vector versions.
 */
#ifndef ZPP_OPS_LAMB_ELEMENTS_H
#define ZPP_OPS_LAMB_ELEMENTS_H

#include "../element.h"
#include "kernels.h"

static inline void zpp_lamb_moments_elements(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *consts,
                                             size_t begin, size_t end, struct zpp_lamb_sums *sums) {
    for (size_t i = begin; i < end; ++i) {
        const float p = s->param[i];
        const float u = zpp_lamb_moments(consts, zpp_element_load(s->grad, s->grad_dtype, i), p, s->exp_avg + i,
                                         s->exp_avg_sq + i);
        float *params = &sums->params[i % ZPP_LAMB_LANES], *updates = &sums->updates[i % ZPP_LAMB_LANES];
        *params = ZPP_ADD(*params, ZPP_MUL(p, p));
        *updates = ZPP_ADD(*updates, ZPP_MUL(u, u));
    }
}

static inline void zpp_lamb_move_elements(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *consts,
                                          size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        s->param[i] = zpp_lamb_moved(consts, s->param[i], s->exp_avg[i], s->exp_avg_sq[i]);
        if (s->param_out) zpp_element_store(s->param_out, s->out_dtype, i, s->param[i]);
    }
}

#endif
