/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator's life: units are added, memory is made for all of them at once, and ended.
 */
#include "zero.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internode.h"
#include "internal.h"
#include "rank_file.h"
#include "secondary.h"

static size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/* Units of some size begin at a page, for O_DIRECT and huge pages; small ones at a cache line. */
static size_t place_next(size_t *used_bytes, size_t bytes) {
    const size_t at = round_up(*used_bytes, bytes >= 64 * 1024 ? ZPP_PAGE_BYTES : 64);
    *used_bytes = at + bytes;
    return at;
}

static zpp_status create_streams(zpp_zero *zero, struct zpp_err *err) {
    zpp_device *device = zero->options.device;
    zpp_status status = zpp_stream_create(device, ZPP_STREAM_HOST, "compute", &zero->compute, err);
    /* Without prefetch nothing overlaps: gathers are a part of the computation. */
    zero->gather = zero->compute;
    const bool internode = zpp_internode(zero->options.comm); /* the communicator's thread gathers */
    /* the engine's thread reads; ours begins and looks */
    if (status == ZPP_OK && zero->unit_file && !zpp_rank_file(zero)) {
        status = zpp_stream_create(device, ZPP_STREAM_QUEUE, "arrive", &zero->arrive, err);
        if (status == ZPP_OK) status = zpp_stream_create(device, ZPP_STREAM_QUEUE, "gather", &zero->gather, err);
    } else if (status == ZPP_OK && zero->options.prefetch_bytes && !internode) {
        status = zpp_stream_create(device, ZPP_STREAM_THREAD, "gather", &zero->gather, err);
    }
    if (status == ZPP_OK) status = zpp_stream_create(device, ZPP_STREAM_QUEUE, "reduce", &zero->reduce, err);
    if (status == ZPP_OK) status = zpp_event_create(device, &zero->acked, err);
    return status;
}

zpp_status zpp_zero_create(const struct zpp_zero_options *options, zpp_zero **out, struct zpp_err *err) {
    if (options->stage < 0 || options->stage > 3)
        return zpp_fail(err, ZPP_INVALID, "zero: stage is %d, not 0, 1, 2 or 3", options->stage);
    zpp_zero *zero = calloc(1, sizeof *zero);
    if (!zero) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the coordinator");
    zero->options = *options;
    zero->rank = options->comm ? zpp_comm_rank(options->comm) : 0;
    zero->ranks = options->comm ? zpp_comm_ranks(options->comm) : 1;
    zero->grad_scale = 1.0;
    pthread_mutex_init(&zero->grad_pool_lock, NULL); /* with default attributes it cannot fail */
    pthread_mutex_init(&zero->grad_file.lock, NULL);
    zpp_status status = ZPP_OK;
    zpp_comm *sharers = zpp_internode(options->comm) ? options->copy : options->comm;
    if (options->params_fraction > 0.0)
        status = zpp_unit_file_create(sharers, options->params_fraction, &zero->unit_file, err);
    if (status == ZPP_OK) status = create_streams(zero, err);
    if (status != ZPP_OK) {
        zpp_zero_destroy(zero);
        return status;
    }
    *out = zero;
    return ZPP_OK;
}

zpp_status zpp_zero_set_grads_fraction(zpp_zero *zero, double fraction, struct zpp_err *err) {
    if (zero->units_count || zero->options.stage < 2)
        return zpp_fail(err, ZPP_INVALID,
                        "zero: gradients in a file at stage %d with %d units, wanted stage 2 or 3 and no units yet",
                        zero->options.stage, zero->units_count);
    return zpp_unit_file_create(NULL, fraction, &zero->grad_file.unit_file, err);
}

static void drop_gather(zpp_zero *zero, struct zpp_unit *unit) {
    zpp_internode_drop(unit->arriving_near ? zero->near : zero->options.comm, &unit->arriving);
}

