/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards in page-locked memory of the host, which all ranks map, and whole units on an accelerator. A gather is one
 * copy by a copy engine for each rank's shard; the host waits for nothing. The step runs on the host (ZeRO-Offload).
 *
 *   offloaded         moves: gathered when it is needed, into memory that wraps (wrapped.c)
 *   offloaded_whole   stays whole; after a step, the new shards of all ranks
 *
 * Between two steps no rank writes shards. A step begins when the copies that read shards are over on every rank:
 * each rank waits for its own (settle) before the votes.
 *
 * Where parameters travel quantised, the CPU makes the quantised copies (wire.c). A gather copies one after the other
 * to a place on the device, as large as the largest of them, and a kernel behind each copy makes the values of it.
 */
#include "../internal.h"
#include "../placement.h"

void zpp_offloaded_lay_out_shard(zpp_zero *zero, struct zpp_unit *unit) {
    unit->region_offset_bytes = zpp_unit_next_offset(&zero->params_bytes, zpp_unit_shard_bytes(unit));
}

static zpp_status lay_out(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_wire *wire = &zero->wire;
    zpp_offloaded_lay_out_shard(zero, unit);
    if (!zpp_wire_quantises_params(zero)) return ZPP_OK;
    const size_t bytes = zpp_wire_param_qcopy_bytes(zero, unit);
    if (bytes > wire->arrival_bytes) wire->arrival_bytes = bytes;
    return zpp_wire_add_qcopy(zero, unit, err);
}

static void locate_shard(zpp_zero *zero, struct zpp_unit *unit) {
    unit->shard = zpp_params_of_rank(zero, zero->rank) + unit->region_offset_bytes;
}

void zpp_offloaded_locate(zpp_zero *zero, struct zpp_unit *unit) {
    locate_shard(zero, unit);
    zpp_wrapped_locate(zero, unit);
}

static zpp_status copy_shards(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const size_t bytes = zpp_unit_shard_bytes(unit);
    const struct zpp_group *group = unit->group;
    zpp_status status = ZPP_OK;
    for (int at = 0; at < group->ranks && status == ZPP_OK; at++) {
        const unsigned char *shard = zpp_params_of_rank(zero, group->members[at]) + unit->region_offset_bytes;
        status = zpp_stream_copy(zero->gather, zpp_unit_shard_of_whole(unit, at), shard, bytes, err);
    }
    if (status == ZPP_OK && group->ranks > 1)
        zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER, bytes * (size_t)(group->ranks - 1));
    return status == ZPP_OK ? zpp_event_record(unit->ready, zero->gather, err) : status;
}

/* All on one stream: a copy comes after the kernel that read what was there. */
static zpp_status read_qcopies(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const size_t bytes = zpp_wire_param_qcopy_bytes(zero, unit);
    const struct zpp_group *group = unit->group;
    void *arrival = zero->wire.arrival;
    zpp_status status = ZPP_OK;
    for (int at = 0; at < group->ranks && status == ZPP_OK; at++) {
        status = zpp_stream_copy(zero->gather, arrival, zpp_wire_qcopy_of(zero, unit, group->members[at]), bytes, err);
        if (status == ZPP_OK)
            status = zpp_wire_device_read_qcopy(zero, unit, arrival, zpp_unit_shard_of_whole(unit, at), err);
    }
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER, bytes * (size_t)(group->ranks - 1));
    return status == ZPP_OK ? zpp_event_record(unit->ready, zero->gather, err) : status;
}

static zpp_status gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->quantised = zpp_wire_quantises_params(zero) && !unit->wants_exact;
    return unit->quantised ? read_qcopies(zero, unit, err) : copy_shards(zero, unit, err);
}

/* The memory is in use: the copies come after what was computed with it so far, and before what is computed next. */
static zpp_status copy_over(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = zpp_event_record(unit->allocated, zero->compute, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->gather, unit->allocated, wait, err);
    if (status == ZPP_OK) status = copy_shards(zero, unit, err);
    return status == ZPP_OK ? zpp_stream_wait(zero->compute, unit->ready, wait, err) : status;
}

