/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters whose shards live on the device (on_device.h): in memory of GPUs that the ranks of a host map, or in
 * memory of the device alone with one rank. A gather is one copy for each rank's shard, by copy engines; whole units
 * lie in memory that wraps (base/wrap.h). Where parameters travel quantised, a shard's quantised copy lies on the
 * device, too, and a gather is one kernel for each rank's copy (wire_device.c). Replicated units are whole in the
 * shared memory, and each rank copies the shards of the others after a step.
 *
 * Shards of some units (unit->on_host) lie in page-locked memory of the host, which all ranks map. The device reads and
 * writes them there, so streams, counters and kernels are the same.
 *
 * Where NCCL moves the bytes (by_nccl.c) all of this is memory of the device alone, and an all-gather is in the place
 * of the copies; quantised copies come to a place of their own first.
 */
#include "../placement.h"

#include <stdlib.h>

#include "../internal.h"
#include "../on_device.h"

/* --- the coordinator's -------------------------------------------------------------------------------------------- */

/* What a stream waits for at each counter. */
static const char *const doing[ZPP_COUNTERS] = {"the gradients of a reduction", "the sum of a reduction",
                                                "the copies of a reduction",    "the values of a step",
                                                "the sums of a norm",           "the reads before a step"};

static zpp_status open_shards(zpp_zero *zero, struct zpp_err *err) {
    zero->on_device = calloc(1, sizeof *zero->on_device);
    if (!zero->on_device) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the record of shards on the device");
    const zpp_status status = zpp_wrapped_open(zero, err);
    return status == ZPP_OK ? zpp_on_device_join(zero, doing, err) : status;
}

static void fini(zpp_zero *zero) {
    struct zpp_on_device *on = zero->on_device;
    if (on) zpp_on_device_leave(zero); /* NCCL may still use all memory */
    zpp_wrapped_fini(zero);
    if (!on) return;
    zpp_device_region_destroy(on->params);
    zpp_device_region_destroy(on->grads);
    if (on->qcopies) zpp_device_free(zero->options.device, on->qcopies, on->qcopies_bytes);
    if (on->alone) zpp_device_free(zero->options.device, on->alone, on->params_bytes);
    free(on->pool);
    free(on);
    zero->on_device = NULL;
}

static size_t qcopy_stride(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_round_up(zpp_wire_param_qcopy_bytes(zero, unit), ZPP_BUCKET_ALIGN_BYTES);
}

/* NCCL: the streams of gathers use it for one unit after the other. */
static zpp_status make_qcopies(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    void *memory = NULL;
    size_t bytes = 0;
    if (!zpp_zero_by_nccl(zero) || !zpp_wire_quantises_params(zero)) return ZPP_OK;
    for (int i = 0; i < zero->moving_count; i++) {
        const size_t unit_bytes = qcopy_stride(zero, zero->moving[i]) * (size_t)zero->moving[i]->group->ranks;
        if (unit_bytes > bytes) bytes = unit_bytes;
    }
    const zpp_status status = bytes ? zpp_device_alloc(zero->options.device, bytes, &memory, err) : ZPP_OK;
    on->qcopies = memory;
    if (memory) on->qcopies_bytes = bytes;
    return status;
}

static zpp_status seal(zpp_zero *zero, size_t warm_bytes, struct zpp_err *err) {
    (void)warm_bytes;
    struct zpp_on_device *on = zero->on_device;
    zpp_status status = make_qcopies(zero, err);
    if (status != ZPP_OK) return status;
    if (on->params_bytes && (zero->ranks == 1 || zpp_zero_by_nccl(zero)))
        status = zpp_device_alloc(zero->options.device, on->params_bytes, &on->alone, err);
    else if (on->params_bytes)
        status = zpp_device_region_create(zero->options.comm, zero->options.device, on->params_bytes, &on->params, err);
    return status == ZPP_OK ? zpp_wrapped_seal(zero, err) : status;
}

static void count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    out->param_bytes += zero->on_device->params_bytes + zero->on_device->qcopies_bytes;
    zpp_wrapped_count_memory(zero, out);
}

