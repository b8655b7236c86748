/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters in a file, and whole units on an accelerator. The ranks of a host share the file and what is read from it
 * (unit_file.h), and each copies the unit up:
 *
 *   file --read--> mapping of all ranks --memcpy--> page-locked staging of this rank --copy engine--> whole unit
 *
 * A read begins at once. The queue `arrive`, which is the host's, stages the unit when it has come, and enqueues its
 * copy on the stream `gather`, so the backward thread waits for the disk only where it needs the unit. The memory of
 * the mapping goes again as soon as the unit is staged. Staging is page-locked, because a copy engine reads it; the
 * mapping is not, because its pages come and go. What a forward keeps for its backward stays on the accelerator, and is
 * not read again.
 *
 *   unit->staged      on `arrive`: the unit is staged, and its copy enqueued
 *   unit->allocated   on `gather`: the unit is whole
 *
 * The step runs on the host, through windows of the mapping, as it does without an accelerator. A step inside the
 * backward opens the unit in the mapping, beside what is whole on the accelerator: it reads the unit once more, and the
 * next forward reads the new values.
 */
#include <string.h>

#include "../../base/mem.h"
#include "../internal.h"
#include "../placement.h"

static const struct zpp_wait patience = {.timeout_ns = UINT64_C(600000000000), .tick = NULL, .ctx = NULL};

static bool is_held(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_unit_file_is_held(zero->unit_file, unit->file_index);
}

/* --- the coordinator's -------------------------------------------------------------------------------------------- */

static zpp_status open_streams(zpp_zero *zero, struct zpp_err *err) {
    zpp_device *device = zero->options.device;
    const zpp_status status = zpp_stream_create_priority(device, ZPP_STREAM_THREAD, ZPP_PRIORITY_HIGH, "gather",
                                                         &zero->gather, err);
    if (status != ZPP_OK) return status;
    return zpp_stream_create(zpp_zero_host(zero), ZPP_STREAM_QUEUE, "arrive", &zero->arrive, err);
}

static size_t largest_bytes(const zpp_zero *zero) {
    size_t bytes = 0;
    for (int i = 0; i < zero->moving_count; i++)
        if (zpp_unit_bytes(zero->moving[i]) > bytes) bytes = zpp_unit_bytes(zero->moving[i]);
    return bytes;
}

static zpp_status seal(zpp_zero *zero, size_t warm_bytes, struct zpp_err *err) {
    (void)warm_bytes;
    zpp_status status = zpp_unit_file_seal(zero->unit_file, 0, err);
    if (status == ZPP_OK) status = zpp_resident_make(zero, err);
    if (status == ZPP_OK) status = zpp_wrapped_seal(zero, err);
    return status == ZPP_OK ? zpp_staging_make(zero, largest_bytes(zero), err) : status;
}

static void fini(zpp_zero *zero) {
    zpp_staging_free(zero);
    zpp_wrapped_fini(zero);
}

static void count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    zpp_file_count_memory(zero, out);
    zpp_wrapped_count_memory(zero, out);
}

/* Units that stay whole: their copies of shards after the last step may still be on their way. */
static zpp_status settle(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    const zpp_status status = zpp_event_record(zero->settled, zero->gather, err);
    return status == ZPP_OK ? zpp_event_sync(zero->settled, wait, err) : status;
}

static zpp_status lay_out_staged(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const zpp_status status = zpp_event_create(zpp_zero_host(zero), &unit->staged, err);
    return status == ZPP_OK ? zpp_file_lay_out_whole(zero, unit, err) : status;
}

static void locate(zpp_zero *zero, struct zpp_unit *unit) {
    unit->shard = zpp_unit_file_mapping(zero->unit_file) + unit->shard_offset_bytes;
    zpp_wrapped_locate(zero, unit);
}

/* --- gathers ------------------------------------------------------------------------------------------------------ */

struct stage_args {
    zpp_zero *zero;
    struct zpp_unit *unit;
};

static zpp_status copy_up(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_staging *staging = &zero->staging;
    const int at = staging->next;
    staging->next = (at + 1) % ZPP_STAGINGS;
    memcpy(staging->memory[at], zpp_unit_file_mapping(zero->unit_file) + unit->file_offset_bytes, zpp_unit_bytes(unit));
    zpp_status status = zpp_stream_copy(zero->gather, unit->whole, staging->memory[at], zpp_unit_bytes(unit), err);
    if (status == ZPP_OK) status = zpp_event_record(staging->copied[at], zero->gather, err);
    return status == ZPP_OK ? zpp_event_record(unit->allocated, zero->gather, err) : status;
}

/* The read is over, and so is the last copy from the staging: the unit goes up. Where the read failed, `complete` says
 * so. */
static zpp_status stage(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    const struct stage_args *args = arg;
    zpp_zero *zero = args->zero;
    const bool held = is_held(zero, args->unit);
    zpp_status status = held ? ZPP_OK : zpp_unit_file_read_wait(zero->unit_file, args->unit->file_index, wait);
    if (status == ZPP_OK) status = zpp_event_sync(zero->staging.copied[zero->staging.next], wait, err);
    if (status == ZPP_OK) status = copy_up(zero, args->unit, err);
    if (status != ZPP_OK || held) return status;
    return zpp_unit_file_release(zero->unit_file, args->unit->file_index, err);
}

