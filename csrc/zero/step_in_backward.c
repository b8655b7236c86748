/* SPDX-License-Identifier: Apache-2.0
 *
 * See step_in_backward.h.
 */
#include "step_in_backward.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "reduce.h"
#include "step_in_backward_device.h"
#include "step_plan.h"

enum { WRITES = 3 }; /* units whose shards are being written at once; more, and the backward waits */

struct progress { /* of one unit in this backward */
    unsigned char *seen; /* [params] that had a gradient */
    size_t missing;      /* parameters that had none yet */
    bool partial;        /* some gradients came in parts */
    bool final;          /* complete on this rank: its parameters are not read any more */
    bool stepped;
    bool pinned;         /* gathered until its shard is written */
};

struct zpp_step_in_backward {
    struct zpp_stepper *stepper;
    zpp_device_steps *device; /* NULL: the host steps */
    struct zpp_step_caller caller;
    struct progress *units;
    struct zpp_optim_segment *groups;
    double grad_scale;
    bool open, pending;
    bool optim_file_open; /* between zpp_optim_file_backward_step_begin and _end */
    bool reads_ahead;     /* states for the next step are to be read */
    int done;             /* units of the order of reductions that were stepped, or had no gradient */
    int stepped;
    int writing[WRITES], writing_count; /* units, oldest first */
    bool raised;          /* a function of the caller failed in the call under way */
    bool failed;          /* nothing more is stepped; why: */
    struct zpp_err err;
    struct zpp_aio_fault fault;
    int bad_unit;
    int64_t bad_param, bad_elem;
};

/* --- life --------------------------------------------------------------------------------------------------------- */

zpp_status zpp_step_in_backward_create(struct zpp_stepper *stepper, const struct zpp_step_caller *caller,
                                       zpp_step_in_backward **out, struct zpp_err *err) {
    const size_t count = (size_t)stepper->units_count;
    zpp_step_in_backward *self = calloc(1, sizeof *self);
    if (!self) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for a step inside the backward");
    self->stepper = stepper;
    self->caller = *caller;
    self->bad_unit = -1;
    self->units = calloc(count + 1, sizeof *self->units);
    bool memory = self->units;
    for (size_t i = 0; i < count && memory; i++) {
        self->units[i].seen = calloc(stepper->units[i].unit->params + 1, 1);
        memory = self->units[i].seen;
    }
    zpp_status status = ZPP_OK;
    if (!memory)
        status = zpp_fail(err, ZPP_NOMEM, "zero: no memory for a step of %zu units inside the backward", count);
    else if (zpp_device_steps_wanted(stepper->zero))
        status = zpp_device_steps_create(stepper, &self->device, err);
    if (status != ZPP_OK) zpp_step_in_backward_destroy(self);
    else *out = self;
    return status;
}

void zpp_step_in_backward_destroy(zpp_step_in_backward *self) {
    if (!self) return;
    zpp_device_steps_destroy(self->device);
    for (int i = 0; self->units && i < self->stepper->units_count; i++) free(self->units[i].seen);
    free(self->units);
    free(self->groups);
    free(self);
}

static void forget_units(zpp_step_in_backward *self) {
    for (int i = 0; i < self->stepper->units_count; i++) {
        struct progress *unit = &self->units[i];
        const size_t params = self->stepper->units[i].unit->params;
        memset(unit->seen, 0, params);
        unit->missing = params;
        unit->partial = unit->final = unit->stepped = false;
    }
}

static void keep_failure(zpp_step_in_backward *self, const struct zpp_err *err, const struct zpp_aio_fault *fault) {
    if (self->failed) return;
    self->failed = true;
    self->err = *err;
    if (fault && err->status == ZPP_TIER) self->fault = *fault;
}

/* --- the caller --------------------------------------------------------------------------------------------------- */

static void *begin_long(const zpp_step_in_backward *self) {
    return self->caller.begin_long ? self->caller.begin_long(self->caller.ctx) : NULL;
}

static void end_long(const zpp_step_in_backward *self, void *token) {
    if (self->caller.end_long) self->caller.end_long(self->caller.ctx, token);
}

/* Call one of the caller's functions. Return true where it did what it should. */
static bool call(zpp_step_in_backward *self, int (*function)(void *ctx, int unit), int unit) {
    const bool failed = function(self->caller.ctx, unit) != 0;
    self->raised |= failed;
    return !failed;
}

/* Return INTERRUPTED if one of the caller's functions has failed. */
static zpp_status result_of(const zpp_step_in_backward *self, struct zpp_err *err) {
    return self->raised ? zpp_fail(err, ZPP_INTERRUPTED, "zero: the caller's part of a step failed") : ZPP_OK;
}

