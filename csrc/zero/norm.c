/* SPDX-License-Identifier: Apache-2.0
 *
 * The norm of the gradients that a step would use: step_plan.h.
 */
#include "step_plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/norm/clip.h"
#include "../ops/norm/norm.h"
#include "internal.h"

_Static_assert(sizeof(struct zpp_shard_norm) == ZPP_NORM_BYTES, "records of norms fit on the board");

/* The pieces of one shard that have a gradient, and their sums. */
struct pieces {
    struct zpp_norm_segment *segments;
    double *sums;
    uint64_t *bad; /* elements that are not finite */
    size_t *params;
    size_t *firsts; /* of each piece's parameter, the element that it begins with */
    size_t count;
};

static void drop_pieces(struct pieces *pieces) {
    free(pieces->segments);
    free(pieces->sums);
    free(pieces->bad);
    free(pieces->params);
    free(pieces->firsts);
}

/* The pieces of shard `rank` of the unit. False: no memory. */
static bool make_pieces(const struct zpp_step_shard *shard, int rank, struct pieces *out) {
    const size_t capacity = shard->shape.params + 1;
    struct zpp_piece *pieces = calloc(capacity, sizeof *pieces);
    *out = (struct pieces){.segments = calloc(capacity, sizeof *out->segments),
                           .sums = calloc(capacity, sizeof *out->sums),
                           .bad = calloc(capacity, sizeof *out->bad),
                           .params = calloc(capacity, sizeof *out->params),
                           .firsts = calloc(capacity, sizeof *out->firsts)};
    const bool memory = pieces && out->segments && out->sums && out->bad && out->params && out->firsts;
    const size_t found = memory ? zpp_unit_pieces(shard->owner->unit, rank, pieces) : 0;
    for (size_t i = 0; i < found; i++) {
        const void *grad = zpp_step_shard_grad(shard, &pieces[i]);
        if (!grad) continue;
        out->params[out->count] = pieces[i].param;
        out->firsts[out->count] = pieces[i].offset_elems - shard->owner->unit->offset_elems[pieces[i].param];
        out->segments[out->count++] = (struct zpp_norm_segment){grad, shard->shape.grad_dtype, pieces[i].elems};
    }
    free(pieces);
    return memory;
}

static zpp_status norm_of_shard(const struct zpp_stepper *stepper, const struct zpp_step_shard *shard, int rank,
                                struct zpp_shard_norm *out, struct zpp_err *err) {
    const struct zpp_unit *unit = shard->owner->unit;
    struct pieces pieces;
    const bool memory = make_pieces(shard, rank, &pieces);
    if (memory) zpp_norm_squares(pieces.segments, pieces.count, pieces.sums, pieces.bad, stepper->pool);
    for (size_t i = 0; i < pieces.count; i++) {
        const struct zpp_norm_segment *segment = &pieces.segments[i];
        out->squares += pieces.sums[i];
        if (!pieces.bad[i] || out->bad_param >= 0) continue;
        const size_t first = zpp_origin_first_nonfinite(segment->data, segment->dtype, segment->elems);
        out->bad_param = (int64_t)pieces.params[i];
        out->bad_elem = (int64_t)(pieces.firsts[i] + first);
    }
    drop_pieces(&pieces);
    if (out->bad_param >= 0) out->origins = zpp_zero_origins(stepper->zero, unit->index);
    return memory ? ZPP_OK : zpp_fail(err, ZPP_NOMEM, "zero: no memory for the norm of unit %s", unit->name);
}

zpp_status zpp_norm_of_unit(const struct zpp_stepper *stepper, int unit, struct zpp_shard_norm *out,
                            struct zpp_err *err) {
    struct zpp_step_shard shard;
    *out = (struct zpp_shard_norm){0.0, -1, -1, 0};
    if (!zpp_step_shard_of(stepper, unit, false, &shard)) return ZPP_OK;
    return norm_of_shard(stepper, &shard, shard.rank, out, err);
}

/* The shard that stands for a data rank. With several groups every rank measures its own shards alone. */
static int shard_of(const struct zpp_stepper *stepper, int unit, int rank) {
    return stepper->zero->groups_count > 1 ? stepper->units[unit].unit->group->rank : rank;
}