/* Order the gather stream after the steps of all ranks so far. */
static zpp_status await_stepped(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    zpp_status status;
    if (on->gathers_after == on->steps || zero->ranks == 1) return ZPP_OK;
    if (zpp_zero_by_nccl(zero)) status = zpp_stream_wait(zero->gather, on->stepped, NULL, err);
    else status = zpp_counters_await(on->counters, zero->gather, ZPP_COUNTER_STEPPED, on->steps, err);
    if (status == ZPP_OK) on->gathers_after = on->steps;
    return status;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

/* A unit of one rank has nothing that travels. */
static bool quantises(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_wire_quantises_params(zero) && unit->group->ranks > 1;
}

static zpp_status lay_out_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    size_t *used_bytes = &zero->on_device->params_bytes;
    unit->region_offset_bytes =
        zpp_unit_next_offset(unit->on_host ? &zero->params_bytes : used_bytes, zpp_unit_shard_bytes(unit));
    if (!quantises(zero, unit)) return ZPP_OK;
    const size_t qcopy_bytes =
        zpp_zero_by_nccl(zero) ? qcopy_stride(zero, unit) : zpp_wire_param_qcopy_bytes(zero, unit);
    unit->qcopy_offset_bytes = zpp_unit_next_offset(used_bytes, qcopy_bytes);
    return zpp_wire_check_unit(unit, err);
}

static zpp_status lay_out_whole(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)err;
    unit->region_offset_bytes = zpp_unit_next_offset(&zero->on_device->params_bytes, zpp_unit_bytes(unit));
    return ZPP_OK;
}

static unsigned char *params_of(const zpp_zero *zero, int rank) {
    const struct zpp_on_device *on = zero->on_device;
    return on->params ? zpp_device_region_base(on->params, rank) : on->alone;
}

static unsigned char *part_of(const zpp_zero *zero, const struct zpp_unit *unit, int rank) {
    return (unit->on_host ? zpp_params_of_rank(zero, rank) : params_of(zero, rank)) + unit->region_offset_bytes;
}

static unsigned char *qcopy_of(const zpp_zero *zero, const struct zpp_unit *unit, int rank) {
    return params_of(zero, rank) + unit->qcopy_offset_bytes;
}

static void locate_shard(zpp_zero *zero, struct zpp_unit *unit) {
    unit->shard = part_of(zero, unit, zero->rank);
    zpp_wrapped_locate(zero, unit);
}

static void locate_whole(zpp_zero *zero, struct zpp_unit *unit) {
    unit->whole = part_of(zero, unit, zero->rank);
    unit->shard = zpp_unit_shard_of_whole(unit, unit->group->rank);
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

/* NCCL: this rank's gathers read its shards, and those of the peers do not. */
static zpp_status end_reads(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    (void)wait;
    if (!on->counters) return ZPP_OK;
    return zpp_counters_signal(on->counters, zero->gather, ZPP_COUNTER_READ, on->steps + 1, err);
}

static zpp_status begin_writes(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    if (zpp_zero_by_nccl(zero)) {
        const zpp_status status = zpp_event_record(zero->settled, zero->gather, err);
        return status == ZPP_OK ? zpp_stream_wait(zero->compute, zero->settled, NULL, err) : status;
    }
    if (!on->counters) return ZPP_OK;
    return zpp_counters_await(on->counters, zero->compute, ZPP_COUNTER_READ, on->steps + 1, err);
}

static zpp_status make_qcopy(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    if (!quantises(zero, unit)) return ZPP_OK;
    return zpp_wire_device_make_qcopy(zero, unit, qcopy_of(zero, unit, zero->rank), err);
}

static zpp_status end_writes(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    zpp_status status = ZPP_OK;
    for (int i = 0; i < zero->moving_count && status == ZPP_OK; i++) status = make_qcopy(zero, zero->moving[i], err);
    on->steps++;
    if (status != ZPP_OK || zero->ranks == 1) return status;
    if (zpp_zero_by_nccl(zero)) return zpp_event_record(on->stepped, zero->compute, err);
    return zpp_counters_signal(on->counters, zero->compute, ZPP_COUNTER_STEPPED, on->steps, err);
}

/* --- gathers ------------------------------------------------------------------------------------------------------ */

static zpp_status copy_by_engines(zpp_zero *zero, const struct zpp_unit *unit, bool from_whole, struct zpp_err *err) {
    const size_t bytes = zpp_unit_shard_bytes(unit);
    const struct zpp_group *group = unit->group;
    zpp_status status = ZPP_OK;
    for (int at = 0; at < group->ranks && status == ZPP_OK; at++) {
        const size_t offset = from_whole ? (size_t)at * bytes : 0;
        if (from_whole && at == group->rank) continue;
        status = zpp_stream_copy(zero->gather, zpp_unit_shard_of_whole(unit, at),
                                 part_of(zero, unit, group->members[at]) + offset, bytes, err);
    }
    return status;
}

/* Copy shards to the whole unit, from shard 0 of each part on or from the same shard of a whole unit there. */
static zpp_status copy_shards(zpp_zero *zero, const struct zpp_unit *unit, bool from_whole, struct zpp_err *err) {
    const size_t bytes = zpp_unit_shard_bytes(unit);
    const struct zpp_group *group = unit->group;
    zpp_status status = await_stepped(zero, err);
    if (status == ZPP_OK && group->nccl)
        status = zpp_by_nccl_all_gather(group, zero->gather, zpp_internode_object(zero, unit), unit->whole, unit->shard,
                                        bytes, err);
    else if (status == ZPP_OK) status = copy_by_engines(zero, unit, from_whole, err);
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER, bytes * (size_t)(group->ranks - 1));
    return status == ZPP_OK ? zpp_event_record(unit->ready, zero->gather, err) : status;
}

