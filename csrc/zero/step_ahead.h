/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps that the host enqueues ahead of the device (docs/design/0044-steps-without-host-waits.md). The device measures
 * the norm, clips, and decides whether a step is taken (step_device.h); the host learns it later. Up to ZPP_CLIP_AHEAD
 * steps are under way; then the host waits for the oldest.
 *
 * A step counts what it steps, and Adam's rates are functions of the count. If some steps under way may have been
 * skipped, the host enqueues the step once for each number of them, and words of the record let one write.
 *
 * The ranks take the same outcomes at the same step: each says how many it has seen when a norm is measured, and all
 * take the least of these. The boards, one a rank in pinned memory that all ranks map, have every rank's sums of
 * squares: a unit's sums are for the norm, and a piece's name the parameters of a skipped step.
 *
 * Threads: one at a time.
 */
#ifndef ZPP_ZERO_STEP_AHEAD_H
#define ZPP_ZERO_STEP_AHEAD_H

#include "step_device.h"

/* How a step ended. */
struct zpp_step_outcome {
    struct zpp_clip_record record;
    uint64_t measured; /* the number of its norm */
    uint8_t *counted;  /* [parameters of all units]: 1 for those that it stepped */
    struct zpp_step_name {
        uint32_t unit, param;
    } *bad; /* of a skipped step: parameters whose gradients are not finite, of all ranks */
    size_t bad_count;
};

typedef struct zpp_step_ahead zpp_step_ahead;
/* True if steps of the coordinator can be enqueued ahead: shards on the device, of one group without a job. */
bool zpp_step_ahead_works(const zpp_zero *zero);
/* Collective. New; free with zpp_step_ahead_destroy, before the stepper, which is borrowed. The loss scale is the
 * first backward's. */
zpp_status zpp_step_ahead_create(const struct zpp_stepper *stepper, double loss_scale, uint64_t good_steps,
                                 const struct zpp_wait *wait, zpp_step_ahead **out, struct zpp_err *err);
void zpp_step_ahead_destroy(zpp_step_ahead *ahead);                         /* waits for its work; NULL is fine */
struct zpp_clip_record *zpp_step_ahead_record(const zpp_step_ahead *ahead); /* the device's memory */

/* Collective: enqueue the norm; `rule` needs `scale` only. Outcomes that all ranks have seen are ready afterwards. */
zpp_status zpp_step_ahead_measure(zpp_step_ahead *ahead, const struct zpp_clip_rule *rule, const struct zpp_wait *wait,
                                  struct zpp_err *err);
/* Enqueue the factor of clipping: `scale`, `max_norm` and `factor` of the rule. */
zpp_status zpp_step_ahead_limit(zpp_step_ahead *ahead, const struct zpp_clip_rule *rule, struct zpp_err *err);
/* Between zpp_zero_step_begin and _end, after a norm: enqueue the step. `groups` as for zpp_step_plan_make. */
zpp_status zpp_step_ahead_run(zpp_step_ahead *ahead, const struct zpp_optim_segment *groups,
                              const struct zpp_clip_rule *rule, struct zpp_err *err);
/* Called by all ranks: wait for every step under way, and make its outcome ready. */
zpp_status zpp_step_ahead_settle(zpp_step_ahead *ahead, const struct zpp_wait *wait, struct zpp_err *err);
/* Take the oldest outcome that is ready, which lives until the next call with a device; NULL: there is none. What a
 * skipped step counted is counted back. */
const struct zpp_step_outcome *zpp_step_ahead_take(zpp_step_ahead *ahead);
/* Wait for the newest step and look at it; nothing is taken. NULL in *out: every outcome was taken. */
zpp_status zpp_step_ahead_newest(zpp_step_ahead *ahead, const struct zpp_wait *wait,
                                 const struct zpp_step_outcome **out, struct zpp_err *err);

#endif
