/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator's life: units are added, memory is made for all of them at once, and ended.
 */
#include "zero.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grad_path.h"
#include "grad_store.h"
#include "internal.h"
#include "placement.h"

static bool shards_on_device(const struct zpp_zero_options *options) {
    return options->host && options->shards == ZPP_SHARDS_ON_DEVICE;
}

/* With an accelerator. */
static const struct zpp_placement *placement_on_accelerator(const zpp_zero *zero, enum zpp_place place) {
    const bool moves = place == ZPP_PLACE_SHARD;
    if (place == ZPP_PLACE_FILE) return &zpp_placement_nvme_up;
    if (shards_on_device(&zero->options)) return moves ? &zpp_placement_on_device : &zpp_placement_on_device_whole;
    if (zpp_internode(zero->options.comm))
        return moves ? &zpp_placement_offloaded_net : &zpp_placement_offloaded_whole_net;
    return moves ? &zpp_placement_offloaded : &zpp_placement_offloaded_whole;
}

/* The one place that chooses; what differs is in the tables (placement.h). */
static const struct zpp_placement *placement_of(const zpp_zero *zero, enum zpp_place place) {
    const bool internode = zpp_internode(zero->options.comm);
    if (zero->options.host) return placement_on_accelerator(zero, place);
    switch (place) {
    case ZPP_PLACE_HOST: return &zpp_placement_host_shared;
    case ZPP_PLACE_SHARD: return internode ? &zpp_placement_sharded_net : &zpp_placement_sharded;
    case ZPP_PLACE_FILE:
        return internode && !zero->options.copy ? &zpp_placement_nvme_net : &zpp_placement_nvme;
    default: return &zpp_placement_replicated;
    }
}

static zpp_status create_streams(zpp_zero *zero, struct zpp_err *err) {
    zpp_device *device = zero->options.device;
    zpp_status status = zpp_stream_create(device, ZPP_STREAM_HOST, "compute", &zero->compute, err);
    zero->gather = zero->compute;
    if (status == ZPP_OK && zero->placement->open) status = zero->placement->open(zero, err);
    if (status == ZPP_OK)
        status = zpp_stream_create(zpp_zero_host(zero), ZPP_STREAM_QUEUE, "reduce", &zero->reduce, err);
    if (status == ZPP_OK) status = zpp_event_create(zpp_zero_host(zero), &zero->acked, err);
    if (status == ZPP_OK) status = zpp_event_create(device, &zero->settled, err);
    if (status == ZPP_OK && zero->path->seal) status = zero->path->seal(zero, err);
    return status;
}

/* What does not go together with an accelerator yet. */
static zpp_status check_accelerator(const struct zpp_zero_options *options, struct zpp_err *err) {
    if (!options->host) return ZPP_OK;
    if (zpp_internode(options->comm) && options->params_fraction > 0.0 && !options->copy)
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "zero: parameters in files beside accelerators of several hosts are not supported yet; keep "
                        "them in memory of the host, or use one host");
    if (options->stage == 0 && !shards_on_device(options))
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "zero: stage 0 with shards beside an accelerator is not supported yet; use stage 1, 2 or 3, "
                        "or keep shards on the accelerator");
    return ZPP_OK;
}

/* The tables, but for the placements. */
static void choose_tables(zpp_zero *zero) {
    const struct zpp_zero_options *options = &zero->options;
    zero->store = options->stage <= 1 ? &zpp_grad_store_bucket : &zpp_grad_store_memory;
    zero->path = options->host ? &zpp_grad_path_offload : &zpp_grad_path_direct;
    if (!shards_on_device(options)) return;
    zero->store = &zpp_grad_store_device;
    zero->path = &zpp_grad_path_device;
}

/* Group 0. */
static zpp_status add_all_ranks(zpp_zero *zero, struct zpp_err *err) {
    zero->groups = zpp_array_reserve(NULL, 0, &zero->groups_capacity, sizeof(struct zpp_group *));
    struct zpp_group *all = zero->groups ? calloc(1, sizeof *all) : NULL;
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for a group of %d ranks", zero->ranks);
    zpp_group_init_all(all, zero->rank, zero->ranks);
    all->comm = zero->options.comm;
    zero->groups[zero->groups_count++] = all;
    return ZPP_OK;
}

