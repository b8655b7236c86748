/* SPDX-License-Identifier: Apache-2.0
 *
 * One step in a stream's thread. See step_delayed.h.
 *
 * A wait for `done` makes all that the step wrote visible. The two threads share nothing else, besides figures.
 */
#include "step_delayed.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../base/timeline.h"
#include "../base/wait.h"
#include "grad_store.h"
#include "internal.h"

enum { COPY_GRAIN_BYTES = 256 * 1024 };

enum state { IDLE, RUNNING, READY };

struct zpp_delayed {
    zpp_stream *stream;
    zpp_event *done;
    enum state state;
    struct zpp_step_plan plan; /* of the step under way, or to be published */
    /* written by the step, read after `done` */
    zpp_status status;
    struct zpp_err err;
    struct zpp_aio_fault fault;
    atomic_uint_fast64_t steps, step_ns, waited_ns;
};

zpp_status zpp_delayed_create(zpp_device *device, zpp_delayed **out, struct zpp_err *err) {
    zpp_delayed *delayed = calloc(1, sizeof *delayed);
    if (!delayed) return zpp_fail(err, ZPP_NOMEM, "delayed: no memory for its record");
    zpp_status status = zpp_event_create(device, &delayed->done, err);
    if (status == ZPP_OK) status = zpp_stream_create(device, ZPP_STREAM_THREAD, "delayed step", &delayed->stream, err);
    if (status != ZPP_OK) {
        zpp_delayed_destroy(delayed);
        return status;
    }
    *out = delayed;
    return ZPP_OK;
}

void zpp_delayed_destroy(zpp_delayed *delayed) {
    if (!delayed) return;
    if (delayed->stream) zpp_stream_destroy(delayed->stream);
    if (delayed->done) zpp_event_destroy(delayed->done);
    zpp_step_plan_drop(&delayed->plan);
    free(delayed);
}

static void run(zpp_delayed *delayed, zpp_pool *pool) {
    struct zpp_step_plan *plan = &delayed->plan;
    const uint64_t began_ns = zpp_now_ns(), span_ns = zpp_span_begin();
    bool inconsistent; /* for the caller every failure is: the steps are counted, the gradients gone */
    delayed->status = ZPP_OK;
    delayed->err = (struct zpp_err)ZPP_ERR_INIT;
    for (size_t i = 0; i < plan->copies_count; i++)
        if (plan->copies[i].fill) memcpy(plan->copies[i].from, plan->copies[i].to, plan->copies[i].bytes);
    for (size_t i = 0; i < plan->rests_count && delayed->status == ZPP_OK; i++)
        delayed->status = zpp_unit_file_carry(plan->files.params, plan->rests[i].address, plan->rests[i].bytes,
                                              &delayed->fault, &delayed->err);
    if (delayed->status == ZPP_OK)
        delayed->status = zpp_step_plan_run(plan, pool, &inconsistent, &delayed->fault, &delayed->err);
    zpp_span_end(span_ns, ZPP_SPAN_STEP, "delayed step", 0);
    atomic_fetch_add(&delayed->step_ns, zpp_now_ns() - began_ns);
}

/* A failure of the step is no end of the stream: it is kept for zpp_delayed_wait. */
static zpp_status run_beside(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    run(*(zpp_delayed **)arg, NULL);
    return ZPP_OK;
}

/* --- back buffers of gradients ------------------------------------------------------------------------------------ */