static zpp_status read_qcopies(zpp_zero *zero, const struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    const struct zpp_group *group = unit->group;
    const size_t stride = qcopy_stride(zero, unit);
    zpp_status status = await_stepped(zero, err);
    if (status == ZPP_OK && group->nccl)
        status = zpp_by_nccl_all_gather(group, zero->gather, zpp_internode_object(zero, unit), on->qcopies,
                                        qcopy_of(zero, unit, zero->rank), stride, err);
    for (int at = 0; at < group->ranks && status == ZPP_OK; at++) {
        const unsigned char *qcopy =
            group->nccl ? on->qcopies + (size_t)at * stride : qcopy_of(zero, unit, group->members[at]);
        status = zpp_wire_device_read_qcopy(zero, unit, qcopy, zpp_unit_shard_of_whole(unit, at), err);
    }
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER,
                   zpp_wire_param_qcopy_bytes(zero, unit) * (size_t)(group->ranks - 1));
    return status == ZPP_OK ? zpp_event_record(unit->ready, zero->gather, err) : status;
}

/* The memory is free on the gather stream: `acquire` ordered it after its last uses. */
static zpp_status gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->quantised = quantises(zero, unit) && !unit->wants_exact;
    return unit->quantised ? read_qcopies(zero, unit, err) : copy_shards(zero, unit, false, err);
}

/* The memory is in use: the copies come after what was computed with it so far, and before what is computed next. */
static zpp_status make_exact(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zpp_status status = zpp_event_record(unit->allocated, zero->compute, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->gather, unit->allocated, NULL, err);
    if (status == ZPP_OK) status = copy_shards(zero, unit, false, err);
    return status == ZPP_OK ? zpp_stream_wait(zero->compute, unit->ready, NULL, err) : status;
}

/* --- the shard ---------------------------------------------------------------------------------------------------- */

/* Outside of steps the host waits, so that a barrier of the hosts orders its peers' gathers after this. */
static zpp_status wait_for_compute(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct zpp_wait patience = {.timeout_ns = UINT64_C(600000000000), .tick = NULL, .ctx = NULL};
    const zpp_status status = zpp_event_record(unit->allocated, zero->compute, err);
    return status == ZPP_OK ? zpp_event_sync(unit->allocated, &patience, err) : status;
}

static zpp_status keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zpp_status status =
        zpp_stream_copy(zero->compute, unit->shard, zpp_unit_shard_of_whole(unit, unit->group->rank),
                        zpp_unit_shard_bytes(unit), err);
    if (status == ZPP_OK && quantises(zero, unit)) status = zpp_wire_device_clear_shard(zero, unit, err);
    return status == ZPP_OK ? wait_for_compute(zero, unit, err) : status;
}

static zpp_status publish_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const zpp_status status = make_qcopy(zero, unit, err);
    return status == ZPP_OK ? wait_for_compute(zero, unit, err) : status;
}

/* The gather stream waits for `stepped` of all ranks, and so of this one: its compute stream has read what it had. */
static zpp_status collect(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    const zpp_status status = copy_shards(zero, unit, true, err);
    return status == ZPP_OK ? zpp_stream_wait(zero->compute, unit->ready, wait, err) : status;
}

const struct zpp_placement zpp_placement_on_device = {
    .name = "on_device",
    .moves = true,
    .open = open_shards,
    .fini = fini,
    .seal = seal,
    .count_memory = count_memory,
    .settle = end_reads,
    .begin_writes = begin_writes,
    .end_writes = end_writes,
    .lay_out = lay_out_shard,
    .locate = locate_shard,
    .acquire = zpp_wrapped_acquire,
    .release = zpp_wrapped_release,
    .evict = zpp_wrapped_evict,
    .gather = gather,
    .make_exact = make_exact,
    .keep_shard = keep_shard,
    .publish = publish_shard,
};

const struct zpp_placement zpp_placement_on_device_whole = {
    .name = "on_device_whole",
    .lay_out = lay_out_whole,
    .locate = locate_whole,
    .publish = wait_for_compute,
    .collect = collect,
};