/* --- a unit stays gathered until its shard is written ------------------------------------------------------------- */

static struct zpp_unit *core_of(const zpp_step_in_backward *self, int unit) {
    return self->stepper->units[unit].unit;
}

static void pin(zpp_step_in_backward *self, int unit) {
    if (self->units[unit].pinned) return;
    zpp_unit_pin(core_of(self, unit));
    self->units[unit].pinned = true;
}

static void unpin(zpp_step_in_backward *self, int unit) {
    if (!self->units[unit].pinned) return;
    zpp_unit_unpin(core_of(self, unit));
    self->units[unit].pinned = false;
    (void)call(self, self->caller.release, unit);
}

/* Bring the shard to memory, to be changed in place. */
static zpp_status open_shard(zpp_step_in_backward *self, int unit, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!zpp_unit_opens_shard(core_of(self, unit))) return ZPP_OK;
    void *token = begin_long(self);
    const zpp_status status = zpp_zero_shard_open(self->stepper->zero, unit, &self->caller.wait, err);
    end_long(self, token);
    if (status == ZPP_OK) pin(self, unit);
    if (status == ZPP_TIER) *fault = *zpp_zero_fault(self->stepper->zero);
    return status;
}

static void close_shard(zpp_step_in_backward *self, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (!zpp_unit_opens_shard(core_of(self, unit))) return;
    void *token = begin_long(self);
    const zpp_status status = zpp_zero_shard_write_wait(self->stepper->zero, unit, &err);
    end_long(self, token);
    if (status != ZPP_OK) keep_failure(self, &err, zpp_zero_fault(self->stepper->zero));
    unpin(self, unit);
}

/* End the oldest write. Writes that have ended are retired no earlier than their slot is needed: the units that the
 * next forward begins with are written last, and stay. */
static void retire_write(zpp_step_in_backward *self) {
    const int unit = self->writing[0];
    self->writing_count--;
    memmove(self->writing, self->writing + 1, (size_t)self->writing_count * sizeof *self->writing);
    close_shard(self, unit);
}

static zpp_status begin_write(zpp_step_in_backward *self, int unit, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!zpp_unit_opens_shard(core_of(self, unit))) return ZPP_OK;
    while (self->writing_count == WRITES && !self->raised) retire_write(self);
    if (self->raised) return zpp_fail(err, ZPP_STATE, "a unit could not be released");
    const zpp_status status = zpp_zero_shard_write_begin(self->stepper->zero, unit, err);
    if (status == ZPP_OK) self->writing[self->writing_count++] = unit;
    if (status == ZPP_TIER) *fault = *zpp_zero_fault(self->stepper->zero);
    return status;
}

/* Read on into buffers of states whose writes have ended. Nothing else does that between two units, and the disk would
 * have nothing to do. */
static void poll_states(zpp_step_in_backward *self) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    if (!self->optim_file_open || self->failed || !self->stepper->optim_file) return;
    if (zpp_optim_file_backward_step_poll(self->stepper->optim_file, &fault, &err) != ZPP_OK)
        keep_failure(self, &err, &fault);
}

/* --- the update of one unit --------------------------------------------------------------------------------------- */

/* Bring the gradient to memory, where gradients are in a file. */
static zpp_status load_grad(zpp_step_in_backward *self, int unit, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!zpp_zero_loads_grads(self->stepper->zero)) return ZPP_OK;
    void *token = begin_long(self);
    const zpp_status status = zpp_zero_grad_load(self->stepper->zero, unit, fault, err);
    end_long(self, token);
    return status;
}

static zpp_status require_finite(zpp_step_in_backward *self, int unit, struct zpp_err *err) {
    struct zpp_shard_norm norm;
    const zpp_status status = zpp_norm_of_unit(self->stepper, unit, &norm, err);
    if (status != ZPP_OK || norm.bad_param < 0) return status;
    self->bad_unit = unit;
    self->bad_param = norm.bad_param;
    self->bad_elem = norm.bad_elem;
    return zpp_fail(err, ZPP_STATE, "a gradient is not finite");
}

static zpp_status open_states(zpp_step_in_backward *self, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!self->stepper->optim_file) return zpp_fail(err, ZPP_STATE, "tier: closed with its model; prepare a new one");
    if (self->optim_file_open) return ZPP_OK;
    const zpp_status status = zpp_optim_file_backward_step_begin(self->stepper->optim_file, fault, err);
    self->optim_file_open = status == ZPP_OK;
    return status;
}