static zpp_status create_unit_file(zpp_zero *zero, struct zpp_err *err) {
    const struct zpp_zero_options *options = &zero->options;
    zpp_comm *sharers = zpp_internode(options->comm) ? options->copy : options->comm;
    if (options->params_fraction <= 0.0) return ZPP_OK;
    return zpp_unit_file_create(sharers, options->params_fraction, &zero->unit_file, err);
}

zpp_status zpp_zero_create(const struct zpp_zero_options *options, zpp_zero **out, struct zpp_err *err) {
    if (options->stage < 0 || options->stage > 3)
        return zpp_fail(err, ZPP_INVALID, "zero: stage is %d, not 0, 1, 2 or 3", options->stage);
    zpp_status status = check_accelerator(options, err);
    if (status != ZPP_OK) return status;
    zpp_zero *zero = calloc(1, sizeof *zero);
    if (!zero) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the coordinator");
    zero->options = *options;
    zero->rank = options->comm ? zpp_comm_rank(options->comm) : 0;
    zero->ranks = options->comm ? zpp_comm_ranks(options->comm) : 1;
    zero->grad_scale = 1.0;
    choose_tables(zero);
    status = add_all_ranks(zero, err);
    pthread_mutex_init(&zero->grad_pool_lock, NULL); /* with default attributes it cannot fail */
    pthread_mutex_init(&zero->grad_file.lock, NULL);
    if (status == ZPP_OK) status = create_unit_file(zero, err);
    zero->placement = placement_of(zero, zero->unit_file ? ZPP_PLACE_FILE : ZPP_PLACE_SHARD);
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
    const zpp_status status = zpp_unit_file_create(NULL, fraction, &zero->grad_file.unit_file, err);
    if (status == ZPP_OK) zero->store = &zpp_grad_store_nvme;
    return status;
}

void zpp_zero_pool_grads(zpp_zero *zero) {
    if (zero->store == &zpp_grad_store_memory) zero->store = &zpp_grad_store_pooled;
    if (zero->store == &zpp_grad_store_device && !zpp_keeps_buckets(zero) && zero->ranks > 1)
        zero->store = &zpp_grad_store_device_pooled;
}

void zpp_zero_delay_steps(zpp_zero *zero) {
    zero->delays_steps = true;
}

size_t zpp_zero_back_bytes(const zpp_zero *zero) {
    return zero->back_bytes;
}

static void drop_gather(zpp_zero *zero, struct zpp_unit *unit) {
    if (unit->placement && unit->placement->drop) unit->placement->drop(zero, unit);
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
    zpp_event_destroy(unit->staged);
    for (size_t i = 0; unit->names && i < unit->params; i++) free(unit->names[i].text);
    free(unit->names);
    free(unit->param_elems);
    free(unit->offset_elems);
    free(unit->quantised_params);
    free(unit);
}

void zpp_zero_destroy(zpp_zero *zero) {
    if (!zero) return;
    /* Streams first: they finish operations that still use the units, and must not wait for peers that go on without
     * us. */
    if (zpp_reduce_pending(zero)) zpp_comm_abort(zero->options.comm, "left in the middle of a reduction");
    for (int i = 0; i < zero->units_count; i++) drop_gather(zero, zero->units[i]); /* other threads use the streams */
    zpp_zero_close_params(zero); /* no read goes into the units any more */
    zpp_stream_destroy(zero->arrive);
    zpp_stream_destroy(zero->reduce);
    if (zero->gather != zero->compute) zpp_stream_destroy(zero->gather);
    zpp_stream_destroy(zero->compute);
    if (zero->path->fini) zero->path->fini(zero);
    zpp_event_destroy(zero->acked);
    zpp_event_destroy(zero->settled);
    zpp_exchange_fini(zero);
    zpp_buffers_fini(zero);
    if (zero->grad_file.unit_file) zpp_unit_file_close(zero->grad_file.unit_file);
    for (int i = 0; i < zero->units_count; i++) destroy_unit(zero, zero->units[i]);
    free(zero->units);
    free(zero->order);
    free(zero->moving);
    free(zero->by_address);
    zpp_trace_fini(&zero->trace);
    zpp_buckets_fini(&zero->buckets);
    zpp_desc_ring_destroy(zero->ring);
    zpp_desc_ring_destroy(zero->copy_ring);
    zpp_unpin_all(zero);
    if (zero->placement->fini) zero->placement->fini(zero);
    for (int i = 0; i < zero->groups_count; i++) free(zero->groups[i]);
    free(zero->groups);
    zpp_range_destroy(zero->range);
    zpp_unit_file_destroy(zero->unit_file);
    zpp_unit_file_destroy(zero->grad_file.unit_file);
    zpp_region_destroy(zero->params);
    zpp_region_destroy(zero->host);
    zpp_region_destroy(zero->grads);
    zpp_wire_fini(zero);
    if (zero->secondary) zpp_mem_free(zero->secondary, zero->secondary_bytes);
    zpp_mem_free(zero->alone, zero->alone_bytes);
    zpp_mem_free(zero->grads_alone, zero->grads_alone_bytes);
    pthread_mutex_destroy(&zero->grad_pool_lock);
    pthread_mutex_destroy(&zero->grad_file.lock);
    free(zero);
}

