/* SPDX-License-Identifier: Apache-2.0
 *
 * The step inside the backward on shards in memory of a device (docs/design/0051), for step_in_backward.c. Everything
 * is enqueued behind the sums of gradients, and the host waits for none of it:
 *
 *   unit   whether its gradient is finite, and its step, which writes nothing once a gradient was not finite; or the
 *          caller's step, between begin and stepped
 *   end    the computation runs after all steps; how they ended goes to the host
 *   look   the host learns what has come
 *
 * One gradient that is not finite ends all steps of this rank, those of later backwards too, until `forget`. So it does
 * not matter how late the host learns of it. At most ZPP_CLIP_AHEAD ends are under way.
 *
 * Threads: one at a time.
 */
#ifndef ZPP_ZERO_STEP_IN_BACKWARD_DEVICE_H
#define ZPP_ZERO_STEP_IN_BACKWARD_DEVICE_H

#include "step_plan.h"

typedef struct zpp_device_steps zpp_device_steps;

/* True if the steps inside the backward of this coordinator are a device's. */
bool zpp_device_steps_wanted(const zpp_zero *zero);
/* New; free with zpp_device_steps_destroy, which waits for its work (NULL is fine). `stepper` is borrowed until
 * then. */
zpp_status zpp_device_steps_create(const struct zpp_stepper *stepper, zpp_device_steps **out, struct zpp_err *err);
void zpp_device_steps_destroy(zpp_device_steps *self);

/* Enqueue the step of a unit whose gradient is reduced. `groups` as zpp_step_plan_make takes them. */
zpp_status zpp_device_steps_unit(zpp_device_steps *self, int unit, const struct zpp_optim_segment *groups,
                                 double grad_scale, struct zpp_err *err);
/* The same where the caller computes the step, on the computation's stream: enqueue the look at the gradient, and let
 * that stream run behind the sum; then, once the step is enqueued, let later sums run behind it, because they may have
 * the memory of this gradient. Nothing stops such a step at a gradient that is not finite. */
zpp_status zpp_device_steps_begin(zpp_device_steps *self, int unit, struct zpp_err *err);
zpp_status zpp_device_steps_stepped(zpp_device_steps *self, struct zpp_err *err);
/* All units of a backward were stepped; to be looked at next. */
zpp_status zpp_device_steps_end(zpp_device_steps *self, struct zpp_err *err);

/* The first gradient that was not finite. */
struct zpp_bad_gradient {
    int unit; /* -1: none is known */
    size_t param;
};
/* Look at the ends that have come, and wait for `all`, or for the oldest where as many are under way as may be. STATE:
 * a gradient was not finite (*out), or the group has failed. */
zpp_status zpp_device_steps_look(zpp_device_steps *self, bool all, const struct zpp_wait *wait,
                                 struct zpp_bad_gradient *out, struct zpp_err *err);
/* Forget how steps ended: a load replaces all that they wrote. */
zpp_status zpp_device_steps_forget(zpp_device_steps *self, struct zpp_err *err);

#endif
