/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion element by element: the scalar version, and the ends of the vector versions.
 */
#ifndef ZPP_OPS_LION_ELEMENTS_H
#define ZPP_OPS_LION_ELEMENTS_H

#include "../element.h"
#include "kernels.h"

static inline void zpp_lion_elements(const struct zpp_lion_segment *s, const struct zpp_lion_consts *consts,
                                     size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        zpp_lion_element(consts, zpp_element_load(s->grad, s->grad_dtype, i), s->param + i, s->exp_avg + i);
        if (s->param_out) zpp_element_store(s->param_out, s->out_dtype, i, s->param[i]);
    }
}

#endif