static zpp_status copy_spec(const zpp_zero *zero, struct zpp_unit *unit, const struct zpp_unit_spec *spec,
                            struct zpp_err *err) {
    snprintf(unit->name, sizeof unit->name, "%s", spec->name);
    unit->dtype = spec->dtype;
    unit->elem_bytes = zpp_dtype_bytes(spec->dtype);
    unit->grad_dtype = spec->grad_dtype;
    unit->wire_dtype = spec->wire_dtype;
    unit->trainable = spec->trainable;
    unit->frozen_reserved = spec->frozen_reserved && !spec->trainable;
    unit->held = spec->held;
    unit->place = spec->place;
    unit->shared = spec->shared;
    unit->on_host = spec->on_host;
    unit->placement = placement_of(zero, spec->place);
    unit->group = zero->groups[spec->group];
    unit->params = spec->params;
    const size_t capacity = spec->params ? spec->params : 1;
    unit->param_elems = calloc(capacity, sizeof *unit->param_elems);
    unit->offset_elems = calloc(capacity, sizeof *unit->offset_elems);
    if (!unit->param_elems || !unit->offset_elems)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the %zu parameters of unit %s", spec->params, spec->name);
    memcpy(unit->param_elems, spec->param_elems, spec->params * sizeof *unit->param_elems);
    zpp_unit_layout(unit->params, unit->param_elems, unit->elem_bytes, unit->group->ranks, unit->offset_elems,
                    &unit->elems, &unit->shard_elems);
    return ZPP_OK;
}

static bool gets_gradients(const struct zpp_unit_spec *spec) {
    return spec->trainable || spec->frozen_reserved;
}

static zpp_status check_gradients(const zpp_zero *zero, const struct zpp_unit_spec *spec, struct zpp_err *err) {
    const bool same = spec->grad_dtype == spec->wire_dtype;
    const bool narrows = spec->grad_dtype == ZPP_F32 && (spec->wire_dtype == ZPP_BF16 || spec->wire_dtype == ZPP_F16);
    const bool fits = spec->grad_dtype == spec->dtype || spec->grad_dtype == ZPP_F32;
    if (gets_gradients(spec) && !(fits && (same || narrows)))
        return zpp_fail(err, ZPP_INVALID,
                        "zero: gradients of unit %s (%s) are to accumulate in %s and reduce in %s; wanted its dtype or "
                        "float32, and no more bits on the wire",
                        spec->name, zpp_dtype_name(spec->dtype), zpp_dtype_name(spec->grad_dtype),
                        zpp_dtype_name(spec->wire_dtype));
    if (spec->frozen_reserved && (zero->placement->in_file || zero->store->file))
        return zpp_fail(err, ZPP_INVALID,
                        "zero: unit %s is frozen and reserved, and parameters or gradients live in a file", spec->name);
    return ZPP_OK;
}

