/* SPDX-License-Identifier: Apache-2.0
 *
 * 0/1 Adam's step element by element: the scalar version, and the ends of the vector versions.
 */
#ifndef ZPP_OPS_ZERO_ONE_ELEMENTS_H
#define ZPP_OPS_ZERO_ONE_ELEMENTS_H

#include "../element.h"
#include "kernels.h"

static inline void zpp_zero_one_elements(const struct zpp_zero_one_segment *s, const struct zpp_zero_one_consts *consts,
                                         size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const float m = zpp_zero_one_momentum(consts, zpp_element_load(s->grad, s->grad_dtype, i), s->exp_avg[i]);
        s->exp_avg[i] = m;
        if (s->moved) s->moved[i] = zpp_zero_one_moved(consts, s->moved[i], m);
        if (s->anchor) s->anchor[i] = zpp_zero_one_anchor(consts, s->anchor[i]);
        s->param[i] = zpp_frozen_moved(&consts->walk, s->param[i], m, s->exp_avg_sq[i]);
        if (s->param_out) zpp_element_store(s->param_out, s->out_dtype, i, s->param[i]);
    }
}

#endif
