/* SPDX-License-Identifier: Apache-2.0
 *
 * The ranks of a host share one copy in shared memory. All shards together are the whole unit, so that nothing is ever
 * gathered: each rank writes its shard between two barriers.
 */
#include "../placement.h"

#include "../internal.h"

static zpp_status lay_out(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)err;
    for (int part = 0; part < unit->group->parts; part++) { /* the host has one copy of each part */
        const size_t at = zpp_unit_next_offset(&zero->host_bytes, zpp_unit_bytes(unit));
        if (part == unit->group->part) unit->region_offset_bytes = at;
    }
    return ZPP_OK;
}

static void locate(zpp_zero *zero, struct zpp_unit *unit) {
    unit->whole = (unsigned char *)zpp_region_base(zero->host, zero->rank) + unit->region_offset_bytes;
    unit->shard = zpp_unit_shard_of_whole(unit, unit->group->rank);
}

const struct zpp_placement zpp_placement_host_shared = {
    .name = "host_shared", .lay_out = lay_out, .locate = locate,
};