/* Read a gradient in a file, measure one shard of it and close the gradient again. */
static zpp_status measure(const struct zpp_stepper *stepper, int unit, int rank, struct zpp_shard_norm *out,
                          struct zpp_err *err) {
    struct zpp_step_shard shard;
    *out = (struct zpp_shard_norm){0.0, -1, -1, 0};
    if (!stepper->units[unit].unit->trainable || !zpp_step_shard_of(stepper, unit, false, &shard)) return ZPP_OK;
    zpp_status status = zpp_zero_grad_open(stepper->zero, unit, err);
    if (status == ZPP_OK) status = norm_of_shard(stepper, &shard, shard_of(stepper, unit, rank), out, err);
    return status == ZPP_OK ? zpp_zero_grad_close(stepper->zero, unit, err) : status;
}

static zpp_status measure_units(const struct zpp_stepper *stepper, int rank, struct zpp_shard_norm *row,
                                struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (int u = stepper->units_count - 1; u >= 0 && status == ZPP_OK; u--)
        status = measure(stepper, u, rank, &row[u], err);
    return status;
}

/* --- gradients in memory of a device ------------------------------------------------------------------------------ */

/* The pieces of some ranks' shards of all units, and whose each is. */
struct device_pieces {
    struct zpp_norm_segment *segments;
    size_t *firsts; /* 0, 1, 2, ..: each piece has a sum of its own */
    size_t *rows;   /* of the norms: the units of the first rank, those of the next one, .. */
    size_t *params;
    size_t count;
    zpp_device *device;
    double *memory; /* on the device: the sums, then the work of the kernels */
    double *sums;   /* the same on the host, pinned */
};

static void drop_device_pieces(struct device_pieces *all) {
    free(all->segments);
    free(all->firsts);
    free(all->rows);
    free(all->params);
}

static bool append_unit(const struct zpp_stepper *stepper, int unit, int rank, size_t row, struct device_pieces *all) {
    struct zpp_step_shard shard;
    struct pieces pieces;
    if (!stepper->units[unit].unit->trainable || !zpp_step_shard_of(stepper, unit, false, &shard)) return true;
    const bool memory = make_pieces(&shard, rank, &pieces);
    for (size_t i = 0; memory && i < pieces.count; i++, all->count++) {
        all->segments[all->count] = pieces.segments[i];
        all->firsts[all->count + 1] = all->count + 1;
        all->rows[all->count] = row;
        all->params[all->count] = pieces.params[i];
    }
    drop_pieces(&pieces);
    return memory;
}

static bool make_device_pieces(const struct zpp_stepper *stepper, int first_rank, int ranks,
                               struct device_pieces *all) {
    const int units = stepper->units_count;
    size_t most = 0;
    for (int u = 0; u < units; u++) most += stepper->units[u].unit->params;
    most = most * (size_t)ranks + 1;
    *all = (struct device_pieces){.segments = calloc(most, sizeof *all->segments),
                                  .firsts = calloc(most + 1, sizeof *all->firsts),
                                  .rows = calloc(most, sizeof *all->rows),
                                  .params = calloc(most, sizeof *all->params)};
    bool memory = all->segments && all->firsts && all->rows && all->params;
    for (int row = 0; row < units * ranks && memory; row++) {
        const int shard = shard_of(stepper, row % units, first_rank + row / units);
        memory = append_unit(stepper, row % units, shard, (size_t)row, all);
    }
    return memory;
}

static zpp_status run_sums(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct device_pieces *all = *(struct device_pieces **)arg;
    return zpp_norm_groups_cuda(all->device, native, all->segments, all->firsts, all->count, all->memory + all->count,
                                all->memory, err);
}

