/* SPDX-License-Identifier: Apache-2.0
 *
 * See step_in_backward_device.h. Memory of the device has a record, whose word `skip` stays once it is set. Behind it
 * lie the sums of squares of each unit's pieces, by which the host finds the parameter. Every end copies all of it to a
 * place in pinned memory.
 */
#include "step_in_backward_device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/mem.h"
#include "../ops/norm/clip.h"
#include "internal.h"
#include "on_device.h"
#include "step_device.h"

/* A piece of a gradient whose sum an end has. */
struct name {
    int unit;
    size_t param, sum;
};

/* One end. */
struct place {
    struct name *names; /* in the order of the steps */
    size_t count;
    zpp_event *sent;
};

struct zpp_device_steps {
    const struct zpp_stepper *stepper;
    zpp_device *device;
    zpp_stream *stream; /* of the sums; one rank has none, and steps on that of the computation */
    zpp_event *stepped;
    unsigned char *memory; /* of the device: the record, then the sums, then work */
    size_t *first_sums;    /* [units + 1]: where those of each unit begin */
    size_t bytes;
    unsigned char *on_host; /* [ZPP_CLIP_AHEAD * sent_bytes], pinned */
    size_t sent_bytes;      /* the record and the sums */
    struct place places[ZPP_CLIP_AHEAD];
    uint64_t sent, seen; /* ends */
};

enum { RECORD_BYTES = 256 };
_Static_assert(sizeof(struct zpp_clip_record) <= RECORD_BYTES, "the record lies before the sums");

static struct zpp_clip_record *record_of(unsigned char *memory) { return (struct zpp_clip_record *)(void *)memory; }

static double *sums_of(unsigned char *memory) { return (double *)(void *)(memory + RECORD_BYTES); }

static struct place *next_place(zpp_device_steps *self) { return &self->places[self->sent % ZPP_CLIP_AHEAD]; }

/* --- life --------------------------------------------------------------------------------------------------------- */

bool zpp_device_steps_wanted(const zpp_zero *zero) { return zpp_zero_shards_on_device(zero); }

/* What the sums of a unit work in, if all of its parameters have a gradient. */
static bool measure_work(const struct zpp_unit *unit, size_t *elems) {
    struct zpp_piece *pieces = calloc(unit->params + 1, sizeof *pieces);
    struct zpp_norm_segment *segments = calloc(unit->params + 1, sizeof *segments);
    const bool memory = pieces && segments;
    const size_t count = memory && unit->trainable ? zpp_unit_pieces(unit, unit->group->rank, pieces) : 0;
    for (size_t i = 0; i < count; i++)
        segments[i] = (struct zpp_norm_segment){NULL, unit->grad_dtype, pieces[i].elems};
    *elems = zpp_norm_cuda_work_elems(segments, count) + count;
    free(pieces);
    free(segments);
    return memory;
}

/* The record, the sums of all pieces, and what the sums of one unit work in: it is used by one after the other. */
static bool lay_out(zpp_device_steps *self) {
    const size_t units = (size_t)self->stepper->units_count;
    size_t most = 0;
    self->first_sums = calloc(units + 1, sizeof *self->first_sums);
    bool memory = self->first_sums;
    for (size_t u = 0; u < units && memory; u++) {
        const struct zpp_unit *unit = self->stepper->units[u].unit;
        size_t elems = 0;
        memory = measure_work(unit, &elems);
        if (elems > most) most = elems;
        self->first_sums[u + 1] = self->first_sums[u] + unit->params;
    }
    const size_t sums = memory ? self->first_sums[units] : 0;
    for (int at = 0; at < ZPP_CLIP_AHEAD && memory; at++) {
        self->places[at].names = calloc(sums + 1, sizeof *self->places[at].names);
        memory = self->places[at].names;
    }
    self->sent_bytes = RECORD_BYTES + sums * sizeof(double);
    self->bytes = self->sent_bytes + most * sizeof(double);
    return memory;
}

static zpp_status make_memory(zpp_device_steps *self, struct zpp_err *err) {
    const size_t page = zpp_page_bytes(), host_bytes = (ZPP_CLIP_AHEAD * self->sent_bytes + page - 1) / page * page;
    void *memory = NULL;
    zpp_status status = zpp_device_alloc(self->device, self->bytes, &memory, err);
    self->memory = memory;
    if (status != ZPP_OK) return status;
    self->on_host = aligned_alloc(page, host_bytes);
    if (!self->on_host) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the ends of steps inside the backward");
    memset(self->on_host, 0, host_bytes);
    status = zpp_device_pin(self->device, self->on_host, host_bytes, err);
    if (status == ZPP_OK) return ZPP_OK;
    free(self->on_host);
    self->on_host = NULL;
    return status;
}

