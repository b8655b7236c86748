/* SPDX-License-Identifier: Apache-2.0
 *
 * See rank_file.h. Threads: the request of a shard belongs to the communicator's thread from the submission of the
 * gather to its end.
 */
#include "rank_file.h"

#include <string.h>

#include "internode.h"
#include "internal.h"

bool zpp_rank_file(const zpp_zero *zero) {
    return zero->unit_file && zpp_internode(zero->options.comm) && !zero->options.copy;
}

static bool is_held(const struct zpp_unit *unit) {
    return zpp_unit_file_is_held(unit->rank_file, unit->file_index);
}

zpp_status zpp_rank_file_begin(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)zero;
    if (is_held(unit)) return ZPP_OK;
    const zpp_status status = zpp_unit_file_acquire(unit->rank_file, unit->file_index, err);
    if (status == ZPP_OK) zpp_unit_file_read_begin(unit->rank_file, unit->file_index);
    return status;
}

void zpp_rank_file_await(void *arg) {
    /* No time-out and no tick: the kernel ends every request on a file. */
    const struct zpp_wait patience = { 0, NULL, NULL };
    struct zpp_err ignored = ZPP_ERR_INIT;
    struct zpp_unit *unit = arg;
    if (is_held(unit)) return;
    (void)zpp_unit_file_read_wait(unit->rank_file, unit->file_index, &patience);
    if (zpp_unit_file_read_status(unit->rank_file, unit->file_index, NULL, &ignored) != ZPP_OK)
        memset(unit->shard, 0xff, zpp_unit_shard_bytes(unit));
}

zpp_status zpp_rank_file_end(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)zero;
    return is_held(unit) ? ZPP_OK : zpp_unit_file_release(unit->rank_file, unit->file_index, err);
}

zpp_status zpp_rank_file_open(zpp_zero *zero, struct zpp_unit *unit, bool full, struct zpp_err *err) {
    const size_t bytes = zpp_unit_shard_bytes(unit);
    if (is_held(unit)) return ZPP_OK;
    zpp_status status = zpp_unit_file_acquire(unit->rank_file, unit->file_index, err);
    if (status != ZPP_OK) return status;
    if (full) {
        memcpy(unit->shard, unit->whole + (size_t)zero->rank * bytes, bytes);
        return ZPP_OK;
    }
    zpp_unit_file_read_begin(unit->rank_file, unit->file_index);
    zpp_rank_file_await(unit);
    status = zpp_unit_file_read_status(unit->rank_file, unit->file_index, &zero->fault, err);
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (status != ZPP_OK) (void)zpp_unit_file_release(unit->rank_file, unit->file_index, &ignored);
    return status;
}

zpp_status zpp_rank_file_keep(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const size_t bytes = zpp_unit_shard_bytes(unit);
    unsigned char *shard = unit->whole + (size_t)zero->rank * bytes;
    return zpp_unit_file_copy(unit->rank_file, unit->file_offset_bytes, shard, bytes, true, &zero->fault, err);
}
