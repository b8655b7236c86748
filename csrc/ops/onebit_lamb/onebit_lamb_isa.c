/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms over elements of one segment, compiled once for each instruction set.
 * onebit_lamb_body.h has the arithmetic.
 */
#include "kernels.h"

#if ZPP_LANES == 1

static void fresh(const struct zpp_onebit_lamb_segment *s, const struct zpp_onebit_lamb_consts *consts, size_t begin,
                  size_t end, struct zpp_onebit_lamb_lanes *sums) {
    for (size_t i = begin; i < end; ++i) {
        const size_t l = i % ZPP_ONEBIT_LAMB_LANES;
        struct zpp_onebit_lamb_lane lane = { sums->alone[l], sums->both[l], sums->largest[l] };
        s->fresh_sq[i] = zpp_onebit_lamb_element(consts, s->param[i], s->exp_avg[i], s->before[i], s->exp_avg_sq[i],
                                                 s->fresh_sq[i], &lane);
        sums->alone[l] = lane.alone, sums->both[l] = lane.both, sums->largest[l] = lane.largest;
    }
}

#else

static void fresh(const struct zpp_onebit_lamb_segment *segment, const struct zpp_onebit_lamb_consts *consts,
                  size_t begin, size_t end, struct zpp_onebit_lamb_lanes *sums) {
    const struct zpp_onebit_lamb_segment s = *segment; /* copies: the compiler may not assume that stores leave them */
    const struct zpp_onebit_lamb_consts c = *consts;
    struct zpp_onebit_lamb_lane lane = { v16_load(sums->alone), v16_load(sums->both), v16_load(sums->largest) };
    size_t i = begin;
    for (; i + V16_LANES <= end; i += V16_LANES) {
        v16_store(s.fresh_sq + i,
                  zpp_onebit_lamb_element(&c, v16_load(s.param + i), v16_load(s.exp_avg + i), v16_load(s.before + i),
                                          v16_load(s.exp_avg_sq + i), v16_load(s.fresh_sq + i), &lane));
    }
    v16_store(sums->alone, lane.alone);
    v16_store(sums->both, lane.both);
    v16_store(sums->largest, lane.largest);
    if (i < end) zpp_onebit_lamb_scalar.fresh(segment, consts, i, end, sums);
}

#endif

const struct zpp_onebit_lamb_kernels ZPP_ISA_NAME(zpp_onebit_lamb) = { fresh };
