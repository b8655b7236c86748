/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms element by element: the scalar version, and the ends of the vector versions.
 */
#ifndef ZPP_OPS_ONEBIT_LAMB_ELEMENTS_H
#define ZPP_OPS_ONEBIT_LAMB_ELEMENTS_H

#include "kernels.h"

static inline void zpp_onebit_lamb_elements(const struct zpp_onebit_lamb_segment *s,
                                            const struct zpp_onebit_lamb_consts *consts, size_t begin, size_t end,
                                            struct zpp_onebit_lamb_lanes *lanes) {
    for (size_t i = begin; i < end; ++i) {
        const size_t l = i % ZPP_ONEBIT_LAMB_LANES;
        struct zpp_onebit_lamb_lane lane = { lanes->alone[l], lanes->both[l], lanes->largest[l] };
        s->fresh_sq[i] = zpp_onebit_lamb_element(consts, s->param[i], s->exp_avg[i], s->before[i], s->exp_avg_sq[i],
                                                 s->fresh_sq[i], &lane);
        lanes->alone[l] = lane.alone, lanes->both[l] = lane.both, lanes->largest[l] = lane.largest;
    }
}

#endif
