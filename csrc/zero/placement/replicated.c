/* SPDX-License-Identifier: Apache-2.0
 *
 * Every rank holds all of the unit. At stages 1 and 2 a rank steps its shard alone, and takes those of the others when
 * all have written: from their memory on one host, by an all-gather over several.
 */
#include "../placement.h"

#include <string.h>

#include "../internal.h"

static zpp_status lay_out(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)err;
    unit->region_offset_bytes = zpp_unit_next_offset(&zero->params_bytes, zpp_unit_bytes(unit));
    return ZPP_OK;
}

static void locate(zpp_zero *zero, struct zpp_unit *unit) {
    unsigned char *base = zero->params ? zpp_region_base(zero->params, zero->rank) : zero->alone;
    unit->whole = base + unit->region_offset_bytes;
    unit->shard = zpp_unit_shard_of_whole(unit, unit->group->rank);
}

static zpp_status collect(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    const size_t bytes = zpp_unit_shard_bytes(unit);
    if (zpp_internode(zero->options.comm)) return zpp_internode_gather_now(zero, unit, wait, err);
    const struct zpp_group *group = unit->group;
    for (int at = 0; at < group->ranks; at++)
        if (at != group->rank)
            memcpy(zpp_unit_shard_of_whole(unit, at), zpp_params_of_member(zero, unit, at) + (size_t)at * bytes, bytes);
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER, bytes * (size_t)(group->ranks - 1));
    return ZPP_OK;
}

const struct zpp_placement zpp_placement_replicated = {
    .name = "replicated", .lay_out = lay_out, .locate = locate, .collect = collect,
};