static zpp_status check_place(const zpp_zero *zero, const struct zpp_unit_spec *spec, struct zpp_err *err) {
    const bool in_file = spec->place == ZPP_PLACE_FILE;
    if (spec->on_host && zpp_zero_by_nccl(zero))
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "zero: unit %s has its shards on the host, with accelerators whose shards NCCL moves, is not "
                        "supported yet; leave Experts(offload=) out",
                        spec->name);
    if (spec->on_host && (spec->place != ZPP_PLACE_SHARD || !shards_on_device(&zero->options)))
        return zpp_fail(err, ZPP_INVALID,
                        "zero: unit %s has its shards on the host; wanted place SHARD, and others' on a device",
                        spec->name);
    if (spec->place == ZPP_PLACE_WHOLE) return ZPP_OK;
    if (in_file != (zero->unit_file != NULL))
        return zpp_fail(err, ZPP_INVALID, "zero: unit %s is%s to live in a file, and params_fraction is %g", spec->name,
                        in_file ? "" : " not", zero->options.params_fraction);
    if (!in_file && zpp_zero_keeps_local_grads(zero))
        return zpp_fail(err, ZPP_INVALID, "zero: cannot shard unit %s: world size is 1", spec->name);
    return ZPP_OK;
}

static zpp_status check_spec(const zpp_zero *zero, const struct zpp_unit_spec *spec, struct zpp_err *err) {
    if (zero->sealed) return zpp_fail(err, ZPP_STATE, "zero: unit %s comes after seal", spec->name);
    if (!zpp_dtype_bytes(spec->dtype))
        return zpp_fail(err, ZPP_INVALID, "zero: unit %s has dtype %d, which is none", spec->name, (int)spec->dtype);
    if (spec->group < 0 || spec->group >= zero->groups_count)
        return zpp_fail(err, ZPP_INVALID, "zero: unit %s is of group %d, wanted 0 to %d", spec->name, spec->group,
                        zero->groups_count - 1);
    const zpp_status status = check_gradients(zero, spec, err);
    return status == ZPP_OK ? check_place(zero, spec, err) : status;
}

static zpp_status init_unit(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_unit_spec *spec,
                            struct zpp_err *err) {
    zpp_status status = copy_spec(zero, unit, spec, err);
    if (status == ZPP_OK) status = zpp_event_create(zero->options.device, &unit->allocated, err);
    if (status == ZPP_OK) status = zpp_event_create(zero->options.device, &unit->ready, err);
    const bool reduced = zpp_zero_takes_grads(zero) && gets_gradients(spec);
    return status == ZPP_OK && reduced ? zpp_reduce_add_unit(zero, unit, err) : status;
}

zpp_status zpp_zero_add_unit(zpp_zero *zero, const struct zpp_unit_spec *spec, int *index, struct zpp_err *err) {
    zpp_status status = check_spec(zero, spec, err);
    if (status != ZPP_OK) return status;
    struct zpp_unit **units =
        zpp_array_reserve(zero->units, (size_t)zero->units_count, &zero->units_capacity, sizeof(struct zpp_unit *));
    struct zpp_unit *unit = units ? calloc(1, sizeof *unit) : NULL;
    if (units) zero->units = units;
    if (!unit) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for unit %s", spec->name);
    unit->zero = zero;
    unit->index = zero->units_count;
    status = init_unit(zero, unit, spec, err);
    if (status != ZPP_OK) {
        destroy_unit(zero, unit);
        return status;
    }
    zero->units[zero->units_count++] = unit;
    *index = unit->index;
    return ZPP_OK;
}

/* --- seal --------------------------------------------------------------------------------------------------------- */

zpp_status zpp_zero_set_weight_quant(zpp_zero *zero, int bits, size_t block_elems, bool in_memory,
                                     struct zpp_err *err) {
    if (!zero->unit_file) return zpp_fail(err, ZPP_STATE, "zero: there are no units that could be kept in %d bits",
                                          bits);
    return zpp_unit_file_set_qcopies(zero->unit_file, bits, block_elems, in_memory, err);
}

zpp_status zpp_zero_quantise_param(zpp_zero *zero, int index, size_t param, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    const bool floats = unit->dtype == ZPP_F32 || unit->dtype == ZPP_BF16 || unit->dtype == ZPP_F16;
    if (zero->sealed || !zpp_unit_in_file(unit) || param >= unit->params || !floats)
        return zpp_fail(err, ZPP_INVALID, "zero: parameter %zu of unit %s (%s) cannot be kept in fewer bits", param,
                        unit->name, zpp_dtype_name(unit->dtype));
    if (!unit->quantised_params) unit->quantised_params = calloc(unit->params, 1);
    if (!unit->quantised_params)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the matrices of unit %s", unit->name);
    unit->quantised_params[param] = 1;
    return ZPP_OK;
}

