/* SPDX-License-Identifier: Apache-2.0
 *
 * See secondary.h.
 */
#include "secondary.h"

#include <string.h>

#include "internode.h"
#include "internal.h"

static size_t part_bytes(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_unit_bytes(unit) / (size_t)zpp_comm_ranks(zero->near);
}

zpp_status zpp_zero_set_secondary(zpp_zero *zero, zpp_comm *near, struct zpp_err *err) {
    const int near_ranks = zpp_comm_ranks(near);
    if (zero->sealed) return zpp_fail(err, ZPP_STATE, "zero: a secondary shard after seal");
    if (zero->ranks != near_ranks * zpp_comm_hosts(zero->options.comm))
        return zpp_fail(err, ZPP_INVALID,
                        "zero: %d ranks on %d hosts, %d of them on this one; a secondary shard wants as many on each",
                        zero->ranks, zpp_comm_hosts(zero->options.comm), near_ranks);
    zero->near = near;
    return ZPP_OK;
}

zpp_status zpp_secondary_seal(zpp_zero *zero, struct zpp_err *err) {
    if (!zero->near) return ZPP_OK;
    size_t bytes = 0;
    for (int i = 0; i < zero->units_count; i++)
        if (zero->units[i]->place == ZPP_PLACE_SHARD) bytes += part_bytes(zero, zero->units[i]);
    if (!bytes) return ZPP_OK;
    void *memory = NULL;
    const zpp_status status = zpp_mem_alloc(bytes, ZPP_PAGE_BYTES, &memory, err);
    if (status != ZPP_OK) return status;
    zero->second = memory;
    zero->second_bytes = bytes;
    unsigned char *at = zero->second;
    for (int i = 0; i < zero->units_count; i++) {
        if (zero->units[i]->place != ZPP_PLACE_SHARD) continue;
        zero->units[i]->second = at;
        at += part_bytes(zero, zero->units[i]);
    }
    return ZPP_OK;
}

void zpp_secondary_free(zpp_zero *zero) {
    if (zero->second) zpp_mem_free(zero->second, zero->second_bytes);
    zero->second = NULL;
}

void zpp_secondary_keep(zpp_zero *zero, struct zpp_unit *unit) {
    if (!unit->second || unit->secondary_kept || unit->rounded != zpp_wire_rounds(zero)) return;
    const size_t bytes = part_bytes(zero, unit);
    memcpy(unit->second, unit->whole + (size_t)zpp_comm_rank(zero->near) * bytes, bytes);
    unit->secondary_kept = true;
}

zpp_status zpp_secondary_gather(zpp_zero *zero, struct zpp_unit *unit, zpp_work **work, struct zpp_err *err) {
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_GATHER,
                                  .dtype = unit->dtype,
                                  .dst = unit->whole,
                                  .src = unit->second,
                                  .elems = unit->elems / (size_t)zpp_comm_ranks(zero->near),
                                  .object = zpp_internode_object(zero, unit)};
    return zpp_comm_submit(zero->near, &call, NULL, NULL, work, err);
}

void zpp_secondary_forget(zpp_zero *zero) {
    for (int i = 0; i < zero->units_count; i++) zero->units[i]->secondary_kept = false;
}
