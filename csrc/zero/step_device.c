/* SPDX-License-Identifier: Apache-2.0
 *
 * step_device.h. Memory grows with the number of gradients, which seldom changes; nothing is allocated in other steps.
 */
#include "step_device.h"

#include <stdlib.h>
#include <string.h>

#include "../base/mem.h"
#include "internal.h"
#include "on_device.h"

struct zpp_step_device {
    struct zpp_step_device_options options;
    zpp_device *device;
    struct zpp_clip_record *record;  /* on the device */
    struct zpp_clip_record *on_host; /* [ZPP_CLIP_AHEAD], pinned */
    zpp_event *sent[ZPP_CLIP_AHEAD];
    void *memory; /* on the device: sums of this rank, or of all shards; then the work of the kernels */
    size_t memory_bytes;
    const double **all; /* [ranks]: addresses of sums */
    int ranks;
};

/* --- memory ------------------------------------------------------------------------------------------------------- */

_Static_assert(ZPP_CLIP_AHEAD * sizeof(struct zpp_clip_record) <= ZPP_BLOCK_BYTES, "records fit a page");

static zpp_status make_on_host(zpp_step_device *step, struct zpp_err *err) {
    const size_t host_bytes = zpp_page_bytes(); /* what is pinned is whole pages */
    step->on_host = aligned_alloc(host_bytes, host_bytes);
    if (!step->on_host) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the record of a step");
    *step->on_host = zpp_clip_record_of(step->options.loss_scale);
    step->on_host->good_steps = step->options.good_steps;
    const zpp_status status = zpp_device_pin(step->device, step->on_host, host_bytes, err);
    if (status != ZPP_OK) {
        free(step->on_host);
        step->on_host = NULL;
    }
    return status;
}

zpp_status zpp_step_device_create(const struct zpp_step_device_options *options, zpp_step_device **out,
                                  struct zpp_err *err) {
    zpp_step_device *step = calloc(1, sizeof *step);
    if (!step) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the record of a step");
    step->options = *options;
    step->device = zpp_stream_device(options->stream);
    void *record = NULL;
    zpp_status status = make_on_host(step, err);
    for (int at = 0; at < ZPP_CLIP_AHEAD && status == ZPP_OK; at++)
        status = zpp_event_create(step->device, &step->sent[at], err);
    if (status == ZPP_OK) status = zpp_device_alloc(step->device, sizeof *step->record, &record, err);
    step->record = record;
    if (status == ZPP_OK)
        status = zpp_stream_copy(options->stream, step->record, step->on_host, sizeof *step->record, err);
    if (status == ZPP_OK) status = zpp_event_record(step->sent[0], options->stream, err);
    if (status != ZPP_OK) zpp_step_device_destroy(step);
    else *out = step;
    return status;
}

void zpp_step_device_destroy(zpp_step_device *step) {
    if (!step) return;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_wait wait = {60000000000u, NULL, NULL};
    /* What is enqueued still uses this memory. */
    if (step->sent[0] && zpp_event_record(step->sent[0], step->options.stream, &err) == ZPP_OK)
        (void)zpp_event_sync(step->sent[0], &wait, &err);
    if (step->memory) zpp_device_free(step->device, step->memory, step->memory_bytes);
    if (step->record) zpp_device_free(step->device, step->record, sizeof *step->record);
    for (int at = 0; at < ZPP_CLIP_AHEAD; at++) zpp_event_destroy(step->sent[at]);
    if (step->on_host) zpp_device_unpin(step->device, step->on_host);
    free(step->on_host);
    free((void *)(uintptr_t)step->all);
    free(step);
}

struct zpp_clip_record *zpp_step_device_record(const zpp_step_device *step) { return step->record; }

static zpp_status reserve(zpp_step_device *step, size_t bytes, struct zpp_err *err) {
    if (bytes <= step->memory_bytes) return ZPP_OK;
    if (step->memory) zpp_device_free(step->device, step->memory, step->memory_bytes);
    step->memory = NULL;
    step->memory_bytes = 0;
    const zpp_status status = zpp_device_alloc(step->device, bytes, &step->memory, err);
    if (status == ZPP_OK) step->memory_bytes = bytes;
    return status;
}

