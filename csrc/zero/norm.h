/* SPDX-License-Identifier: Apache-2.0
 *
 * The norm of the gradients that a step would use. Sums of squares are made in double for each unit and shard, and are
 * added in the order of units and ranks, so that the norm has the same bits in every stage at equal numbers of ranks.
 *
 * Threads: as step_plan.h.
 */
#ifndef ZPP_ZERO_NORM_H
#define ZPP_ZERO_NORM_H

#include "step_plan.h"

/* One shard of one unit. */
struct zpp_shard_norm {
    double squares;
    int64_t bad_param; /* the first parameter whose gradient is not finite; -1: none */
    uint64_t origins;  /* then: the ranks on which the unit's gradient was not finite before the sum (origin.h) */
};

/* The shard of a unit that this rank steps, whose gradient is in memory. */
zpp_status zpp_norm_of_unit(const struct zpp_stepper *stepper, int unit, struct zpp_shard_norm *out,
                            struct zpp_err *err);
/* Collective: norms[ranks * units], rank after rank. Gradients in a file are read once, from the last unit to the
 * first: the order in which they are read ahead. */
zpp_status zpp_norm_of_all(const struct zpp_stepper *stepper, struct zpp_shard_norm *norms, const struct zpp_wait *wait,
                           struct zpp_err *err);
/* The sum of `squares`, in the order that this file promises. */
double zpp_norm_squares_of(const struct zpp_shard_norm *norms, int units, int ranks);

#endif
