/* SPDX-License-Identifier: Apache-2.0
 *
 * The step inside the backward (docs/design/0032): each unit is stepped as soon as its gradient is reduced.
 *
 *   its gradients are complete on this rank   it is final: autograd reads its parameters no more
 *   they are reduced (one rank: at once)      it is stepped, by the thread of the backward; its gradient is dropped
 *   its shard is being written to the file    it stays gathered until that write is retired
 *
 * What fails is kept for zpp_step_in_backward_end, because other ranks wait for this one's reductions; nothing more is
 * stepped then. Where a device has the shards, all of it is enqueued there (step_in_backward_device.h).
 *
 *     create .. { begin, grad, grad, .., close or abort, end or drop } ..  destroy
 *
 * Threads: one at a time, that of the backward.
 */
#ifndef ZPP_ZERO_STEP_IN_BACKWARD_H
#define ZPP_ZERO_STEP_IN_BACKWARD_H

#include "step_plan.h"

typedef struct zpp_step_in_backward zpp_step_in_backward;

/* What the caller does for it. Functions that return int return 0, or another value on a failure that the caller keeps:
 * the call under way then returns INTERRUPTED. */
struct zpp_step_caller {
    void *ctx; /* borrowed until destroy */
    /* No parameter of the unit is to be read in this backward from now on. */
    int (*mark_final)(void *ctx, int unit);
    /* Where gradients are local (else both may be NULL): fill the unit's local_grads; *any: there is one. Later forget
     * them. */
    int (*hold_grads)(void *ctx, int unit, bool *any);
    int (*forget_grads)(void *ctx, int unit);
    /* Update the unit's shard, whose gradient is there; NULL: by the plan (step_plan.h). */
    int (*update)(void *ctx, int unit);
    /* The unit was pinned, and is not any more: release it unless something else needs it. */
    int (*release)(void *ctx, int unit);
    /* Around what may take long; both NULL: nothing to do. `end` gets what `begin` returned. */
    void *(*begin_long)(void *ctx);
    void (*end_long)(void *ctx, void *token);
    struct zpp_wait wait; /* for what waits, between begin_long and end_long */
};

/* New; end with zpp_step_in_backward_destroy (NULL is fine). `stepper` is borrowed until then. */
zpp_status zpp_step_in_backward_create(struct zpp_stepper *stepper, const struct zpp_step_caller *caller,
                                       zpp_step_in_backward **out, struct zpp_err *err);
void zpp_step_in_backward_destroy(zpp_step_in_backward *self);

/* After zpp_zero_backward_begin of a backward that steps. `groups` as zpp_step_plan_make takes them, from malloc and
 * owned from here on. */
void zpp_step_in_backward_begin(zpp_step_in_backward *self, struct zpp_optim_segment *groups, double grad_scale);
/* A gradient of a unit that was not stepped came; `partial`: not all of it. */
zpp_status zpp_step_in_backward_grad(zpp_step_in_backward *self, int unit, size_t param, bool partial,
                                     struct zpp_err *err);
/* Before zpp_zero_backward_end, where a device steps: what is left goes out, and is stepped unit by unit, so that few
 * gradients are held at once. */
zpp_status zpp_step_in_backward_drain(zpp_step_in_backward *self, struct zpp_err *err);
/* After zpp_zero_backward_end: step what is left. */
zpp_status zpp_step_in_backward_close(zpp_step_in_backward *self, struct zpp_err *err);
/* The backward ended by an exception. */
zpp_status zpp_step_in_backward_abort(zpp_step_in_backward *self, struct zpp_err *err);

/* How the step ended. */
struct zpp_step_in_backward_end {
    bool inconsistent; /* it failed, and some units had been stepped */
    int bad_unit;      /* the unit whose gradient was not finite, or -1, */
    int64_t bad_param; /* and its parameter */
    int64_t bad_elem;  /* and the first such element of that */
    struct zpp_aio_fault fault; /* written on status TIER only */
};
/* The step that the backward began is over, and all of it is written. Return the first failure since begin. */
zpp_status zpp_step_in_backward_end(zpp_step_in_backward *self, struct zpp_step_in_backward_end *out,
                                    struct zpp_err *err);
/* Steps of a device end later than the host's calls, so what end returns may be of a step before. This waits for all
 * that end was called for. Between steps; nothing to do where the host steps. */
zpp_status zpp_step_in_backward_settle(zpp_step_in_backward *self, struct zpp_step_in_backward_end *out,
                                       struct zpp_err *err);
/* The same as end, and failures are forgotten: a load replaces all that was stepped. */
zpp_status zpp_step_in_backward_drop(zpp_step_in_backward *self, struct zpp_err *err);

/* A forward has the unit that it needs. States for the next step are read once the forward has read its last unit,
 * because nothing waits for them earlier. */
void zpp_step_in_backward_forward(zpp_step_in_backward *self);

bool zpp_step_in_backward_is_open(const zpp_step_in_backward *self);    /* this backward steps */
bool zpp_step_in_backward_is_pending(const zpp_step_in_backward *self); /* begun, and not ended or dropped */
bool zpp_step_in_backward_is_final(const zpp_step_in_backward *self, int unit); /* in the backward under way */
bool zpp_step_in_backward_has_stepped(const zpp_step_in_backward *self, int unit);

#endif
