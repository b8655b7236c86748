/* SPDX-License-Identifier: Apache-2.0
 *
 * The step with a frozen variance element by element: the scalar version, and the ends of the vector versions.
 */
#ifndef ZPP_OPS_FROZEN_ELEMENTS_H
#define ZPP_OPS_FROZEN_ELEMENTS_H

#include "../element.h"
#include "kernels.h"

static inline void zpp_frozen_elements(const struct zpp_frozen_segment *s, const struct zpp_frozen_consts *consts,
                                       size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        s->param[i] = zpp_frozen_moved(consts, s->param[i], s->exp_avg[i], s->exp_avg_sq[i]);
        if (s->param_out) zpp_element_store(s->param_out, s->out_dtype, i, s->param[i]);
    }
}

#endif