/* The host waits once, for the sums, which are a few bytes. */
static zpp_status sum_on_device(const struct zpp_stepper *stepper, struct device_pieces *all,
                                const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_stream *compute = zpp_zero_compute(stepper->zero);
    struct zpp_norm_memory *norm = stepper->norm;
    const size_t work_elems = zpp_norm_groups_work_elems(all->segments, all->count);
    const size_t sums_bytes = all->count * sizeof(double);
    all->device = zpp_stream_device(compute);
    const size_t bytes = sums_bytes + (work_elems + 1) * sizeof(double);
    zpp_status status = zpp_norm_memory_reserve(norm, all->device, bytes, sums_bytes, err);
    all->memory = norm->memory;
    all->sums = norm->host;
    if (status == ZPP_OK) status = zpp_stream_launch(compute, run_sums, &all, sizeof(struct device_pieces *), err);
    if (status == ZPP_OK) status = zpp_stream_copy(compute, all->sums, norm->memory, sums_bytes, err);
    if (status == ZPP_OK) status = zpp_event_record(norm->done, compute, err);
    return status == ZPP_OK ? zpp_event_sync(norm->done, wait, err) : status;
}

/* Fill in rows[ranks * units]. */
static zpp_status measure_on_device(const struct zpp_stepper *stepper, int first_rank, int ranks,
                                    struct zpp_shard_norm *rows, const struct zpp_wait *wait, struct zpp_err *err) {
    struct device_pieces all;
    zpp_status status =
        make_device_pieces(stepper, first_rank, ranks, &all)
            ? ZPP_OK
            : zpp_fail(err, ZPP_NOMEM, "zero: no memory for the norms of %d units", stepper->units_count);
    for (int row = 0; row < ranks * stepper->units_count; row++) rows[row] = (struct zpp_shard_norm){0.0, -1, -1, 0};
    if (status == ZPP_OK && all.count) status = sum_on_device(stepper, &all, wait, err);
    for (size_t i = 0; i < all.count && status == ZPP_OK; i++) {
        struct zpp_shard_norm *norm = &rows[all.rows[i]];
        norm->squares += all.sums[i];
        if (norm->bad_param < 0 && !isfinite(all.sums[i])) norm->bad_param = (int64_t)all.params[i];
    }
    drop_device_pieces(&all);
    return status;
}

/* Fill in rows[ranks * units]: the shards of `ranks` ranks from the first one on. */
static zpp_status measure_ranks(const struct zpp_stepper *stepper, int first_rank, int ranks,
                                struct zpp_shard_norm *rows, const struct zpp_wait *wait, struct zpp_err *err) {
    if (zpp_zero_shards_on_device(stepper->zero))
        return measure_on_device(stepper, first_rank, ranks, rows, wait, err);
    zpp_status status = ZPP_OK;
    for (int i = 0; i < ranks && status == ZPP_OK; i++)
        status = measure_units(stepper, first_rank + i, &rows[(size_t)i * (size_t)stepper->units_count], err);
    return status;
}

zpp_status zpp_norm_of_all(const struct zpp_stepper *stepper, struct zpp_shard_norm *norms, const struct zpp_wait *wait,
                           struct zpp_err *err) {
    const size_t units = (size_t)stepper->units_count;
    /* Local gradients of one group are the same on every rank, so each rank measures all shards. */
    if (zpp_zero_grads_are_local(stepper->zero) && stepper->zero->groups_count == 1)
        return measure_ranks(stepper, 0, zpp_zero_ranks(stepper->zero), norms, wait, err);
    if (!units) return ZPP_OK;
    struct zpp_shard_norm *own = calloc(units, sizeof *own);
    if (!own) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the norms of %zu units", units);
    zpp_status status = measure_ranks(stepper, zpp_zero_rank(stepper->zero), 1, own, wait, err);
    if (status == ZPP_OK) status = zpp_zero_gather_norms(stepper->zero, own, units * sizeof *own, norms, wait, err);
    free(own);
    return status;
}

/* Append the pieces of one shard; a group without any where the unit has no gradient. */
static bool append(const struct zpp_stepper *stepper, int unit, int rank, size_t group, struct zpp_norm_pieces *out) {
    struct zpp_step_shard shard;
    struct pieces pieces = {0};
    const size_t first = out->firsts[group];
    const struct zpp_unit *owner = stepper->units[unit].unit;
    const bool counts = owner->trainable && !owner->is_copy;
    const bool has = counts && zpp_step_shard_of(stepper, unit, false, &shard);
    bool memory = !has || make_pieces(&shard, rank, &pieces);
    const size_t total = first + pieces.count + 1;
    struct zpp_norm_segment *all = memory ? realloc(out->segments, total * sizeof *all) : NULL;
    if (all) out->segments = all;
    size_t *params = all ? realloc(out->params, total * sizeof *params) : NULL;
    if (params) out->params = params;
    memory = params != NULL;
    if (memory) {
        if (pieces.count) memcpy(all + first, pieces.segments, pieces.count * sizeof *all);
        if (pieces.count) memcpy(params + first, pieces.params, pieces.count * sizeof *params);
        out->firsts[group + 1] = first + pieces.count;
    }
    drop_pieces(&pieces);
    return memory;
}

