/* SPDX-License-Identifier: Apache-2.0
 *
 * Adagrad element by element: the scalar version, and the ends of the vector versions.
 */
#ifndef ZPP_OPS_ADAGRAD_ELEMENTS_H
#define ZPP_OPS_ADAGRAD_ELEMENTS_H

#include "../element.h"
#include "kernels.h"

static inline void zpp_adagrad_elements(const struct zpp_adagrad_segment *s, const struct zpp_adagrad_consts *consts,
                                        size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        zpp_adagrad_element(consts, zpp_element_load(s->grad, s->grad_dtype, i), s->param + i, s->sum + i);
        if (s->param_out) zpp_element_store(s->param_out, s->out_dtype, i, s->param[i]);
    }
}

#endif