void zpp_zero_close_params(zpp_zero *zero) {
    if (!zero->unit_file) return;
    for (int i = 0; i < zero->units_count; i++) drop_gather(zero, zero->units[i]); /* they wait for reads */
    zpp_unit_file_close(zero->unit_file);
}

static void destroy_unit(zpp_zero *zero, struct zpp_unit *unit) {
    zpp_reduce_drop_unit(zero, unit);
    drop_gather(zero, unit);
    zpp_event_destroy(unit->allocated);
    zpp_event_destroy(unit->ready);
    free(unit->param_elems);
    free(unit->offset_elems);
    free(unit->stored_low);
    free(unit);
}

void zpp_zero_destroy(zpp_zero *zero) {
    if (!zero) return;
    /* Streams first: they finish operations that still use the units, and must not wait for peers that go on without
     * us. */
    if (zpp_reduce_pending(zero)) zpp_comm_abort(zero->options.comm, "left in the middle of a reduction");
    zpp_zero_close_params(zero); /* nobody reads into the units any more */
    zpp_stream_destroy(zero->arrive);
    zpp_stream_destroy(zero->reduce);
    if (zero->gather != zero->compute) zpp_stream_destroy(zero->gather);
    zpp_stream_destroy(zero->compute);
    zpp_event_destroy(zero->acked);
    zpp_exchange_fini(zero);
    zpp_buffers_fini(zero);
    if (zero->grad_file.unit_file) zpp_unit_file_close(zero->grad_file.unit_file);
    for (int i = 0; i < zero->units_count; i++) destroy_unit(zero, zero->units[i]);
    zpp_grad_pool_drop(zero);
    free(zero->units);
    free(zero->order);
    free(zero->moving);
    zpp_trace_fini(&zero->trace);
    zpp_buckets_fini(&zero->buckets);
    zpp_desc_ring_destroy(zero->ring);
    zpp_desc_ring_destroy(zero->copy_ring);
    zpp_range_destroy(zero->range);
    zpp_unit_file_destroy(zero->unit_file);
    zpp_unit_file_destroy(zero->grad_file.unit_file);
    zpp_region_destroy(zero->params);
    zpp_region_destroy(zero->host);
    zpp_region_destroy(zero->grads);
    zpp_wire_fini(zero);
    zpp_secondary_free(zero);
    zpp_mem_free(zero->alone, zero->alone_bytes);
    pthread_mutex_destroy(&zero->grad_pool_lock);
    pthread_mutex_destroy(&zero->grad_file.lock);
    free(zero);
}

static zpp_status copy_spec(struct zpp_unit *unit, const struct zpp_unit_spec *spec, int ranks, struct zpp_err *err) {
    snprintf(unit->name, sizeof unit->name, "%s", spec->name);
    unit->dtype = spec->dtype;
    unit->elem_bytes = zpp_dtype_bytes(spec->dtype);
    unit->grad_dtype = spec->grad_dtype;
    unit->wire_dtype = spec->wire_dtype;
    unit->trainable = spec->trainable;
    unit->frozen_reserved = spec->frozen_reserved && !spec->trainable;
    unit->place = spec->place;
    unit->params = spec->params;
    const size_t room = spec->params ? spec->params : 1;
    unit->param_elems = calloc(room, sizeof *unit->param_elems);
    unit->offset_elems = calloc(room, sizeof *unit->offset_elems);
    if (!unit->param_elems || !unit->offset_elems)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the %zu parameters of unit %s", spec->params, spec->name);
    memcpy(unit->param_elems, spec->param_elems, spec->params * sizeof *unit->param_elems);
    zpp_unit_layout(unit->params, unit->param_elems, unit->elem_bytes, ranks, unit->offset_elems, &unit->elems,
                    &unit->shard_elems);
    return ZPP_OK;
}