zpp_status zpp_zero_name_param(zpp_zero *zero, int index, size_t param, const char *text, size_t row_elems,
                               size_t first_row, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    if (param >= unit->params)
        return zpp_fail(err, ZPP_INVALID, "zero: the name of parameter %zu of unit %s, which has %zu", param,
                        unit->name, unit->params);
    char *copy = strdup(text);
    if (!unit->names) unit->names = calloc(unit->params, sizeof *unit->names);
    if (!copy || !unit->names) {
        free(copy);
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the name of parameter %zu of unit %s", param, unit->name);
    }
    free(unit->names[param].text);
    unit->names[param] = (struct zpp_param_name){copy, row_elems, first_row};
    return ZPP_OK;
}

bool zpp_zero_holds(const zpp_zero *zero) {
    for (int i = 0; i < zero->units_count; i++)
        if (zero->units[i]->held) return true;
    return false;
}

/* Choose the places and addresses of units, of those that are held or of the others. */
static zpp_status lay_out_some(zpp_zero *zero, bool held, size_t *largest_bytes, struct zpp_err *err) {
    for (int i = 0; i < zero->units_count; i++) {
        struct zpp_unit *unit = zero->units[i];
        if (unit->held != held) continue;
        const zpp_status status = unit->placement->lay_out(zero, unit, err);
        if (status != ZPP_OK) return status;
        if (!zpp_unit_moves(unit)) continue;
        zero->moving[zero->moving_count++] = unit;
        if (zpp_unit_bytes(unit) > *largest_bytes) *largest_bytes = zpp_unit_bytes(unit);
        if (!unit->shared && zpp_unit_bytes(unit) > zero->largest_bytes) zero->largest_bytes = zpp_unit_bytes(unit);
    }
    return ZPP_OK;
}

/* *warm_bytes: what may stay mapped for the next gathers. */
static zpp_status lay_out(zpp_zero *zero, size_t *warm_bytes, struct zpp_err *err) {
    size_t largest_bytes = 0;
    zero->moving = calloc((size_t)zero->units_count + 1, sizeof(struct zpp_unit *));
    zero->by_address = calloc((size_t)zero->units_count + 1, sizeof(struct zpp_unit *));
    if (!zero->moving || !zero->by_address)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %d units", zero->units_count);
    zpp_status status = lay_out_some(zero, true, &largest_bytes, err);
    if (status == ZPP_OK && zero->unit_file && zpp_zero_holds(zero)) status = zpp_unit_file_hold(zero->unit_file, err);
    if (status == ZPP_OK) status = lay_out_some(zero, false, &largest_bytes, err);
    *warm_bytes = 2 * largest_bytes + zero->options.prefetch_bytes;
    return status;
}

/* The shards that streams of an accelerator read: of all ranks, as far as they are mapped here. */
static zpp_status pin_params(zpp_zero *zero, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (int rank = 0; rank < zero->ranks && status == ZPP_OK; rank++)
        if (zpp_params_of_rank(zero, rank))
            status = zpp_pin(zero, zpp_params_of_rank(zero, rank), zero->params_bytes, err);
    return status;
}

static zpp_status make_alone(zpp_zero *zero, struct zpp_err *err) {
    if (zero->params_bytes == 0) return ZPP_OK;
    void *memory = NULL;
    const zpp_status status = zpp_mem_alloc(zero->params_bytes, zpp_page_bytes(), &memory, err);
    zero->alone = memory;
    zero->alone_bytes = zero->params_bytes;
    return status == ZPP_OK ? pin_params(zero, err) : status;
}

