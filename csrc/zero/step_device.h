/* SPDX-License-Identifier: Apache-2.0
 *
 * A step on shards in memory of a device, for which the host waits nowhere: everything is enqueued on one stream, and
 * what the step depends on stays on the device, in the record of ops/norm/clip.h:
 *
 *   measure   sums of squares of this rank's gradients, then norm and skip from those of all ranks
 *   limit     the factor of clipping
 *   settle    whether the step is taken, and the loss scale of the next backward
 *   launch    the plan: kernels that read the record's words
 *   send      the record goes to the host, beside what is enqueued later
 *   look      the host's copy, once it is there
 *
 * step_ahead.h is what a coordinator does with it. The bits are those of a step on the CPU (norm.c, step_plan.c).
 */
#ifndef ZPP_ZERO_STEP_DEVICE_H
#define ZPP_ZERO_STEP_DEVICE_H

#include "../ops/norm/clip.h"
#include "step_plan.h"

/* Make every rank's sums readable on the stream: `own` is device memory that was written there, with a sum of each
 * group of `pieces`, then one of each segment. Fill in `all` [ranks] with addresses of groups' sums that kernels can
 * read, unless the gradients are local and it has them already. */
typedef zpp_status (*zpp_share_sums_fn)(void *arg, zpp_stream *stream, const struct zpp_norm_pieces *pieces,
                                        const double *own, const double **all, struct zpp_err *err);

typedef struct zpp_step_device zpp_step_device;
struct zpp_step_device_options {
    zpp_stream *stream;      /* of the device where the shards are; borrowed until destroy */
    double loss_scale;       /* of the first backward; 1: none */
    uint64_t good_steps;     /* in a row before it, since the loss scale changed */
    const uint64_t *halt;    /* of struct zpp_clip, or NULL */
    zpp_share_sums_fn share; /* NULL: one rank, or gradients that are local, and nobody looks at the sums */
    void *share_arg;
};
/* New; free with zpp_step_device_destroy. */
zpp_status zpp_step_device_create(const struct zpp_step_device_options *options, zpp_step_device **out,
                                  struct zpp_err *err);
void zpp_step_device_destroy(zpp_step_device *step);                         /* waits for its work; NULL is fine */
struct zpp_clip_record *zpp_step_device_record(const zpp_step_device *step); /* the device's memory */

/* Enqueue the norm of the gradients of `stepper`, in rule->parts as zpp_clip does them. NOT_BUILT for sharded gradients
 * of several ranks without `share`. */
zpp_status zpp_step_device_measure(zpp_step_device *step, const struct zpp_stepper *stepper,
                                   const struct zpp_clip_rule *rule, struct zpp_err *err);
/* Enqueue parts that need no sums: LIMIT, SETTLE. */
zpp_status zpp_step_device_clip(zpp_step_device *step, const struct zpp_clip_rule *rule, struct zpp_err *err);
/* Enqueue the step that is taken if `behind` steps since `settled` of the rule were skipped. NOT_BUILT, and nothing
 * done, for a delayed plan and one of files. */
zpp_status zpp_step_device_launch(zpp_step_device *step, const struct zpp_step_plan *plan, size_t behind,
                                  struct zpp_err *err);
/* Enqueue a step with the plan's own grad_scale; as zpp_step_device_launch. `skip`: a word of the device, which is not
 * 0 where nothing is to be written, or NULL. */
zpp_status zpp_step_device_enqueue(zpp_stream *stream, const struct zpp_step_plan *plan, const uint32_t *skip,
                                   struct zpp_err *err);
/* Enqueue the step of a coordinator whose shards are on its device, with the plan's own grad_scale, on its compute
 * stream. As zpp_step_device_launch. */
zpp_status zpp_step_device_run(const struct zpp_stepper *stepper, const struct zpp_step_plan *plan,
                               struct zpp_err *err);
/* Enqueue a copy of the record to place `at` of ZPP_CLIP_AHEAD on the host; then read the last one that was sent there.
 * AGAIN: `wait` is NULL, and it is not there yet. */
zpp_status zpp_step_device_send(zpp_step_device *step, size_t at, struct zpp_err *err);
zpp_status zpp_step_device_look(zpp_step_device *step, size_t at, const struct zpp_wait *wait,
                                struct zpp_clip_record *out, struct zpp_err *err);

#endif