zpp_status zpp_norm_pieces_make(const struct zpp_stepper *stepper, struct zpp_norm_pieces *out, struct zpp_err *err) {
    const bool local = zpp_zero_grads_are_local(stepper->zero);
    const int ranks = local ? zpp_zero_ranks(stepper->zero) : 1, own = zpp_zero_rank(stepper->zero);
    const size_t units = (size_t)stepper->units_count, groups = units * (size_t)ranks;
    *out =
        (struct zpp_norm_pieces){.firsts = calloc(groups + 1, sizeof *out->firsts), .groups = groups, .ranks = ranks};
    bool memory = out->firsts != NULL;
    for (size_t g = 0; g < groups && memory; g++)
        memory = append(stepper, (int)(g % units), local ? (int)(g / units) : own, g, out);
    if (memory) return ZPP_OK;
    zpp_norm_pieces_drop(out);
    return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the norms of %zu shards", groups);
}

zpp_status zpp_norm_pieces_of_unit(const struct zpp_stepper *stepper, int unit, struct zpp_norm_pieces *out,
                                   struct zpp_err *err) {
    struct zpp_step_shard shard;
    struct pieces pieces = {0};
    *out = (struct zpp_norm_pieces){.firsts = calloc(2, sizeof *out->firsts), .groups = 1, .ranks = 1};
    const bool has = zpp_step_shard_of(stepper, unit, false, &shard);
    const bool memory = out->firsts && (!has || make_pieces(&shard, shard.rank, &pieces));
    if (memory) {
        out->segments = pieces.segments;
        out->params = pieces.params;
        out->firsts[1] = pieces.count;
        pieces.segments = NULL;
        pieces.params = NULL;
    }
    drop_pieces(&pieces);
    if (memory) return ZPP_OK;
    zpp_norm_pieces_drop(out);
    return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the norm of unit %s", stepper->units[unit].unit->name);
}

void zpp_norm_pieces_drop(struct zpp_norm_pieces *pieces) {
    free(pieces->segments);
    free(pieces->params);
    free(pieces->firsts);
    *pieces = (struct zpp_norm_pieces){0};
}

double zpp_norm_squares_of(const struct zpp_stepper *stepper, const struct zpp_shard_norm *norms) {
    const int units = stepper->units_count, ranks = zpp_zero_ranks(stepper->zero);
    double squares = 0.0;
    for (int unit = 0; unit < units; unit++)
        for (int rank = 0; rank < ranks && !stepper->units[unit].unit->is_copy; rank++)
            squares += norms[rank * units + unit].squares;
    return squares;
}

zpp_status zpp_norm_of_job(const struct zpp_stepper *stepper, const struct zpp_shard_norm *norms,
                           struct zpp_job_norm *out, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_zero *zero = stepper->zero;
    const int units = stepper->units_count, ranks = zpp_zero_ranks(zero), job_ranks = zpp_zero_job_ranks(zero);
    struct zpp_job_norm own = {.squares = zpp_norm_squares_of(stepper, norms)};
    for (int at = 0; at < units * ranks; at++) own.bad += norms[at].bad_param >= 0;
    *out = own;
    if (!zpp_zero_has_job(zero)) return ZPP_OK;
    if (zpp_zero_rank(zero)) own = (struct zpp_job_norm){0}; /* the first data rank speaks for all of them */
    struct zpp_job_norm *all = calloc((size_t)job_ranks, sizeof *all);
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the norms of %d ranks", job_ranks);
    const zpp_status status = zpp_zero_agree(zero, &own, sizeof own, all, wait, err);
    *out = (struct zpp_job_norm){0};
    for (int rank = 0; rank < job_ranks && status == ZPP_OK; rank++) {
        out->squares += all[rank].squares;
        out->bad += all[rank].bad;
    }
    free(all);
    return status;
}