static zpp_status read_begin(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    if (is_held(zero, unit)) return ZPP_OK;
    const zpp_status status = zpp_unit_file_acquire(zero->unit_file, unit->file_index, err);
    if (status == ZPP_OK) zpp_unit_file_read_begin(zero->unit_file, unit->file_index);
    return status;
}

static zpp_status gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct stage_args args = {zero, unit};
    zpp_status status = read_begin(zero, unit, err);
    if (status == ZPP_OK) status = zpp_stream_launch(zero->arrive, stage, &args, sizeof args, err);
    return status == ZPP_OK ? zpp_event_record(unit->staged, zero->arrive, err) : status;
}

/* The caller drives the queue until the copy is enqueued; the computation waits for the copy. */
static zpp_status wait_gather(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                              struct zpp_err *err) {
    const zpp_status status = zpp_event_sync(unit->staged, wait, err);
    return status == ZPP_OK ? zpp_stream_wait(zero->compute, unit->allocated, wait, err) : status;
}

static zpp_status complete(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return zpp_file_read_status(zero, unit, err);
}

/* --- the shard ---------------------------------------------------------------------------------------------------- */

/* A part of the whole unit, to the first staging. The computation comes after every copy up that was enqueued, because
 * what was gathered, or read ahead, was waited for before shards are written. So nothing is read from there any more.
 */
static zpp_status copy_down(zpp_zero *zero, struct zpp_unit *unit, const void *from, size_t bytes,
                            struct zpp_err *err) {
    zpp_status status = zpp_stream_copy(zero->compute, zero->staging.memory[0], from, bytes, err);
    if (status == ZPP_OK) status = zpp_event_record(unit->allocated, zero->compute, err);
    return status == ZPP_OK ? zpp_event_sync(unit->allocated, &patience, err) : status;
}

/* The unit is kept in fewer bits: one rank of those that hold its values brings them to the mapping, and they are
 * rounded from there. No other rank has it in memory of the mapping. */
static zpp_status keep_rounded(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const bool held = is_held(zero, unit);
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (unit->group->parts > 1 ? unit->group->rank : zero->rank) return ZPP_OK;
    zpp_status status = held ? ZPP_OK : zpp_unit_file_acquire(zero->unit_file, unit->file_index, err);
    if (status != ZPP_OK) return status;
    status = copy_down(zero, unit, unit->whole, zpp_unit_bytes(unit), err);
    if (status == ZPP_OK)
        memcpy(zpp_unit_file_mapping(zero->unit_file) + unit->file_offset_bytes, zero->staging.memory[0],
               zpp_unit_bytes(unit));
    if (status == ZPP_OK) status = zpp_file_keep_qcopy(zero, unit, err);
    if (held) return status;
    const zpp_status given = zpp_unit_file_release(zero->unit_file, unit->file_index, status ? &ignored : err);
    return status == ZPP_OK ? given : status;
}

/* This rank's part of the whole unit, through a staging to the file. */
static zpp_status keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const size_t bytes = zpp_unit_shard_bytes(unit);
    if (zpp_unit_file_keeps_qcopies(zero->unit_file)) return keep_rounded(zero, unit, err);
    const zpp_status status = copy_down(zero, unit, zpp_unit_shard_of_whole(unit, unit->group->rank), bytes, err);
    if (status != ZPP_OK) return status;
    return zpp_unit_file_copy(zero->unit_file, unit->shard_offset_bytes, zero->staging.memory[0], bytes, true,
                              &zero->fault, err);
}

static zpp_status open_shard(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = unit->state == ZPP_UNIT_GATHERING ? zpp_unit_gather_end(zero, unit, wait, err) : ZPP_OK;
    if (status == ZPP_OK) status = read_begin(zero, unit, err);
    if (status != ZPP_OK || is_held(zero, unit)) return status;
    (void)zpp_unit_file_read_wait(zero->unit_file, unit->file_index, &patience);
    status = complete(zero, unit, err);
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (status != ZPP_OK) (void)zpp_unit_file_release(zero->unit_file, unit->file_index, &ignored);
    return status;
}

static zpp_status close_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return is_held(zero, unit) ? ZPP_OK : zpp_unit_file_release(zero->unit_file, unit->file_index, err);
}

const struct zpp_placement zpp_placement_nvme_up = {
    .name = "nvme_up",
    .moves = true,
    .in_file = true,
    .keeps = true,
    .open = open_streams,
    .seal = seal,
    .fini = fini,
    .reads = zpp_file_reads,
    .count_memory = count_memory,
    .settle = settle,
    .lay_out = lay_out_staged,
    .locate = locate,
    .acquire = zpp_wrapped_acquire,
    .release = zpp_wrapped_release,
    .evict = zpp_wrapped_evict,
    .gather = gather,
    .wait = wait_gather,
    .complete = complete,
    .keep_shard = keep_shard,
    .open_shard = open_shard,
    .write_begin = zpp_file_write_begin,
    .write_wait = zpp_file_write_wait,
    .close_shard = close_shard,
};
