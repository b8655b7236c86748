/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank holds its shard in memory that all ranks of the host map. A gather reads every rank's shard, by unit, with no
 * partner call: between two steps no rank writes shards, so there is nothing to wait for and nothing to mistake, even
 * where ranks run different modules. Where parameters travel quantised it reads the quantised copies (wire.c).
 *
 * Memory moves in the order of the compute stream: `allocated` is reached when nothing before it uses the memory.
 */
#include "../placement.h"

#include <string.h>

#include "../internal.h"

/* --- the range of addresses, or the backing ----------------------------------------------------------------------- */

enum { STAY_MAPPED_BYTES = 64 * 1024 }; /* below this, mapping costs more than the memory is worth */

static size_t mapped_bytes(const struct zpp_unit *unit) {
    return (zpp_unit_bytes(unit) + zpp_page_bytes() - 1) / zpp_page_bytes() * zpp_page_bytes();
}

void zpp_range_lay_out(zpp_zero *zero, struct zpp_unit *unit) {
    unit->range_offset_bytes = zpp_range_place(zero->range_bytes, zpp_unit_bytes(unit));
    zero->range_bytes = unit->range_offset_bytes + mapped_bytes(unit);
}

zpp_status zpp_range_acquire(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct zpp_backing *backing = &zero->options.backing;
    if (!backing->acquire)
        return unit->mapped ? ZPP_OK : zpp_range_map(zero->range, unit->range_offset_bytes, mapped_bytes(unit), err);
    void *memory = NULL;
    const zpp_status status = backing->acquire(backing->ctx, unit, &memory, err);
    if (status == ZPP_OK) unit->whole = memory;
    return status;
}

zpp_status zpp_range_release(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct zpp_backing *backing = &zero->options.backing;
    if (backing->release) {
        backing->release(backing->ctx, unit, unit->whole);
        return ZPP_OK;
    }
    if (zero->range && zpp_unit_bytes(unit) < STAY_MAPPED_BYTES) {
        memset(unit->whole, 0xff, zpp_unit_bytes(unit)); /* NaN: a view that outlives its unit must not look right */
        return ZPP_OK;
    }
    unit->mapped = false;
    return zpp_range_unmap(zero->range, unit->range_offset_bytes, mapped_bytes(unit), err);
}

size_t zpp_range_memory_bytes(const zpp_zero *zero) {
    return zero->range ? zpp_range_held_bytes(zero->range) : zero->full_bytes;
}

/* --- the coordinator's -------------------------------------------------------------------------------------------- */

/* Without prefetch nothing overlaps, and gathers are a part of the computation. */
static zpp_status open_streams(zpp_zero *zero, struct zpp_err *err) {
    if (!zero->options.prefetch_bytes) return ZPP_OK;
    return zpp_stream_create(zero->options.device, ZPP_STREAM_THREAD, "gather", &zero->gather, err);
}

static void count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    out->gathered_bytes += zpp_range_memory_bytes(zero);
    out->gathered_peak_bytes += zero->full_peak_bytes;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static zpp_status lay_out(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->region_offset_bytes = zpp_unit_next_offset(&zero->params_bytes, zpp_unit_shard_bytes(unit));
    zpp_range_lay_out(zero, unit);
    return zpp_wire_quantises_params(zero) ? zpp_wire_add_qcopy(zero, unit, err) : ZPP_OK;
}

void zpp_range_locate(zpp_zero *zero, struct zpp_unit *unit) {
    unit->shard = zpp_params_of_member(zero, unit, unit->group->rank);
    if (zero->range) unit->whole = (unsigned char *)zpp_range_base(zero->range) + unit->range_offset_bytes;
}

/* --- gathers ------------------------------------------------------------------------------------------------------ */

struct gather_args {
    zpp_zero *zero;
    const struct zpp_unit *unit;
    unsigned char *memory;
    bool quantised; /* as of the launch: the unit may be gathered anew before a gather that it gave up has run */
};

static void copy_shards(const zpp_zero *zero, const struct zpp_unit *unit, unsigned char *memory) {
    const size_t bytes = zpp_unit_shard_bytes(unit);
    const int ranks = unit->group->ranks;
    for (int at = 0; at < ranks; at++)
        memcpy(memory + (size_t)at * bytes, zpp_params_of_member(zero, unit, at), bytes);
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER, bytes * (size_t)(ranks - 1));
}

static zpp_status gather_shards(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct gather_args *args = arg;
    const uint64_t began_ns = zpp_span_begin();
    if (args->quantised) zpp_wire_gather(args->zero, args->unit, args->memory);
    else copy_shards(args->zero, args->unit, args->memory);
    zpp_span_end(began_ns, ZPP_SPAN_GATHER, args->unit->name, zpp_unit_bytes(args->unit));
    return ZPP_OK;
}

static zpp_status gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->quantised = zpp_wire_quantises_params(zero) && !unit->wants_exact;
    const struct gather_args args = { zero, unit, unit->whole, unit->quantised };
    zpp_status status = zpp_event_record(unit->allocated, zero->compute, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->gather, unit->allocated, NULL, err);
    if (status == ZPP_OK) status = zpp_stream_launch(zero->gather, gather_shards, &args, sizeof args, err);
    if (status == ZPP_OK) status = zpp_event_record(unit->ready, zero->gather, err);
    return status;
}

static zpp_status copy_exact(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct gather_args *args = arg;
    copy_shards(args->zero, args->unit, args->memory);
    return ZPP_OK;
}

static zpp_status make_exact(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct gather_args args = { zero, unit, unit->whole, false };
    return zpp_stream_launch(zero->compute, copy_exact, &args, sizeof args, err);
}

/* --- the shard ---------------------------------------------------------------------------------------------------- */

zpp_status zpp_range_keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)zero, (void)err;
    memcpy(unit->shard, zpp_unit_shard_of_whole(unit, unit->group->rank), zpp_unit_shard_bytes(unit));
    return ZPP_OK;
}

static zpp_status publish(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)err;
    if (zpp_wire_quantises_params(zero)) zpp_wire_make_qcopy(zero, unit);
    return ZPP_OK;
}

const struct zpp_placement zpp_placement_sharded = {
    .name = "sharded", .moves = true,
    .open = open_streams, .count_memory = count_memory,
    .lay_out = lay_out, .locate = zpp_range_locate,
    .acquire = zpp_range_acquire, .release = zpp_range_release,
    .gather = gather, .make_exact = make_exact,
    .keep_shard = zpp_range_keep_shard, .publish = publish,
};