static zpp_status make_exact(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return copy_over(zero, unit, NULL, err);
}

/* This rank's part of the whole unit, to its shard. */
zpp_status zpp_offloaded_keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct zpp_wait patience = {.timeout_ns = UINT64_C(600000000000), .tick = NULL, .ctx = NULL};
    zpp_status status =
        zpp_stream_copy(zero->compute, unit->shard, zpp_unit_shard_of_whole(unit, unit->group->rank),
                        zpp_unit_shard_bytes(unit), err);
    if (status == ZPP_OK) status = zpp_event_record(unit->allocated, zero->compute, err);
    if (status == ZPP_OK) status = zpp_event_sync(unit->allocated, &patience, err);
    if (status == ZPP_OK && zpp_wire_quantises_params(zero)) zpp_wire_clear_shard(unit);
    return status;
}

static zpp_status publish(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)err;
    if (zpp_wire_quantises_params(zero)) zpp_wire_make_qcopy(zero, unit);
    return ZPP_OK;
}

/* Gathers that nothing used may still read. */
static zpp_status settle(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    const zpp_status status = zpp_event_record(zero->settled, zero->gather, err);
    return status == ZPP_OK ? zpp_event_sync(zero->settled, wait, err) : status;
}

static zpp_status end_reads(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)zero;
    return zpp_event_sync(unit->ready, wait, err);
}

static zpp_status seal(zpp_zero *zero, size_t warm_bytes, struct zpp_err *err) {
    (void)warm_bytes;
    struct zpp_wire *wire = &zero->wire;
    zpp_status status = zpp_resident_make(zero, err);
    if (status == ZPP_OK && wire->arrival_bytes)
        status = zpp_device_alloc(zero->options.device, wire->arrival_bytes, &wire->arrival, err);
    return status == ZPP_OK ? zpp_wrapped_seal(zero, err) : status;
}

static void fini(zpp_zero *zero) {
    struct zpp_wire *wire = &zero->wire;
    if (wire->arrival) zpp_device_free(zero->options.device, wire->arrival, wire->arrival_bytes);
    wire->arrival = NULL;
    zpp_wrapped_fini(zero);
}

static void count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    if (zero->wire.arrival) out->gathered_bytes += zero->wire.arrival_bytes;
    zpp_wrapped_count_memory(zero, out);
}

const struct zpp_placement zpp_placement_offloaded = {
    .name = "offloaded",
    .moves = true,
    .open = zpp_wrapped_open,
    .seal = seal,
    .fini = fini,
    .count_memory = count_memory,
    .settle = settle,
    .lay_out = lay_out,
    .locate = zpp_offloaded_locate,
    .acquire = zpp_wrapped_acquire,
    .release = zpp_wrapped_release,
    .evict = zpp_wrapped_evict,
    .gather = gather,
    .end_reads = end_reads,
    .make_exact = make_exact,
    .keep_shard = zpp_offloaded_keep_shard,
    .publish = publish,
};

/* --- whole -------------------------------------------------------------------------------------------------------- */

zpp_status zpp_offloaded_lay_out_whole(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)err;
    zpp_resident_lay_out(zero, unit);
    zpp_offloaded_lay_out_shard(zero, unit);
    return ZPP_OK;
}

void zpp_offloaded_locate_whole(zpp_zero *zero, struct zpp_unit *unit) {
    locate_shard(zero, unit);
    zpp_resident_locate(zero, unit);
}

const struct zpp_placement zpp_placement_offloaded_whole = {
    .name = "offloaded_whole",
    .lay_out = zpp_offloaded_lay_out_whole,
    .locate = zpp_offloaded_locate_whole,
    .keep_shard = zpp_offloaded_keep_shard,
    .end_reads = end_reads,
    .collect = copy_over,
};