static zpp_status reserve_ranks(zpp_step_device *step, int ranks, struct zpp_err *err) {
    if (step->ranks == ranks) return ZPP_OK;
    const double **all = calloc((size_t)ranks, sizeof *all);
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the norms of %d ranks", ranks);
    free((void *)(uintptr_t)step->all);
    step->all = all;
    step->ranks = ranks;
    return ZPP_OK;
}

/* --- the norm ----------------------------------------------------------------------------------------------------- */

struct sums_op {
    zpp_device *device;
    const struct zpp_norm_pieces *pieces;
    double *sums, *work;
};

static zpp_status run_sums(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct sums_op *op = arg;
    return zpp_norm_groups_cuda(op->device, native, op->pieces->segments, op->pieces->firsts, op->pieces->groups,
                                op->work, op->sums, err);
}

struct clip_op {
    zpp_device *device;
    const struct zpp_clip *clip;
};

static zpp_status run_clip(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct clip_op *op = arg;
    return zpp_clip_cuda(op->device, native, op->clip, err);
}

static zpp_status enqueue_clip(zpp_step_device *step, const struct zpp_clip *clip, struct zpp_err *err) {
    const struct clip_op op = {step->device, clip};
    return zpp_stream_launch(step->options.stream, run_clip, &op, sizeof op, err);
}

/* Addresses of every rank's sums, which the stream can read: of local gradients all are this rank's own. */
static zpp_status share(zpp_step_device *step, const struct zpp_norm_pieces *pieces, const double *sums,
                        struct zpp_err *err) {
    const size_t units = pieces->groups / (size_t)pieces->ranks;
    for (int rank = 0; rank < pieces->ranks; rank++) step->all[rank] = sums + (size_t)rank * units;
    if (step->options.share)
        return step->options.share(step->options.share_arg, step->options.stream, pieces, sums, step->all, err);
    if (pieces->ranks == step->ranks) return ZPP_OK;
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "zero: the norm of gradients that %d ranks hold in parts on GPUs is not supported yet; keep shards "
                    "on the host with Offload(params='cpu', optimizer='cpu')",
                    step->ranks);
}

static zpp_status measure_pieces(zpp_step_device *step, const struct zpp_norm_pieces *pieces,
                                 const struct zpp_clip_rule *rule, struct zpp_err *err) {
    const size_t work_elems = zpp_norm_groups_work_elems(pieces->segments, pieces->firsts[pieces->groups]);
    zpp_status status = reserve(step, (pieces->groups + work_elems + 1) * sizeof(double), err);
    if (status != ZPP_OK) return status;
    double *const sums = step->memory;
    const struct sums_op op = {step->device, pieces, sums, sums + pieces->groups};
    status = zpp_stream_launch(step->options.stream, run_sums, &op, sizeof op, err);
    if (status == ZPP_OK) status = share(step, pieces, sums, err);
    const struct zpp_clip clip = {step->record,        step->all,
                                  (size_t)step->ranks, pieces->groups / (size_t)pieces->ranks,
                                  step->options.halt,  *rule};
    return status == ZPP_OK ? enqueue_clip(step, &clip, err) : status;
}

zpp_status zpp_step_device_measure(zpp_step_device *step, const struct zpp_stepper *stepper,
                                   const struct zpp_clip_rule *rule, struct zpp_err *err) {
    struct zpp_norm_pieces pieces;
    zpp_status status = reserve_ranks(step, zpp_zero_ranks(stepper->zero), err);
    if (status == ZPP_OK) status = zpp_norm_pieces_make(stepper, &pieces, err);
    if (status != ZPP_OK) return status;
    status = measure_pieces(step, &pieces, rule, err);
    zpp_norm_pieces_drop(&pieces);
    return status;
}