static zpp_status check_spec(const zpp_zero *zero, const struct zpp_unit_spec *spec, struct zpp_err *err) {
    if (zero->sealed) return zpp_fail(err, ZPP_STATE, "zero: unit %s comes after seal", spec->name);
    if (!zpp_dtype_bytes(spec->dtype))
        return zpp_fail(err, ZPP_INVALID, "zero: unit %s has element kind %d, which is none", spec->name,
                        (int)spec->dtype);
    const bool same = spec->grad_dtype == spec->wire_dtype;
    const bool narrows = spec->grad_dtype == ZPP_F32 && (spec->wire_dtype == ZPP_BF16 || spec->wire_dtype == ZPP_F16);
    const bool fits = spec->grad_dtype == spec->dtype || spec->grad_dtype == ZPP_F32;
    if ((spec->trainable || spec->frozen_reserved) && !(fits && (same || narrows)))
        return zpp_fail(err, ZPP_INVALID,
                        "zero: gradients of unit %s (%s) are to add in %s and travel in %s; wanted its kind or "
                        "float32, and no more bits on the wire",
                        spec->name, zpp_dtype_name(spec->dtype), zpp_dtype_name(spec->grad_dtype),
                        zpp_dtype_name(spec->wire_dtype));
    if (spec->frozen_reserved && (zero->unit_file || zero->grad_file.unit_file))
        return zpp_fail(err, ZPP_INVALID,
                        "zero: unit %s is frozen and reserved, and parameters or gradients live in a file", spec->name);
    if ((spec->place == ZPP_PLACE_FILE) != (zero->unit_file != NULL) && spec->place != ZPP_PLACE_WHOLE)
        return zpp_fail(err, ZPP_INVALID, "zero: unit %s is%s to live in a file, and params_fraction is %g", spec->name,
                        spec->place == ZPP_PLACE_FILE ? "" : " not", zero->options.params_fraction);
    if (zero->ranks == 1 && spec->place != ZPP_PLACE_WHOLE && spec->place != ZPP_PLACE_FILE)
        return zpp_fail(err, ZPP_INVALID, "zero: unit %s is to be split, but there is one rank", spec->name);
    return ZPP_OK;
}

zpp_status zpp_zero_add_unit(zpp_zero *zero, const struct zpp_unit_spec *spec, int *index, struct zpp_err *err) {
    zpp_status status = check_spec(zero, spec, err);
    if (status != ZPP_OK) return status;
    if (zero->units_count == zero->units_room) {
        const int room = zero->units_room ? 2 * zero->units_room : 64;
        struct zpp_unit **units = realloc(zero->units, (size_t)room * sizeof(struct zpp_unit *));
        if (!units) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %d units", room);
        zero->units = units;
        zero->units_room = room;
    }
    struct zpp_unit *unit = calloc(1, sizeof *unit);
    if (!unit) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for unit %s", spec->name);
    unit->index = zero->units_count;
    status = copy_spec(unit, spec, zero->ranks, err);
    if (status == ZPP_OK) status = zpp_event_create(zero->options.device, &unit->allocated, err);
    if (status == ZPP_OK) status = zpp_event_create(zero->options.device, &unit->ready, err);
    if (status == ZPP_OK && (unit->trainable || unit->frozen_reserved)
        && (zero->ranks > 1 || zero->grad_file.unit_file))
        status = zpp_reduce_add_unit(zero, unit, err);
    if (status != ZPP_OK) {
        destroy_unit(zero, unit);
        return status;
    }
    zero->units[zero->units_count++] = unit;
    *index = unit->index;
    return ZPP_OK;
}

/* --- seal --------------------------------------------------------------------------------------------------------- */

static size_t region_bytes_of(const struct zpp_unit *unit) {
    return unit->place == ZPP_PLACE_SHARD ? zpp_unit_shard_bytes(unit) : zpp_unit_bytes(unit);
}

