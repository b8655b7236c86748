/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters in a file over several hosts: the ranks of a host have no file in common, because gathers are collectives
 * of all ranks (internode.c). Each rank has a file of its own with its shards, one mapping for them (unit_file.h), and
 * a range of addresses in which units are whole, as sharded units have:
 *
 *   gather  the shard's memory is opened and its read begins; the all-gather goes into the queue at once, at its place
 *           in program order, and begins when the shard has come; then the shard's memory goes again
 *   step    through windows of the shards' mapping, as on one host
 *
 * So a rank reads 1/N of what is gathered, and H hosts read from H disks side by side (bandwidth-centric partitioning,
 * ZeRO-Infinity, section 6.1). A read that fails sends NaN, so that the peers, which do not see the failure, compute
 * nothing that looks right, and is this rank's error.
 *
 * Threads: the request of a shard belongs to the communicator's thread from the submission of the gather to its end.
 */
#include "../placement.h"

#include <string.h>

#include "../internal.h"

static bool is_held(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_unit_file_is_held(zero->unit_file, unit->file_index);
}

/* --- the shard's memory ------------------------------------------------------------------------------------------- */

/* Acquire it, and begin to read. */
static zpp_status read_begin(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    if (is_held(zero, unit)) return ZPP_OK;
    const zpp_status status = zpp_unit_file_acquire(zero->unit_file, unit->file_index, err);
    if (status == ZPP_OK) zpp_unit_file_read_begin(zero->unit_file, unit->file_index);
    return status;
}

/* On the communicator's thread, before the gather: the shard is there, or NaN. */
static void read_wait(struct zpp_unit *unit) {
    /* No timeout and no tick: the kernel ends every request on a file. */
    const struct zpp_wait patience = { 0, NULL, NULL };
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (zpp_unit_file_is_held(unit->file, unit->file_index)) return;
    (void)zpp_unit_file_read_wait(unit->file, unit->file_index, &patience);
    if (zpp_unit_file_read_status(unit->file, unit->file_index, NULL, &ignored) != ZPP_OK)
        memset(unit->shard, 0xff, zpp_unit_shard_bytes(unit));
}

static zpp_status before_gather(void *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    read_wait(unit);
    return ZPP_OK;
}

/* After the gather, or if it never began. */
static zpp_status close_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return is_held(zero, unit) ? ZPP_OK : zpp_unit_file_release(zero->unit_file, unit->file_index, err);
}

/* --- the coordinator's -------------------------------------------------------------------------------------------- */

static zpp_status seal(zpp_zero *zero, size_t warm_bytes, struct zpp_err *err) {
    return zpp_unit_file_seal(zero->unit_file, warm_bytes / (size_t)zero->ranks, err);
}

static void count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    struct zpp_unit_file_figures seen;
    zpp_unit_file_figures(zero->unit_file, &seen);
    out->param_bytes += seen.resident_bytes;
    out->gathered_bytes += zpp_range_memory_bytes(zero) + seen.memory_bytes;
    out->gathered_peak_bytes += zero->full_peak_bytes + seen.acquired_peak_bytes;
    out->on_disk_bytes += seen.mapping_bytes - seen.resident_bytes;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static zpp_status lay_out(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zpp_range_lay_out(zero, unit);
    return zpp_file_lay_out(zero, unit, (size_t)zero->rank * unit->shard_elems, unit->shard_elems, err);
}

static void locate(zpp_zero *zero, struct zpp_unit *unit) {
    if (zero->range) unit->whole = (unsigned char *)zpp_range_base(zero->range) + unit->range_offset_bytes;
    unit->shard = zpp_unit_file_mapping(zero->unit_file) + unit->file_offset_bytes;
}

static void drop(zpp_zero *zero, struct zpp_unit *unit) {
    zpp_internode_drop(zero->options.comm, &unit->gather_work);
}

/* --- gathers ------------------------------------------------------------------------------------------------------ */

static zpp_status gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct zpp_internode_sides sides = {.before = before_gather};
    struct zpp_err ignored = ZPP_ERR_INIT;
    zpp_status status = read_begin(zero, unit, err);
    if (status != ZPP_OK) return status;
    status = zpp_internode_gather(zero, unit, &sides, err);
    if (status == ZPP_OK) return ZPP_OK;
    read_wait(unit);
    (void)close_shard(zero, unit, &ignored);
    return status;
}

static zpp_status complete(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_err second = ZPP_ERR_INIT;
    const zpp_status status = zpp_file_read_status(zero, unit, err);
    const zpp_status closed = close_shard(zero, unit, status == ZPP_OK ? err : &second);
    return status == ZPP_OK ? closed : status;
}

/* --- the shard ---------------------------------------------------------------------------------------------------- */

static zpp_status keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    if (zpp_unit_file_keeps_qcopies(zero->unit_file)) return zpp_file_keep_qcopy(zero, unit, err);
    return zpp_unit_file_copy(zero->unit_file, unit->file_offset_bytes, zpp_unit_shard_of_whole(unit, zero->rank),
                              zpp_unit_shard_bytes(unit), true, &zero->fault, err);
}

static zpp_status read_now(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    zpp_unit_file_read_begin(zero->unit_file, unit->file_index);
    read_wait(unit);
    const zpp_status status = zpp_file_read_status(zero, unit, err);
    if (status != ZPP_OK) (void)zpp_unit_file_release(zero->unit_file, unit->file_index, &ignored);
    return status;
}

/* Filled from the whole unit where that is gathered, else from the file. No gather from here: it is a collective, and
 * ranks come here at times of their own. */
static zpp_status open_shard(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = unit->state == ZPP_UNIT_GATHERING ? zpp_unit_gather_end(zero, unit, wait, err) : ZPP_OK;
    if (status != ZPP_OK || is_held(zero, unit)) return status;
    status = zpp_unit_file_acquire(zero->unit_file, unit->file_index, err);
    if (status != ZPP_OK) return status;
    return zpp_unit_is_gathered(unit) ? zpp_range_keep_shard(zero, unit, err) : read_now(zero, unit, err);
}

const struct zpp_placement zpp_placement_nvme_net = {
    .name = "nvme_net", .moves = true, .in_file = true,
    .seal = seal, .reads = zpp_file_reads, .count_memory = count_memory,
    .lay_out = lay_out, .locate = locate, .drop = drop,
    .acquire = zpp_range_acquire, .release = zpp_range_release,
    .gather = gather, .wait = zpp_internode_gather_wait, .complete = complete,
    .keep_shard = keep_shard,
    .open_shard = open_shard, .write_begin = zpp_file_write_begin, .write_wait = zpp_file_write_wait,
    .close_shard = close_shard,
};