static zpp_status run_plan(zpp_step_in_backward *self, int unit, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct zpp_stepper *stepper = self->stepper;
    const bool in_file = stepper->units[unit].states.in_file;
    struct zpp_step_plan plan = { .grad_scale = self->grad_scale, .optim_file = in_file ? stepper->optim_file : NULL,
                                  .files = zpp_step_files_of(stepper->zero, false) };
    zpp_status status = zpp_step_plan_add(stepper, unit, self->groups, &plan, err);
    if (in_file && status == ZPP_OK) status = open_states(self, fault, err);
    if (status == ZPP_OK) status = zpp_step_plan_run_unit(&plan, stepper->pool, fault, err);
    zpp_step_plan_drop(&plan);
    return status;
}

static zpp_status update_on_device(zpp_step_in_backward *self, int unit, struct zpp_err *err) {
    const bool calls = self->caller.update;
    self->stepped++;
    void *token = begin_long(self);
    zpp_status status = calls ? zpp_device_steps_begin(self->device, unit, err)
                              : zpp_device_steps_unit(self->device, unit, self->groups, self->grad_scale, err);
    end_long(self, token);
    if (status != ZPP_OK || !calls) return status;
    if (!call(self, self->caller.update, unit)) return zpp_fail(err, ZPP_STATE, "an update raised");
    return zpp_device_steps_stepped(self->device, err);
}

static zpp_status update_values(zpp_step_in_backward *self, int unit, struct zpp_aio_fault *fault,
                                struct zpp_err *err) {
    self->stepped++;
    if (self->caller.update)
        return call(self, self->caller.update, unit) ? ZPP_OK : zpp_fail(err, ZPP_STATE, "an update raised");
    void *token = begin_long(self);
    const zpp_status status = run_plan(self, unit, fault, err);
    end_long(self, token);
    return status;
}

static zpp_status update_on_host(zpp_step_in_backward *self, int unit, struct zpp_aio_fault *fault,
                                 struct zpp_err *err) {
    zpp_status status = load_grad(self, unit, fault, err);
    if (status == ZPP_OK) status = require_finite(self, unit, err);
    if (status == ZPP_OK) status = open_shard(self, unit, fault, err);
    if (status == ZPP_OK) status = update_values(self, unit, fault, err);
    return status == ZPP_OK ? begin_write(self, unit, fault, err) : status;
}

static void update(zpp_step_in_backward *self, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const zpp_status status =
        self->device ? update_on_device(self, unit, &err) : update_on_host(self, unit, &fault, &err);
    if (status == ZPP_OK) return;
    char words[ZPP_UNIT_WORDS];
    if (self->raised)
        zpp_fail(&err, ZPP_STATE, "the update of %s raised", zpp_unit_words(core_of(self, unit), words, sizeof words));
    keep_failure(self, &err, &fault);
}

/* Mark a unit final, once its gradients are complete on this rank. */
static bool make_final(zpp_step_in_backward *self, int unit) {
    const struct zpp_unit *core = core_of(self, unit);
    if (self->units[unit].final) return true;
    self->units[unit].final = true;
    if (zpp_unit_opens_shard(core) && zpp_unit_is_gathered(core) && !self->failed) pin(self, unit);
    return call(self, self->caller.mark_final, unit);
}

/* Make the gradients readable; *any: there is one. False: the caller failed. */
static bool hold_grads(zpp_step_in_backward *self, int unit, bool *any) {
    *any = false;
    if (!zpp_zero_grads_are_local(self->stepper->zero)) {
        if (!make_final(self, unit)) return false;
        *any = zpp_zero_grad_shard(self->stepper->zero, unit, NULL) != NULL;
        return true;
    }
    self->raised |= self->caller.hold_grads(self->caller.ctx, unit, any) != 0;
    return !self->raised && (!*any || make_final(self, unit));
}

static void drop_grads(zpp_step_in_backward *self, int unit, bool any) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_zero_grads_are_local(self->stepper->zero)) {
        if (any) (void)call(self, self->caller.forget_grads, unit);
    } else if (zpp_zero_drop_grad(self->stepper->zero, unit, &err) != ZPP_OK) {
        keep_failure(self, &err, zpp_zero_fault(self->stepper->zero));
    }
}

/* The unit is reduced: update it, and drop its gradient. */
static void step_unit(zpp_step_in_backward *self, int unit) {
    bool any;
    if (self->units[unit].stepped) return;
    self->units[unit].stepped = true;
    if (!hold_grads(self, unit, &any)) return;
    if (any && !self->failed) update(self, unit);
    drop_grads(self, unit, any);
    const bool writes = self->writing_count && self->writing[self->writing_count - 1] == unit;
    if (!writes) close_shard(self, unit);
}