zpp_status zpp_zero_set_stored(zpp_zero *zero, int bits, size_t block_elems, bool in_memory, struct zpp_err *err) {
    if (!zero->unit_file) return zpp_fail(err, ZPP_STATE, "zero: there are no units that could be kept in %d bits",
                                          bits);
    return zpp_unit_file_set_qcopies(zero->unit_file, bits, block_elems, in_memory, err);
}

zpp_status zpp_zero_store_low(zpp_zero *zero, int index, size_t param, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    const bool floats = unit->dtype == ZPP_F32 || unit->dtype == ZPP_BF16 || unit->dtype == ZPP_F16;
    if (zero->sealed || unit->place != ZPP_PLACE_FILE || param >= unit->params || !floats)
        return zpp_fail(err, ZPP_INVALID, "zero: parameter %zu of unit %s (%s) cannot be kept in fewer bits", param,
                        unit->name, zpp_dtype_name(unit->dtype));
    if (!unit->stored_low) unit->stored_low = calloc(unit->params, 1);
    if (!unit->stored_low) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the matrices of unit %s", unit->name);
    unit->stored_low[param] = 1;
    return ZPP_OK;
}

static void place_in_range(struct zpp_unit *unit, size_t *range_bytes) {
    unit->range_offset_bytes = zpp_range_place(*range_bytes, zpp_unit_bytes(unit));
    *range_bytes = unit->range_offset_bytes + round_up(zpp_unit_bytes(unit), ZPP_PAGE_BYTES);
}

/* In the file that the ranks of a host share all of it, in one of a rank's own its shard. */
static zpp_status place_unit_file(zpp_zero *zero, struct zpp_unit *unit, size_t *range_bytes, struct zpp_err *err) {
    const bool own = zpp_rank_file(zero);
    const size_t bytes = own ? zpp_unit_shard_bytes(unit) : zpp_unit_bytes(unit);
    zpp_status status = zpp_unit_file_add(zero->unit_file, bytes, &unit->file_index, &unit->file_offset_bytes, err);
    if (own) {
        unit->rank_file = zero->unit_file;
        place_in_range(unit, range_bytes);
    } else {
        unit->range_offset_bytes = unit->file_offset_bytes;
    }
    if (zero->delays_steps && unit->trainable && status == ZPP_OK)
        status = zpp_unit_file_double_buffer(zero->unit_file, unit->file_index, err);
    for (size_t i = 0; unit->stored_low && i < unit->params && status == ZPP_OK; i++)
        if (unit->stored_low[i])
            status = zpp_unit_file_add_span(zero->unit_file, unit->file_index, unit->offset_elems[i] * unit->elem_bytes,
                                            unit->param_elems[i], unit->dtype, err);
    return status;
}

/* Where its shard, or all of it, lies in its region; where it lies among the units that come and go. */
static zpp_status place_unit(zpp_zero *zero, struct zpp_unit *unit, size_t *range_bytes, struct zpp_err *err) {
    if (unit->place == ZPP_PLACE_FILE) {
        zero->moving[zero->moving_count++] = unit;
        return place_unit_file(zero, unit, range_bytes, err);
    }
    size_t *used = unit->place == ZPP_PLACE_HOST ? &zero->host_bytes : &zero->params_bytes;
    unit->region_offset_bytes = place_next(used, region_bytes_of(unit));
    if (!zpp_unit_moves(unit)) return ZPP_OK;
    zero->moving[zero->moving_count++] = unit;
    place_in_range(unit, range_bytes);
    return ZPP_OK;
}

static zpp_status make_param_memory(zpp_zero *zero, size_t range_bytes, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (zero->ranks == 1) {
        if (zero->params_bytes == 0) return ZPP_OK;
        void *memory = NULL;
        status = zpp_mem_alloc(zero->params_bytes, ZPP_PAGE_BYTES, &memory, err);
        zero->alone = memory;
        zero->alone_bytes = zero->params_bytes;
        return status;
    }
    if (zero->params_bytes)
        status = zpp_region_create(zero->options.comm, ZPP_REGION_PER_RANK, zero->params_bytes, &zero->params, err);
    if (status == ZPP_OK && zero->host_bytes)
        status = zpp_region_create(zero->options.comm, ZPP_REGION_ONE, zero->host_bytes, &zero->host, err);
    if (status == ZPP_OK && range_bytes && !zero->options.backing.acquire)
        status = zpp_range_create(range_bytes, &zero->range, err);
    return status;
}

