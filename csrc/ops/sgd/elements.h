/* SPDX-License-Identifier: Apache-2.0
 *
 * SGD element by element: the scalar version, and the ends of the vector versions.
 */
#ifndef ZPP_OPS_SGD_ELEMENTS_H
#define ZPP_OPS_SGD_ELEMENTS_H

#include "../element.h"
#include "kernels.h"

static inline void zpp_sgd_elements(const struct zpp_sgd_segment *s, const struct zpp_sgd_consts *consts, size_t begin,
                                    size_t end) {
    for (size_t i = begin; i < end; ++i) {
        zpp_sgd_element(consts, zpp_element_load(s->grad, s->grad_dtype, i), s->param + i,
                        s->momentum_buffer ? s->momentum_buffer + i : NULL);
        if (s->param_out) zpp_element_store(s->param_out, s->out_dtype, i, s->param[i]);
    }
}

#endif