/* --- a backward --------------------------------------------------------------------------------------------------- */

static void read_ahead(zpp_step_in_backward *self) {
    self->reads_ahead = false;
    if (self->stepper->optim_file) zpp_optim_file_backward_step_ahead(self->stepper->optim_file);
}

void zpp_step_in_backward_forward(zpp_step_in_backward *self) {
    if (self->reads_ahead && !zpp_zero_reads_forward(self->stepper->zero)) read_ahead(self);
}

void zpp_step_in_backward_begin(zpp_step_in_backward *self, struct zpp_optim_segment *groups, double grad_scale) {
    if (self->reads_ahead) read_ahead(self);
    free(self->groups);
    self->groups = groups;
    forget_units(self);
    self->grad_scale = grad_scale;
    self->done = self->stepped = 0;
    self->failed = false;
    self->bad_unit = -1;
    self->open = true;
    zpp_zero_keep_grads(self->stepper->zero);
}

static void step_reduced(zpp_step_in_backward *self) {
    while (!self->raised) {
        void *token = begin_long(self);
        const int unit = zpp_zero_next_reduced(self->stepper->zero, self->done);
        end_long(self, token);
        if (unit < 0) return;
        self->done++;
        step_unit(self, unit);
    }
}

/* Wait for the next unit that went out, and step it. */
static zpp_status step_next(zpp_step_in_backward *self, struct zpp_err *err) {
    int unit = -1;
    void *token = begin_long(self);
    const zpp_status status =
        zpp_zero_wait_reduced(self->stepper->zero, self->done, &self->caller.wait, &unit, err);
    end_long(self, token);
    if (status != ZPP_OK) return status;
    self->done++;
    step_unit(self, unit);
    return ZPP_OK;
}

/* The unit that goes out next has memory for its sum. */
static zpp_status step_overdue(zpp_step_in_backward *self, struct zpp_err *err) {
    const zpp_zero *zero = self->stepper->zero;
    zpp_status status = ZPP_OK;
    if (!zpp_reduce_sends_singly(zero)) return ZPP_OK;
    while (zpp_reduce_sent(zero) - self->done >= ZPP_POOLED_GRADS && status == ZPP_OK && !self->raised)
        status = step_next(self, err);
    return status;
}

zpp_status zpp_step_in_backward_grad(zpp_step_in_backward *self, int unit, size_t param, bool partial,
                                     struct zpp_err *err) {
    struct progress *own = &self->units[unit];
    if (!self->open) return ZPP_OK;
    assert(!own->stepped);
    self->raised = false;
    own->partial |= partial;
    if (!own->seen[param]) own->missing--;
    own->seen[param] = 1;
    const bool complete = own->missing == 0 && !own->partial && zpp_zero_used_once(self->stepper->zero, unit);
    if (complete && !make_final(self, unit)) return result_of(self, err);
    zpp_status status = ZPP_OK;
    if (zpp_zero_reduces(self->stepper->zero)) {
        step_reduced(self);
        status = step_overdue(self, err);
    } else if (complete) {
        step_unit(self, unit);
    }
    if (!self->raised) poll_states(self);
    return status == ZPP_OK ? result_of(self, err) : status;
}

zpp_status zpp_step_in_backward_drain(zpp_step_in_backward *self, struct zpp_err *err) {
    zpp_zero *zero = self->stepper->zero;
    if (!self->open || !self->device || !zpp_zero_reduces(zero)) return ZPP_OK;
    zpp_status status = ZPP_OK;
    self->raised = false;
    while (status == ZPP_OK && !self->raised) {
        void *token = begin_long(self);
        status = zpp_reduce_send_until(zero, self->done + ZPP_POOLED_GRADS, &self->caller.wait, err);
        end_long(self, token);
        if (status != ZPP_OK || zpp_reduce_sent(zero) == self->done) break;
        status = step_next(self, err);
    }
    return status == ZPP_OK ? result_of(self, err) : status;
}

zpp_status zpp_step_in_backward_close(zpp_step_in_backward *self, struct zpp_err *err) {
    if (!self->open) return ZPP_OK;
    self->raised = false;
    if (zpp_zero_reduces(self->stepper->zero)) step_reduced(self);
    for (int i = self->stepper->units_count - 1; !zpp_zero_reduces(self->stepper->zero) && i >= 0 && !self->raised; i--)
        if (core_of(self, i)->trainable) step_unit(self, i);
    self->open = false;
    self->pending = self->stepped || self->failed;
    return result_of(self, err);
}