static zpp_status make(zpp_device_steps *self, struct zpp_err *err) {
    const zpp_zero *zero = self->stepper->zero;
    self->stream = zero->on_device->sums ? zero->on_device->sums : zero->compute;
    self->device = zpp_stream_device(self->stream);
    if (!lay_out(self))
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for steps of %d units inside the backward",
                        self->stepper->units_count);
    zpp_status status = make_memory(self, err);
    for (int at = 0; at < ZPP_CLIP_AHEAD && status == ZPP_OK; at++)
        status = zpp_event_create(self->device, &self->places[at].sent, err);
    if (status == ZPP_OK) status = zpp_event_create(self->device, &self->stepped, err);
    return status == ZPP_OK ? zpp_device_steps_forget(self, err) : status;
}

zpp_status zpp_device_steps_create(const struct zpp_stepper *stepper, zpp_device_steps **out, struct zpp_err *err) {
    zpp_device_steps *self = calloc(1, sizeof *self);
    if (!self) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for steps inside the backward");
    self->stepper = stepper;
    const zpp_status status = make(self, err);
    if (status != ZPP_OK) zpp_device_steps_destroy(self);
    else *out = self;
    return status;
}

/* What is enqueued still uses this memory. */
static void end_work(zpp_device_steps *self) {
    const struct zpp_wait patience = {60000000000u, NULL, NULL};
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (self->stepped && zpp_event_record(self->stepped, self->stream, &ignored) == ZPP_OK)
        (void)zpp_event_sync(self->stepped, &patience, &ignored);
}

void zpp_device_steps_destroy(zpp_device_steps *self) {
    if (!self) return;
    end_work(self);
    if (self->memory) zpp_device_free(self->device, self->memory, self->bytes);
    if (self->on_host) zpp_device_unpin(self->device, self->on_host);
    for (int at = 0; at < ZPP_CLIP_AHEAD; at++) {
        zpp_event_destroy(self->places[at].sent);
        free(self->places[at].names);
    }
    zpp_event_destroy(self->stepped);
    free(self->on_host);
    free(self->first_sums);
    free(self);
}

/* --- one unit ----------------------------------------------------------------------------------------------------- */

struct check_op {
    zpp_device *device;
    const struct zpp_norm_pieces *pieces;
    double *sums, *work;
    struct zpp_clip_record *record;
    const uint64_t *halt;
};
_Static_assert(sizeof(struct check_op) <= ZPP_OP_ARG_BYTES, "the argument of one operation");

/* The stream has no queue, so this runs inside the launch. */
static zpp_status run_check(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct check_op *op = arg;
    const size_t count = op->pieces->firsts[1];
    const double *const all[] = {op->sums};
    const struct zpp_clip clip = {op->record, all, 1, count, op->halt, {.parts = ZPP_CLIP_FINITE}};
    const zpp_status status =
        zpp_norm_squares_cuda(op->device, native, op->pieces->segments, count, op->work + count, op->sums,
                              (uint64_t *)(void *)op->work, err);
    return status == ZPP_OK ? zpp_clip_cuda(op->device, native, &clip, err) : status;
}

static zpp_status check_unit(zpp_device_steps *self, int unit, struct zpp_err *err) {
    struct zpp_norm_pieces pieces;
    zpp_status status = zpp_norm_pieces_of_unit(self->stepper, unit, &pieces, err);
    if (status != ZPP_OK) return status;
    struct place *place = next_place(self);
    const size_t count = pieces.firsts[1], first = self->first_sums[unit];
    const struct check_op op = {self->device,
                                &pieces,
                                sums_of(self->memory) + first,
                                (double *)(void *)(self->memory + self->sent_bytes),
                                record_of(self->memory),
                                self->stepper->zero->on_device->halt};
    for (size_t k = 0; k < count; k++)
        place->names[place->count++] = (struct name){unit, pieces.params[k], first + k};
    if (count) status = zpp_stream_launch(self->stream, run_check, &op, sizeof op, err);
    zpp_norm_pieces_drop(&pieces);
    return status;
}