/* The reduced gradient moves to the back buffer, where it stays until the next flip. */
static zpp_status flip_grad(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    return grad && grad->has ? zero->store->flip(zero, grad, err) : ZPP_OK;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

zpp_status zpp_delayed_plan(const struct zpp_stepper *stepper, const struct zpp_optim_segment *groups,
                            double grad_scale, struct zpp_step_plan *plan, struct zpp_err *err) {
    const bool local = zpp_zero_grads_are_local(stepper->zero);
    for (int i = 0; i < stepper->units_count && !local; i++) {
        const struct zpp_step_unit *unit = &stepper->units[i];
        if (!unit->unit->trainable || !unit->states.steps) continue;
        const zpp_status status = flip_grad(stepper->zero, unit->unit->grad, err);
        if (status != ZPP_OK) return status;
    }
    return zpp_step_plan_make(stepper, groups, grad_scale, true, plan, err);
}

zpp_status zpp_delayed_begin(zpp_delayed *delayed, const struct zpp_step_plan *plan, bool here, zpp_pool *pool,
                             struct zpp_err *err) {
    if (delayed->state != IDLE) {
        struct zpp_step_plan refused = *plan;
        zpp_step_plan_drop(&refused);
        return zpp_fail(err, ZPP_STATE, "delayed: a step begins before the one under way was waited for and published");
    }
    delayed->plan = *plan;
    zpp_status status = ZPP_OK;
    if (here) {
        run(delayed, pool);
    } else {
        status = zpp_stream_launch(delayed->stream, run_beside, &delayed, sizeof(zpp_delayed *), err);
        /* Without an event to wait for (no memory for it), the step is waited for at once. */
        if (status == ZPP_OK && zpp_event_record(delayed->done, delayed->stream, NULL) != ZPP_OK)
            while (zpp_stream_poll(delayed->stream, NULL) == ZPP_AGAIN) sched_yield();
    }
    if (status != ZPP_OK) {
        zpp_step_plan_drop(&delayed->plan);
        return status;
    }
    delayed->state = RUNNING;
    atomic_fetch_add(&delayed->steps, 1);
    return ZPP_OK;
}

/* No operation of the stream fails, so neither does its event. */
void zpp_delayed_finish(zpp_delayed *delayed) {
    if (delayed->state != RUNNING) return;
    const struct zpp_wait patience = { 0, NULL, NULL };
    const uint64_t began_ns = zpp_now_ns(), span_ns = zpp_span_begin();
    (void)zpp_event_sync(delayed->done, &patience, NULL);
    zpp_span_end(span_ns, ZPP_SPAN_WAIT, "for the delayed step", 0);
    atomic_fetch_add(&delayed->waited_ns, zpp_now_ns() - began_ns);
}

bool zpp_delayed_failed(const zpp_delayed *delayed) {
    return delayed->state == RUNNING && delayed->status != ZPP_OK;
}

zpp_status zpp_delayed_wait(zpp_delayed *delayed, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (delayed->state != RUNNING) return ZPP_OK;
    zpp_delayed_finish(delayed);
    delayed->state = READY;
    if (delayed->status == ZPP_OK) return ZPP_OK;
    zpp_delayed_drop(delayed);
    if (delayed->status == ZPP_TIER) *fault = delayed->fault;
    if (err) *err = delayed->err;
    return delayed->status;
}

static void copy_part(size_t begin, size_t end, void *arg) {
    const struct zpp_delayed_copy *copy = arg;
    memcpy((unsigned char *)copy->to + begin, (const unsigned char *)copy->from + begin, end - begin);
}

void zpp_delayed_publish(zpp_delayed *delayed, zpp_pool *pool) {
    if (delayed->state != READY) return;
    for (size_t i = 0; i < delayed->plan.copies_count; i++) {
        struct zpp_delayed_copy *copy = &delayed->plan.copies[i];
        zpp_pool_run(copy->bytes > COPY_GRAIN_BYTES ? pool : NULL, copy->bytes, COPY_GRAIN_BYTES, copy_part, copy);
    }
    for (size_t i = 0; i < delayed->plan.flips_count; i++)
        zpp_unit_file_flip(delayed->plan.files.params, delayed->plan.flips[i]);
    zpp_delayed_drop(delayed);
}

void zpp_delayed_drop(zpp_delayed *delayed) {
    zpp_delayed_finish(delayed);
    zpp_step_plan_drop(&delayed->plan);
    delayed->state = IDLE;
}

bool zpp_delayed_pending(const zpp_delayed *delayed) {
    return delayed->state != IDLE;
}

void zpp_delayed_figures(const zpp_delayed *delayed, struct zpp_delayed_figures *out) {
    *out = (struct zpp_delayed_figures){ .steps = atomic_load(&delayed->steps),
                                         .step_ns = atomic_load(&delayed->step_ns),
                                         .waited_ns = atomic_load(&delayed->waited_ns) };
}