zpp_status zpp_step_device_clip(zpp_step_device *step, const struct zpp_clip_rule *rule, struct zpp_err *err) {
    const struct zpp_clip clip = {step->record, NULL, 0, 0, step->options.halt, *rule};
    return enqueue_clip(step, &clip, err);
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

struct step_f64_op {
    zpp_device *device;
    const struct zpp_step_plan *plan;
    struct zpp_grad_scale_f64 scale;
};

static zpp_status run_f64(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct step_f64_op *op = arg;
    return zpp_adam_step_f64_cuda(op->device, native, op->plan->f64, op->plan->f64_count, op->scale, err);
}

static zpp_status enqueue_f64(zpp_stream *stream, const struct zpp_step_plan *plan, struct zpp_grad_scale_f64 scale,
                              struct zpp_err *err) {
    const struct step_f64_op op = {zpp_stream_device(stream), plan, scale};
    return plan->f64_count ? zpp_stream_launch(stream, run_f64, &op, sizeof op, err) : ZPP_OK;
}

struct step_op {
    zpp_device *device;
    const struct zpp_optim_segment *segments;
    size_t count;
    struct zpp_grad_scale scale;
};

static zpp_status run_step(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct step_op *op = arg;
    return zpp_optim_step_cuda(op->device, native, op->segments, op->count, op->scale, err);
}

static zpp_status check_plan(const struct zpp_step_plan *plan, struct zpp_err *err) {
    const char *what = NULL;
    if (plan->file_pieces_count || plan->files.params || plan->files.grads) what = "states or parameters in files";
    if (plan->delayed) what = "Offload(delayed_update=)";
    if (!what) return ZPP_OK;
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "zero: a step of %s on a GPU is not supported yet; keep shards on the host with "
                    "Offload(params='cpu', optimizer='cpu')",
                    what);
}

/* How many segments from `begin` on one call takes: of one optimizer, with states of one kind, all with an fp32 copy or
 * all without. */
static size_t run_of(const struct zpp_step_plan *plan, size_t begin) {
    const struct zpp_optim_segment *first = &plan->segments[begin];
    size_t end = begin;
    while (end < plan->segments_count && plan->segments[end].optimizer == first->optimizer &&
           plan->segments[end].how.kind == first->how.kind && !plan->segments[end].param == !first->param)
        end++;
    return end - begin;
}

static zpp_status enqueue_segments(zpp_stream *stream, const struct zpp_step_plan *plan, struct zpp_grad_scale scale,
                                   struct zpp_err *err) {
    zpp_status status = check_plan(plan, err);
    for (size_t done = 0, count; done < plan->segments_count && status == ZPP_OK; done += count) {
        count = run_of(plan, done);
        const struct step_op op = {zpp_stream_device(stream), plan->segments + done, count, scale};
        status = zpp_stream_launch(stream, run_step, &op, sizeof op, err);
    }
    return status;
}

zpp_status zpp_step_device_enqueue(zpp_stream *stream, const struct zpp_step_plan *plan, const uint32_t *skip,
                                   struct zpp_err *err) {
    const struct zpp_grad_scale scale = {(float)plan->grad_scale, NULL, skip};
    const struct zpp_grad_scale_f64 wide = {plan->grad_scale, NULL, skip};
    const zpp_status status = enqueue_segments(stream, plan, scale, err);
    return status == ZPP_OK ? enqueue_f64(stream, plan, wide, err) : status;
}

zpp_status zpp_step_device_launch(zpp_step_device *step, const struct zpp_step_plan *plan, size_t behind,
                                  struct zpp_err *err) {
    zpp_stream *stream = step->options.stream;
    const zpp_status status = enqueue_segments(stream, plan, zpp_clip_scale(step->record, behind), err);
    return status == ZPP_OK ? enqueue_f64(stream, plan, zpp_clip_scale_f64(step->record, behind), err) : status;
}

zpp_status zpp_step_device_run(const struct zpp_stepper *stepper, const struct zpp_step_plan *plan,
                               struct zpp_err *err) {
    /* The lower half of the halt word: nothing is stepped behind a wait that an error released. */
    const uint32_t *skip = (const uint32_t *)(const void *)stepper->zero->on_device->halt;
    return zpp_step_device_enqueue(zpp_zero_compute(stepper->zero), plan, skip, err);
}

/* --- the host's copy ---------------------------------------------------------------------------------------------- */

zpp_status zpp_step_device_send(zpp_step_device *step, size_t at, struct zpp_err *err) {
    const zpp_status status =
        zpp_stream_copy(step->options.stream, &step->on_host[at], step->record, sizeof *step->record, err);
    return status == ZPP_OK ? zpp_event_record(step->sent[at], step->options.stream, err) : status;
}

zpp_status zpp_step_device_look(zpp_step_device *step, size_t at, const struct zpp_wait *wait,
                                struct zpp_clip_record *out, struct zpp_err *err) {
    const zpp_status status = zpp_event_sync(step->sent[at], wait, err);
    if (status == ZPP_OK) *out = step->on_host[at];
    return status;
}