/* The computation runs after what this rank summed and stepped, and so do its signals. */
static zpp_status join_compute(zpp_device_steps *self, struct zpp_err *err) {
    zpp_stream *compute = self->stepper->zero->compute;
    if (self->stream == compute) return ZPP_OK;
    const zpp_status status = zpp_event_record(self->stepped, self->stream, err);
    return status == ZPP_OK ? zpp_stream_wait(compute, self->stepped, NULL, err) : status;
}

zpp_status zpp_device_steps_begin(zpp_device_steps *self, int unit, struct zpp_err *err) {
    const zpp_status status = check_unit(self, unit, err);
    return status == ZPP_OK ? join_compute(self, err) : status;
}

zpp_status zpp_device_steps_stepped(zpp_device_steps *self, struct zpp_err *err) {
    zpp_stream *compute = self->stepper->zero->compute;
    if (self->stream == compute) return ZPP_OK;
    const zpp_status status = zpp_event_record(self->stepped, compute, err);
    return status == ZPP_OK ? zpp_stream_wait(self->stream, self->stepped, NULL, err) : status;
}

zpp_status zpp_device_steps_unit(zpp_device_steps *self, int unit, const struct zpp_optim_segment *groups,
                                 double grad_scale, struct zpp_err *err) {
    struct zpp_step_plan plan = {.grad_scale = grad_scale};
    zpp_status status = check_unit(self, unit, err);
    if (status == ZPP_OK) status = zpp_step_plan_add(self->stepper, unit, groups, &plan, err);
    if (status == ZPP_OK) status = zpp_step_device_enqueue(self->stream, &plan, &record_of(self->memory)->skip, err);
    zpp_step_plan_drop(&plan);
    return status;
}

/* --- ends --------------------------------------------------------------------------------------------------------- */

zpp_status zpp_device_steps_end(zpp_device_steps *self, struct zpp_err *err) {
    const size_t at = self->sent % ZPP_CLIP_AHEAD;
    zpp_status status = join_compute(self, err);
    if (status == ZPP_OK)
        status = zpp_stream_copy(self->stream, self->on_host + at * self->sent_bytes, self->memory, self->sent_bytes,
                                 err);
    if (status == ZPP_OK) status = zpp_event_record(self->places[at].sent, self->stream, err);
    self->sent += status == ZPP_OK;
    return status;
}

/* The first piece of an end whose sum is not finite. */
static struct zpp_bad_gradient first_bad(zpp_device_steps *self, size_t at) {
    const struct place *place = &self->places[at];
    const double *sums = sums_of(self->on_host + at * self->sent_bytes);
    for (size_t k = 0; k < place->count; k++)
        if (!isfinite(sums[place->names[k].sum]))
            return (struct zpp_bad_gradient){place->names[k].unit, place->names[k].param};
    return (struct zpp_bad_gradient){.unit = -1};
}

static zpp_status said(const struct zpp_bad_gradient *bad, struct zpp_err *err) {
    if (bad->unit >= 0) return zpp_fail(err, ZPP_STATE, "a gradient is not finite");
    return zpp_fail(err, ZPP_STATE,
                    "zero: a step inside the backward was not taken, because the group of the ranks has failed");
}

zpp_status zpp_device_steps_look(zpp_device_steps *self, bool all, const struct zpp_wait *wait,
                                 struct zpp_bad_gradient *out, struct zpp_err *err) {
    const uint64_t until = all ? self->sent : self->seen + (self->sent - self->seen == ZPP_CLIP_AHEAD);
    *out = (struct zpp_bad_gradient){.unit = -1};
    while (self->seen < self->sent) {
        const size_t at = self->seen % ZPP_CLIP_AHEAD;
        const zpp_status status = zpp_event_sync(self->places[at].sent, self->seen < until ? wait : NULL, err);
        if (status != ZPP_OK) return status == ZPP_AGAIN ? ZPP_OK : status;
        self->seen++;
        const bool skipped = record_of(self->on_host + at * self->sent_bytes)->skip;
        if (skipped) *out = first_bad(self, at);
        self->places[at].count = 0;
        if (skipped) return said(out, err);
    }
    return ZPP_OK;
}

zpp_status zpp_device_steps_forget(zpp_device_steps *self, struct zpp_err *err) {
    self->seen = self->sent;
    for (int at = 0; at < ZPP_CLIP_AHEAD; at++) self->places[at].count = 0;
    return zpp_stream_fill(self->stream, self->memory, 0, self->bytes, err);
}