static zpp_status make_param_memory(zpp_zero *zero, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (zero->ranks == 1) return make_alone(zero, err);
    if (zero->params_bytes)
        status = zpp_region_create(zero->options.comm, ZPP_REGION_PER_RANK, zero->params_bytes, &zero->params, err);
    if (status == ZPP_OK && zero->params) status = pin_params(zero, err);
    if (status == ZPP_OK && zero->host_bytes)
        status = zpp_region_create(zero->options.comm, ZPP_REGION_ONE, zero->host_bytes, &zero->host, err);
    if (status == ZPP_OK && zero->range_bytes && !zero->options.backing.acquire)
        status = zpp_range_create(zero->range_bytes, &zero->range, err);
    if (zero->range) zero->moving_base = zpp_range_base(zero->range);
    return status;
}

static void locate_units(zpp_zero *zero) {
    for (int i = 0; i < zero->units_count; i++) {
        struct zpp_unit *unit = zero->units[i];
        unit->placement->locate(zero, unit);
        unit->state = zpp_unit_moves(unit) ? ZPP_UNIT_SHARDED : ZPP_UNIT_GATHERED;
    }
    zpp_zero_sort_by_address(zero);
}

zpp_status zpp_zero_seal(zpp_zero *zero, struct zpp_err *err) {
    if (zero->sealed) return zpp_fail(err, ZPP_STATE, "zero: sealed twice");
    size_t warm_bytes = 0;
    zpp_status status = lay_out(zero, &warm_bytes, err);
    if (status != ZPP_OK) return status;
    if (zero->options.comm) zero->number = zpp_comm_new_owner(zero->options.comm);
    status = make_param_memory(zero, err);
    if (status == ZPP_OK && zero->placement->seal) status = zero->placement->seal(zero, warm_bytes, err);
    if (status == ZPP_OK) status = zpp_trace_init(&zero->trace, zero->units_count, err);
    if (status == ZPP_OK) status = zpp_reduce_seal(zero, err);
    if (status == ZPP_OK) status = zpp_wire_seal(zero, err);
    if (status != ZPP_OK) return status;
    locate_units(zero);
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

bool zpp_zero_shards_on_device(const zpp_zero *zero) {
    return shards_on_device(&zero->options);
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

/* Where tensors of a unit lie: in the range of addresses, or where the unit has memory of its own on a device. */
static uintptr_t begin_of(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zero->wrap ? (uintptr_t)unit->whole : (uintptr_t)zero->moving_base + unit->range_offset_bytes;
}

void zpp_zero_sort_by_address(zpp_zero *zero) {
    for (int i = 0; i < zero->moving_count; i++) { /* all but one unit are in order already */
        struct zpp_unit *unit = zero->by_address[i] ? zero->by_address[i] : zero->moving[i];
        int at = i;
        for (; at > 0 && begin_of(zero, zero->by_address[at - 1]) > begin_of(zero, unit); at--)
            zero->by_address[at] = zero->by_address[at - 1];
        zero->by_address[at] = unit;
    }
}

int zpp_zero_find(const zpp_zero *zero, const void *address) {
    const uintptr_t at = (uintptr_t)address;
    if ((!zero->moving_base && !zero->wrap) || !zero->moving_count) return -1;
    int low = 0, high = zero->moving_count - 1;
    while (low < high) { /* the last unit that begins at or before the address */
        const int middle = (low + high + 1) / 2;
        if (begin_of(zero, zero->by_address[middle]) <= at) low = middle;
        else high = middle - 1;
    }
    const struct zpp_unit *unit = zero->by_address[low];
    const uintptr_t begin = begin_of(zero, unit);
    return at >= begin && at < begin + zpp_unit_bytes(unit) ? unit->index : -1;
}

void zpp_zero_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    const size_t ranks = (size_t)zero->ranks;
    *out = (struct zpp_zero_memory){
        .param_bytes = zero->params_bytes + zero->wire.qcopies_bytes + zero->host_bytes / ranks,
        .bucket_bytes = zero->buckets.touched_bytes,
        .bucket_peak_bytes = zero->buckets.peak_bytes,
        .pinned_bytes = zero->pinned.bytes,
        .on_host_bytes = shards_on_device(&zero->options) ? zero->params_bytes : 0,
        .resident_bytes = zero->resident_bytes,
        .block_bytes = zero->blocks.bytes,
    };
    zero->placement->count_memory(zero, out);
    zero->store->count_memory(zero, out);
}

uint64_t zpp_zero_gather_ns(const zpp_zero *zero) {
    return zero->gather_ns;
}
