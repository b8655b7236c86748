/* SPDX-License-Identifier: Apache-2.0
 *
 * The ranks of a host share a file (unit_file.h), and read a unit from it when it is needed. A gather is two
 * operations: one begins the read, the other sees it end, on a stream of its own, so that the reads of several units
 * are under way at once. What fails there is no stream's end: the unit is released, and the caller that needed it gets
 * the error.
 *
 * Units before the file's cut are in memory for good, and have a table of their own.
 */
#include "../placement.h"

#include "../internal.h"

static const struct zpp_placement held_in_memory;

/* --- shared with nvme_net.c --------------------------------------------------------------------------------------- */

static zpp_status add_spans(zpp_zero *zero, const struct zpp_unit *unit, int index, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (size_t i = 0; unit->quantised_params && i < unit->params && status == ZPP_OK; i++)
        if (unit->quantised_params[i])
            status = zpp_unit_file_add_span(zero->unit_file, index, unit->offset_elems[i] * unit->elem_bytes,
                                            unit->param_elems[i], unit->dtype, err);
    return status;
}

/* A place for `elems` elements of the unit, this rank's or those that other ranks have under its name. */
static zpp_status add_to_file(zpp_zero *zero, const struct zpp_unit *unit, size_t elems, int *index,
                              size_t *offset_bytes, struct zpp_err *err) {
    zpp_status status = zpp_unit_file_add(zero->unit_file, elems * unit->elem_bytes, index, offset_bytes, err);
    if (status == ZPP_OK && zero->delays_steps && unit->trainable)
        status = zpp_unit_file_double_buffer(zero->unit_file, *index, err);
    return status == ZPP_OK ? add_spans(zero, unit, *index, err) : status;
}

zpp_status zpp_file_lay_out(zpp_zero *zero, struct zpp_unit *unit, size_t first_elem, size_t elems,
                            struct zpp_err *err) {
    const zpp_status status = add_to_file(zero, unit, elems, &unit->file_index, &unit->file_offset_bytes, err);
    if (status != ZPP_OK) return status;
    unit->file = zero->unit_file;
    unit->file_first_elem = first_elem;
    unit->file_elems = elems;
    unit->shard_offset_bytes =
        unit->file_offset_bytes + ((size_t)unit->group->rank * unit->shard_elems - first_elem) * unit->elem_bytes;
    return ZPP_OK;
}

zpp_status zpp_file_write_begin(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return zpp_unit_file_write_begin(zero->unit_file, unit->file_index, unit->shard_offset_bytes,
                                     zpp_unit_shard_bytes(unit), &zero->fault, err);
}

zpp_status zpp_file_write_wait(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return zpp_unit_file_write_wait(zero->unit_file, unit->file_index, &zero->fault, err);
}

zpp_status zpp_file_keep_qcopy(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    if (!zpp_unit_file_keeps_qcopies(zero->unit_file)) return ZPP_OK;
    if (unit->group->parts > 1 && unit->group->rank > 0) return ZPP_OK;
    return zpp_unit_file_keep_qcopy(zero->unit_file, unit->file_index, unit->group->parts > 1, &zero->fault, err);
}

bool zpp_file_reads(const zpp_zero *zero) {
    return !zpp_unit_file_is_idle(zero->unit_file);
}

/* --- the coordinator's -------------------------------------------------------------------------------------------- */

/* The engine's thread reads; ours begins a read and sees it end. */
static zpp_status open_streams(zpp_zero *zero, struct zpp_err *err) {
    zpp_device *device = zero->options.device;
    const zpp_status status = zpp_stream_create(device, ZPP_STREAM_QUEUE, "arrive", &zero->arrive, err);
    return status == ZPP_OK ? zpp_stream_create(device, ZPP_STREAM_QUEUE, "gather", &zero->gather, err) : status;
}

static zpp_status seal(zpp_zero *zero, size_t warm_bytes, struct zpp_err *err) {
    const zpp_status status = zpp_unit_file_seal(zero->unit_file, warm_bytes, err);
    if (status == ZPP_OK) zero->moving_base = zpp_unit_file_mapping(zero->unit_file);
    return status;
}

/* The ranks share what they read from the file, as long as they are at the same unit. */
void zpp_file_count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    struct zpp_unit_file_figures seen;
    const size_t sharers = (size_t)(zero->options.copy ? zpp_comm_ranks(zero->options.copy) : zero->ranks);
    size_t readers = sharers; /* of one unit, at least: a bound where groups differ */
    for (int g = 1; g < zero->groups_count; g++)
        if ((size_t)zero->groups[g]->ranks < readers) readers = (size_t)zero->groups[g]->ranks;
    zpp_unit_file_figures(zero->unit_file, &seen);
    out->param_bytes += seen.resident_bytes / sharers;
    out->gathered_bytes += seen.memory_bytes / readers;
    out->gathered_peak_bytes += seen.acquired_peak_bytes / readers;
    out->on_disk_bytes += (seen.mapping_bytes - seen.resident_bytes) / sharers;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

