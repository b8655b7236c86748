/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards in memory of the host and whole units on an accelerator, with ranks on several hosts. Between hosts it is as
 * without accelerators: a gather is an all-gather of the communicator, in program order (internode.c). It ends in
 * page-locked memory of this rank, from where a copy engine takes the unit up:
 *
 *   shards of all ranks --all-gather--> staging --copy engine--> whole unit
 *
 *   offloaded_net         moves: gathered when it is needed, into memory that wraps (wrapped.c)
 *   offloaded_whole_net   stays whole; after a step, the new shards of all ranks
 *
 * There are two stagings, and gathers use them in turn. The communicator's thread waits for the last copy from a
 * staging before an all-gather fills it, and enqueues the copy up as soon as the all-gather is over, on the stream
 * `arrive`, which no other thread uses. So the backward thread waits for no accelerator. It waits for the network where
 * it needs a unit that has not come; the computation waits for the copy by an event.
 *
 * No rank reads the shards of another one. So a step waits for no copy, and unlike on one host there is nothing to do
 * before its votes.
 */
#include "../internal.h"
#include "../placement.h"

/* --- the coordinator's -------------------------------------------------------------------------------------------- */

static zpp_status open_streams(zpp_zero *zero, struct zpp_err *err) {
    const zpp_status status = zpp_wrapped_open(zero, err);
    if (status != ZPP_OK) return status;
    return zpp_stream_create_priority(zero->options.device, ZPP_STREAM_THREAD, ZPP_PRIORITY_HIGH, "up", &zero->arrive,
                                      err);
}

static zpp_status seal(zpp_zero *zero, size_t warm_bytes, struct zpp_err *err) {
    (void)warm_bytes;
    size_t largest_bytes = 0;
    for (int i = 0; i < zero->units_count; i++)
        if (zpp_unit_bytes(zero->units[i]) > largest_bytes) largest_bytes = zpp_unit_bytes(zero->units[i]);
    zpp_status status = zpp_resident_make(zero, err);
    if (status == ZPP_OK) status = zpp_wrapped_seal(zero, err);
    return status == ZPP_OK ? zpp_staging_make(zero, largest_bytes, err) : status;
}

static void fini(zpp_zero *zero) {
    zpp_staging_free(zero);
    zpp_wrapped_fini(zero);
}

static zpp_status lay_out(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zpp_offloaded_lay_out_shard(zero, unit);
    return zpp_wire_quantises_params(zero) ? zpp_wire_check_unit(unit, err) : ZPP_OK;
}

static void drop(zpp_zero *zero, struct zpp_unit *unit) {
    (void)zero;
    zpp_internode_drop(unit->group->comm, &unit->gather_work);
}

/* --- gathers ------------------------------------------------------------------------------------------------------ */

/* On the communicator's thread, before the all-gather. */
static zpp_status free_staging(void *arg, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_unit *unit = arg;
    return zpp_event_sync(unit->zero->staging.copied[unit->staging_at], wait, err);
}

/* There, after it. `allocated`: nothing uses the memory of the whole unit any more. */
static zpp_status copy_up(void *arg, struct zpp_err *err) {
    struct zpp_unit *unit = arg;
    struct zpp_staging *staging = &unit->zero->staging;
    zpp_stream *up = unit->zero->arrive;
    const int at = unit->staging_at;
    zpp_status status = zpp_stream_wait(up, unit->allocated, NULL, err);
    if (status == ZPP_OK) status = zpp_stream_copy(up, unit->whole, staging->memory[at], zpp_unit_bytes(unit), err);
    if (status == ZPP_OK) status = zpp_event_record(staging->copied[at], up, err);
    return status == ZPP_OK ? zpp_event_record(unit->ready, up, err) : status;
}

/* `after`: the stream that was launched what uses the memory so far. */
static zpp_status begin(zpp_zero *zero, struct zpp_unit *unit, zpp_stream *after, struct zpp_err *err) {
    struct zpp_staging *staging = &zero->staging;
    const zpp_status status = zpp_event_record(unit->allocated, after, err);
    if (status != ZPP_OK) return status;
    unit->staging_at = staging->next;
    staging->next = (staging->next + 1) % ZPP_STAGINGS;
    const struct zpp_internode_sides sides = {free_staging, copy_up, staging->memory[unit->staging_at]};
    return zpp_internode_gather(zero, unit, &sides, err);
}

static zpp_status gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->quantised = zpp_wire_quantises_params(zero) && !unit->wants_exact;
    return begin(zero, unit, zero->gather, err);
}

/* The caller waits for the network; the computation waits for the copy. */
static zpp_status wait_gather(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                              struct zpp_err *err) {
    const zpp_status status = zpp_internode_await(&unit->gather_work, wait, err);
    return status == ZPP_OK ? zpp_stream_wait(zero->compute, unit->ready, wait, err) : status;
}

/* The memory is in use: the copy comes after what was computed with it so far, and before what is computed next. */
static zpp_status copy_over(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    const zpp_status status = begin(zero, unit, zero->compute, err);
    return status == ZPP_OK ? wait_gather(zero, unit, wait, err) : status;
}

static zpp_status make_exact(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct zpp_wait patience = {0, NULL, NULL}; /* peers that do not come end the group */
    return copy_over(zero, unit, &patience, err);
}

const struct zpp_placement zpp_placement_offloaded_net = {
    .name = "offloaded_net",
    .moves = true,
    .open = open_streams,
    .seal = seal,
    .fini = fini,
    .count_memory = zpp_wrapped_count_memory,
    .lay_out = lay_out,
    .locate = zpp_offloaded_locate,
    .drop = drop,
    .acquire = zpp_wrapped_acquire,
    .release = zpp_wrapped_release,
    .evict = zpp_wrapped_evict,
    .gather = gather,
    .wait = wait_gather,
    .make_exact = make_exact,
    .keep_shard = zpp_offloaded_keep_shard,
};

const struct zpp_placement zpp_placement_offloaded_whole_net = {
    .name = "offloaded_whole_net",
    .lay_out = zpp_offloaded_lay_out_whole,
    .locate = zpp_offloaded_locate_whole,
    .drop = drop,
    .keep_shard = zpp_offloaded_keep_shard,
    .collect = copy_over,
};