/* --- the end of a step -------------------------------------------------------------------------------------------- */

static void end_states(zpp_step_in_backward *self) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const bool opened = self->optim_file_open && self->stepper->optim_file;
    self->optim_file_open = false;
    if (!opened) return;
    void *token = begin_long(self);
    const zpp_status status = zpp_optim_file_backward_step_end(self->stepper->optim_file, &fault, &err);
    end_long(self, token);
    self->reads_ahead = status == ZPP_OK;
    if (status != ZPP_OK) keep_failure(self, &err, &fault);
    if (!zpp_zero_is_masked(self->stepper->zero)) zpp_step_in_backward_forward(self);
}

static void end_writes(zpp_step_in_backward *self) {
    while (self->writing_count && !self->raised) retire_write(self);
    for (int i = 0; i < self->stepper->units_count && !self->raised; i++) unpin(self, i);
    end_states(self);
    forget_units(self);
}

zpp_status zpp_step_in_backward_abort(zpp_step_in_backward *self, struct zpp_err *err) {
    if (!self->open) return ZPP_OK;
    struct zpp_err aborted = ZPP_ERR_INIT;
    self->raised = self->open = false;
    zpp_fail(&aborted, ZPP_STATE, "zero: the backward ended by an exception after %d unit%s had been stepped",
             self->stepped, self->stepped == 1 ? "" : "s");
    if (self->stepped) keep_failure(self, &aborted, NULL);
    self->pending = self->stepped;
    end_writes(self);
    return result_of(self, err);
}

/* The device tells how its steps ended; with `all` it is waited for. */
static void look_at_device(zpp_step_in_backward *self, bool ends, bool all) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_bad_gradient bad = {.unit = -1};
    if (!self->device) return;
    void *token = begin_long(self);
    zpp_status status = ends ? zpp_device_steps_end(self->device, &err) : ZPP_OK;
    if (status == ZPP_OK) status = zpp_device_steps_look(self->device, all, &self->caller.wait, &bad, &err);
    end_long(self, token);
    if (status == ZPP_OK || self->failed) return;
    keep_failure(self, &err, NULL);
    self->bad_unit = bad.unit;
    self->bad_param = (int64_t)bad.param;
    self->bad_elem = -1;
}

/* Tell how steps ended, and forget it. A device may have stepped units before one that it refused. */
static zpp_status tell(zpp_step_in_backward *self, struct zpp_step_in_backward_end *out, struct zpp_err *err) {
    const bool failed = self->failed;
    *out = (struct zpp_step_in_backward_end){ .inconsistent =
                                                  (failed || self->raised) && (self->stepped || self->device),
                                              .bad_unit = self->bad_unit, .bad_param = self->bad_param,
                                              .bad_elem = self->bad_elem,
                                              .fault = self->fault };
    self->pending = self->failed = false;
    if (self->raised || !failed) return result_of(self, err);
    *err = self->err;
    return self->err.status;
}

zpp_status zpp_step_in_backward_end(zpp_step_in_backward *self, struct zpp_step_in_backward_end *out,
                                    struct zpp_err *err) {
    self->raised = false;
    if (!self->failed) zpp_zero_keep_for_forward(self->stepper->zero);
    end_writes(self);
    look_at_device(self, true, false);
    return tell(self, out, err);
}

zpp_status zpp_step_in_backward_settle(zpp_step_in_backward *self, struct zpp_step_in_backward_end *out,
                                       struct zpp_err *err) {
    self->raised = false;
    look_at_device(self, false, true);
    return tell(self, out, err);
}

zpp_status zpp_step_in_backward_drop(zpp_step_in_backward *self, struct zpp_err *err) {
    self->raised = false;
    end_writes(self);
    self->pending = self->failed = false;
    if (self->device && zpp_device_steps_forget(self->device, err) != ZPP_OK) return err->status;
    return result_of(self, err);
}

/* --- small answers ------------------------------------------------------------------------------------------------ */

bool zpp_step_in_backward_is_open(const zpp_step_in_backward *self) {
    return self->open;
}

bool zpp_step_in_backward_is_pending(const zpp_step_in_backward *self) {
    return self->pending;
}

bool zpp_step_in_backward_is_final(const zpp_step_in_backward *self, int unit) {
    return self->open && self->units[unit].final;
}

bool zpp_step_in_backward_has_stepped(const zpp_step_in_backward *self, int unit) {
    return self->open && self->units[unit].stepped;
}