/* The file has each part of the unit, one after the other. */
zpp_status zpp_file_lay_out_whole(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (int part = 0; part < unit->group->parts && status == ZPP_OK; part++) {
        int index;
        size_t offset_bytes;
        status = part == unit->group->part ? zpp_file_lay_out(zero, unit, 0, unit->elems, err)
                                           : add_to_file(zero, unit, unit->elems, &index, &offset_bytes, err);
    }
    unit->range_offset_bytes = unit->file_offset_bytes;
    return status;
}

static void locate(zpp_zero *zero, struct zpp_unit *unit) {
    unit->whole = zero->moving_base + unit->range_offset_bytes;
    unit->shard = zpp_unit_shard_of_whole(unit, unit->group->rank);
    if (zpp_unit_file_is_held(zero->unit_file, unit->file_index)) unit->placement = &held_in_memory;
}

/* --- gathers ------------------------------------------------------------------------------------------------------ */

static zpp_status acquire(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return zpp_unit_file_acquire(zero->unit_file, unit->file_index, err);
}

static zpp_status release(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->mapped = false;
    return zpp_unit_file_release(zero->unit_file, unit->file_index, err);
}

struct load_args {
    zpp_unit_file *unit_file;
    int unit;
};

static zpp_status begin_load(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct load_args *args = arg;
    zpp_unit_file_read_begin(args->unit_file, args->unit);
    return ZPP_OK;
}

static zpp_status end_load(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)err;
    const struct load_args *args = arg;
    return zpp_unit_file_read_wait(args->unit_file, args->unit, wait);
}

static zpp_status gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct load_args args = { zero->unit_file, unit->file_index };
    zpp_status status = zpp_event_record(unit->allocated, zero->compute, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->gather, unit->allocated, NULL, err);
    if (status == ZPP_OK) status = zpp_stream_launch(zero->gather, begin_load, &args, sizeof args, err);
    if (status == ZPP_OK) status = zpp_event_record(unit->ready, zero->gather, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->arrive, unit->ready, NULL, err);
    if (status == ZPP_OK) status = zpp_stream_launch(zero->arrive, end_load, &args, sizeof args, err);
    if (status == ZPP_OK) status = zpp_event_record(unit->ready, zero->arrive, err);
    return status;
}

zpp_status zpp_file_read_status(zpp_zero *zero, const struct zpp_unit *unit, struct zpp_err *err) {
    char words[256];
    const zpp_status status = zpp_unit_file_read_status(zero->unit_file, unit->file_index, &zero->fault, err);
    if (status != ZPP_TIER) return status;
    const size_t at_bytes = unit->file_first_elem * unit->elem_bytes +
                            zpp_unit_file_value_at(zero->unit_file, unit->file_index, zero->fault.into_bytes);
    if (!zpp_unit_words_at(unit, at_bytes, words, sizeof words)) return status;
    const struct zpp_err said = *err;
    zpp_fail(err, ZPP_TIER, "%s: %s", words, said.text);
    err->os_errno = said.os_errno;
    return status;
}

static zpp_status complete(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return zpp_file_read_status(zero, unit, err);
}

/* --- the shard ---------------------------------------------------------------------------------------------------- */

static zpp_status keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    if (zpp_unit_file_keeps_qcopies(zero->unit_file)) return zpp_file_keep_qcopy(zero, unit, err);
    return zpp_unit_file_write_back(zero->unit_file, unit->shard_offset_bytes, zpp_unit_shard_bytes(unit),
                                    &zero->fault, err);
}

/* The shard is a part of the whole unit. */
static zpp_status open_shard(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (unit->state == ZPP_UNIT_SHARDED) status = zpp_unit_gather_begin(zero, unit, err);
    if (status == ZPP_OK && unit->state == ZPP_UNIT_GATHERING) status = zpp_unit_gather_end(zero, unit, wait, err);
    return status;
}

const struct zpp_placement zpp_placement_nvme = {
    .name = "nvme", .moves = true, .in_file = true, .keeps = true, .steps_whole = true,
    .open = open_streams, .seal = seal, .reads = zpp_file_reads, .count_memory = zpp_file_count_memory,
    .lay_out = zpp_file_lay_out_whole, .locate = locate,
    .acquire = acquire, .release = release,
    .gather = gather, .complete = complete,
    .keep_shard = keep_shard,
    .open_shard = open_shard, .write_begin = zpp_file_write_begin, .write_wait = zpp_file_write_wait,
};

static const struct zpp_placement held_in_memory = {
    .name = "nvme, held in memory", .in_file = true,
    .lay_out = zpp_file_lay_out_whole, .locate = locate,
    .keep_shard = zpp_file_keep_qcopy, /* it quantises */
    .write_begin = zpp_file_write_begin, .write_wait = zpp_file_write_wait,
};