static void locate_unit_file(zpp_zero *zero, struct zpp_unit *unit) {
    unit->whole = zero->moving_base + unit->range_offset_bytes;
    if (unit->rank_file) {
        unit->shard = zpp_unit_file_mapping(unit->rank_file) + unit->file_offset_bytes;
        unit->state = ZPP_UNIT_PARTITIONED;
        return;
    }
    unit->shard = unit->whole + (size_t)zero->rank * zpp_unit_shard_bytes(unit);
    unit->held = zpp_unit_file_is_held(zero->unit_file, unit->file_index);
    unit->state = unit->held ? ZPP_UNIT_FULL : ZPP_UNIT_PARTITIONED;
}

static void locate_unit(zpp_zero *zero, struct zpp_unit *unit) {
    if (unit->place == ZPP_PLACE_FILE) {
        locate_unit_file(zero, unit);
        return;
    }
    unsigned char *base = zero->alone;
    if (unit->place == ZPP_PLACE_HOST) base = zpp_region_base(zero->host, zero->rank);
    else if (zero->params) base = zpp_region_base(zero->params, zero->rank);
    base += unit->region_offset_bytes;
    if (unit->place == ZPP_PLACE_SHARD) {
        unit->shard = base;
        if (zero->range) unit->whole = (unsigned char *)zpp_range_base(zero->range) + unit->range_offset_bytes;
        unit->state = ZPP_UNIT_PARTITIONED;
        return;
    }
    unit->whole = base;
    unit->shard = base + (size_t)zero->rank * zpp_unit_shard_bytes(unit);
    unit->state = ZPP_UNIT_FULL;
}

zpp_status zpp_zero_seal(zpp_zero *zero, struct zpp_err *err) {
    if (zero->sealed) return zpp_fail(err, ZPP_STATE, "zero: sealed twice");
    size_t range_bytes = 0, largest_bytes = 0;
    zero->moving = calloc((size_t)zero->units_count + 1, sizeof(struct zpp_unit *));
    if (!zero->moving) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %d units", zero->units_count);
    for (int i = 0; i < zero->units_count; i++) {
        struct zpp_unit *unit = zero->units[i];
        const zpp_status placed = place_unit(zero, unit, &range_bytes, err);
        if (placed != ZPP_OK) return placed;
        if (zpp_unit_moves(unit) && zpp_unit_bytes(unit) > largest_bytes) largest_bytes = zpp_unit_bytes(unit);
    }
    if (zero->options.comm) zero->number = zpp_comm_new_owner(zero->options.comm);
    zpp_status status = make_param_memory(zero, range_bytes, err);
    const size_t warm_bytes = 2 * largest_bytes + zero->options.prefetch_bytes;
    const size_t warm_parts = zpp_rank_file(zero) ? (size_t)zero->ranks : 1;
    if (status == ZPP_OK && zero->unit_file) status = zpp_unit_file_seal(zero->unit_file, warm_bytes / warm_parts, err);
    if (status == ZPP_OK) status = zpp_trace_init(&zero->trace, zero->units_count, err);
    if (status == ZPP_OK && (zero->ranks > 1 || zero->grad_file.unit_file)) status = zpp_reduce_seal(zero, err);
    if (status == ZPP_OK) status = zpp_wire_seal(zero, err);
    if (status == ZPP_OK) status = zpp_secondary_seal(zero, err);
    if (status != ZPP_OK) return status;
    if (zero->range) zero->moving_base = zpp_range_base(zero->range);
    else if (zero->unit_file) zero->moving_base = zpp_unit_file_mapping(zero->unit_file);
    for (int i = 0; i < zero->units_count; i++) locate_unit(zero, zero->units[i]);
    if (zero->range) zpp_range_set_warm(zero->range, warm_bytes);
    zero->sealed = true;
    return ZPP_OK;
}

