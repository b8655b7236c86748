/* SPDX-License-Identifier: Apache-2.0
 *
 * The delayed parameter update (ZeRO-Offload, arXiv:2101.06840, section 5.2): the step with the gradients of one pass,
 * whatever update it makes (ops/optim/optim.h), runs in a thread of its own while the next pass computes. Decisions:
 * docs/design/0023.
 *
 *   caller    .. begin(k) | pass k + 1, reads shards | wait(k), publish(k), begin(k + 1) | pass k + 2 ..
 *   thread               | step k, writes states and back buffers |
 *
 * Nothing else may touch from begin to wait what a step reads and writes: its states, its gradients, and the back
 * buffers that new values go to (`param` or `param_out` of its segments). Publishing copies those to where passes read.
 * Parameters in a file are written to the next copies of their units (unit_file.h), and publishing flips these.
 *
 * Threads: one caller at a time; figures from any.
 */
#ifndef ZPP_ZERO_STEP_DELAYED_H
#define ZPP_ZERO_STEP_DELAYED_H

#include "step_plan.h"

typedef struct zpp_delayed zpp_delayed;

/* New; end with zpp_delayed_destroy, which waits for the step under way (NULL is fine). */
zpp_status zpp_delayed_create(zpp_device *device, zpp_delayed **out, struct zpp_err *err);
void zpp_delayed_destroy(zpp_delayed *delayed);

/* As zpp_step_plan_make for a delayed step: this rank's sharded gradients move to their back buffers, and the next
 * backward does not touch them. (Where gradients are local, the caller keeps them.) */
zpp_status zpp_delayed_plan(const struct zpp_stepper *stepper, const struct zpp_optim_segment *groups,
                            double grad_scale, struct zpp_step_plan *plan, struct zpp_err *err);
/* Begin a step. The plan's arrays belong to `delayed` from here on, whatever it returns; what they point to is borrowed
 * until wait, the back buffers until publish. `here`: the step is done by the calling thread and those of `pool`,
 * before this returns: an exact step. STATE: the last step was not waited for. */
zpp_status zpp_delayed_begin(zpp_delayed *delayed, const struct zpp_step_plan *plan, bool here, zpp_pool *pool,
                             struct zpp_err *err);
/* Return how the step under way ended, once; OK where none is. No timeout: the kernel ends every request on a file.
 * `fault` is written on status TIER only. */
zpp_status zpp_delayed_wait(zpp_delayed *delayed, struct zpp_aio_fault *fault, struct zpp_err *err);
/* After finish: true if wait will return a failure. */
bool zpp_delayed_failed(const zpp_delayed *delayed);
/* After a wait that returned OK: the new values go to their shards. Nothing to do where they have gone. */
void zpp_delayed_publish(zpp_delayed *delayed, zpp_pool *pool);
/* The step under way, if there is one, is over when it returns, and still to be waited for: its states may be read. */
void zpp_delayed_finish(zpp_delayed *delayed);
/* The same, and the step is forgotten: no call returns its failure, and its new values are not published. */
void zpp_delayed_drop(zpp_delayed *delayed);
bool zpp_delayed_pending(const zpp_delayed *delayed); /* begun and not waited for, or waited for and not published */

struct zpp_delayed_figures {
    uint64_t steps;     /* begun */
    uint64_t step_ns;   /* how long they ran */
    uint64_t waited_ns; /* how long callers waited for them: what was not hidden */
};
void zpp_delayed_figures(const zpp_delayed *delayed, struct zpp_delayed_figures *out);

#endif