/* --- small answers ------------------------------------------------------------------------------------------------ */

int zpp_zero_units(const zpp_zero *zero) {
    return zero->units_count;
}

struct zpp_unit *zpp_zero_unit(zpp_zero *zero, int index) {
    assert(index >= 0 && index < zero->units_count);
    return zero->units[index];
}

int zpp_zero_rank(const zpp_zero *zero) {
    return zero->rank;
}

int zpp_zero_ranks(const zpp_zero *zero) {
    return zero->ranks;
}

zpp_stream *zpp_zero_compute(zpp_zero *zero) {
    return zero->compute;
}

zpp_unit_file *zpp_zero_param_file(zpp_zero *zero) {
    return zero->unit_file;
}

const struct zpp_aio_fault *zpp_zero_fault(const zpp_zero *zero) {
    return &zero->fault;
}

int zpp_zero_find(const zpp_zero *zero, const void *address) {
    if (!zero->moving_base) return -1;
    const unsigned char *base = zero->moving_base, *at = address;
    if (at < base || !zero->moving_count) return -1;
    const size_t offset = (size_t)(at - base);
    int low = 0, high = zero->moving_count - 1;
    while (low < high) { /* the last unit that begins at or before `offset` */
        const int middle = (low + high + 1) / 2;
        if (zero->moving[middle]->range_offset_bytes <= offset) low = middle;
        else high = middle - 1;
    }
    const struct zpp_unit *unit = zero->moving[low];
    return offset < unit->range_offset_bytes + zpp_unit_bytes(unit) ? unit->index : -1;
}

void zpp_zero_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    const size_t ranks = (size_t)zero->ranks;
    struct zpp_unit_file_figures unit_file = { 0 }, grads = { 0 };
    if (zero->unit_file) zpp_unit_file_figures(zero->unit_file, &unit_file);
    if (zero->grad_file.unit_file) zpp_unit_file_figures(zero->grad_file.unit_file, &grads);
    /* The ranks share what they read from the file, as long as they are at the same unit; but over several hosts. */
    const bool own = zpp_rank_file(zero);
    const size_t sharers = own ? 1 : zero->options.copy ? (size_t)zpp_comm_ranks(zero->options.copy) : ranks;
    const size_t full = zero->unit_file && !own ? unit_file.memory_bytes / sharers : zero->full_bytes;
    const size_t warm = (zero->range ? zpp_range_held_bytes(zero->range) : full) + (own ? unit_file.memory_bytes : 0);
    *out = (struct zpp_zero_memory){
        .param_bytes = zero->params_bytes + zero->wire.images_bytes + zero->second_bytes + zero->host_bytes / ranks +
                       unit_file.cut_bytes / sharers,
        .gathered_bytes = warm,
        .grad_bytes = zero->shard_bytes + zero->kept_bucket_bytes + zero->carry_bytes + grads.cut_bytes -
                      (zero->grad_file.unit_file ? zero->taken_bytes : 0),
        .bucket_bytes = zero->buckets.touched_bytes,
        .bucket_peak_bytes = zero->buckets.peak_bytes,
        .gathered_peak_bytes =
            own ? zero->full_peak_bytes + unit_file.entered_peak_bytes
                : zero->unit_file ? unit_file.entered_peak_bytes / sharers : zero->full_peak_bytes,
        .on_disk_bytes = (unit_file.mapping_bytes - unit_file.cut_bytes) / sharers,
    };
}

uint64_t zpp_zero_gather_ns(const zpp_zero *zero) {
    return zero->gather_ns;
}
