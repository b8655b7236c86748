/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank holds its shard, and the ranks are on several hosts: a gather is an all-gather of the communicator, on its
 * progress thread.
 *
 * With hpZ (ZeRO++, Wang et al. 2023, section 3.2) each host has a second partition of the parameters, so that only the
 * first gather after a step crosses the network:
 *
 *   first need after a step   shards of all ranks, over the network; rank l of the L of a host keeps the l-th of L
 *                             parts, its secondary shard
 *   every need after that     the parts of this host's ranks, through shared memory: backward, recomputation, further
 *                             micro-steps, evaluation
 *
 * Memory: 1/L of every unit besides its 1/N shard. Network bytes a step: Psi in place of 2 Psi for parameters. All
 * ranks gather in one program order (internode.c), so all hold a part, or none does. Where parameters travel quantised
 * (wire.c) the parts hold the rounded values, which all ranks compute with.
 */
#include "../placement.h"

#include <string.h>

#include "../internal.h"

static size_t part_bytes(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_unit_bytes(unit) / (size_t)zpp_comm_ranks(zero->intranode);
}

zpp_status zpp_zero_set_secondary(zpp_zero *zero, zpp_comm *intranode, struct zpp_err *err) {
    const int local_ranks = zpp_comm_ranks(intranode);
    if (zero->sealed) return zpp_fail(err, ZPP_STATE, "zero: a secondary shard after seal");
    if (zero->ranks != local_ranks * zpp_comm_hosts(zero->options.comm))
        return zpp_fail(err, ZPP_INVALID,
                        "zero: %d ranks on %d hosts, %d of them on this one; a secondary shard wants as many on each",
                        zero->ranks, zpp_comm_hosts(zero->options.comm), local_ranks);
    zero->intranode = intranode;
    return ZPP_OK;
}

static bool has_secondary(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zero->intranode && unit->placement == &zpp_placement_sharded_net && unit->group == zero->groups[0];
}

static zpp_status seal(zpp_zero *zero, size_t warm_bytes, struct zpp_err *err) {
    (void)warm_bytes;
    size_t bytes = 0;
    for (int i = 0; i < zero->units_count; i++)
        if (has_secondary(zero, zero->units[i])) bytes += part_bytes(zero, zero->units[i]);
    if (!bytes) return ZPP_OK;
    void *memory = NULL;
    const zpp_status status = zpp_mem_alloc(bytes, zpp_page_bytes(), &memory, err);
    if (status != ZPP_OK) return status;
    zero->secondary = memory;
    zero->secondary_bytes = bytes;
    unsigned char *at = zero->secondary;
    for (int i = 0; i < zero->units_count; i++) {
        if (!has_secondary(zero, zero->units[i])) continue;
        zero->units[i]->secondary = at;
        at += part_bytes(zero, zero->units[i]);
    }
    return ZPP_OK;
}

static void count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    out->param_bytes += zero->secondary_bytes;
    out->gathered_bytes += zpp_range_memory_bytes(zero);
    out->gathered_peak_bytes += zero->full_peak_bytes;
}

static zpp_status lay_out(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->region_offset_bytes = zpp_unit_next_offset(&zero->params_bytes, zpp_unit_shard_bytes(unit));
    zpp_range_lay_out(zero, unit);
    return zpp_wire_quantises_params(zero) ? zpp_wire_check_unit(unit, err) : ZPP_OK;
}

static void drop(zpp_zero *zero, struct zpp_unit *unit) {
    zpp_internode_drop(unit->gathers_intranode ? zero->intranode : unit->group->comm, &unit->gather_work);
}

static zpp_status gather_parts(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct zpp_call call = { .coll = ZPP_COLL_ALL_GATHER,
                                   .dtype = unit->dtype,
                                   .dst = unit->whole,
                                   .src = unit->secondary,
                                   .elems = unit->elems / (size_t)zpp_comm_ranks(zero->intranode),
                                   .object = zpp_internode_object(zero, unit) };
    return zpp_comm_submit(zero->intranode, &call, NULL, NULL, &unit->gather_work, err);
}

static zpp_status gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->quantised = zpp_wire_quantises_params(zero) && !unit->wants_exact;
    unit->gathers_intranode = unit->secondary_kept && unit->quantised == zpp_wire_quantises_params(zero);
    const struct zpp_internode_sides sides = {0};
    return unit->gathers_intranode ? gather_parts(zero, unit, err) : zpp_internode_gather(zero, unit, &sides, err);
}

/* The unit is whole, with the values that are computed with: keep this rank's part, if that is not there yet. */
static zpp_status complete(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)err;
    if (!unit->secondary || unit->secondary_kept || unit->quantised != zpp_wire_quantises_params(zero)) return ZPP_OK;
    const size_t bytes = part_bytes(zero, unit);
    memcpy(unit->secondary, unit->whole + (size_t)zpp_comm_rank(zero->intranode) * bytes, bytes);
    unit->secondary_kept = true;
    return ZPP_OK;
}

static zpp_status make_exact(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    return zpp_internode_gather_now(zero, unit, NULL, err);
}

static zpp_status publish(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    (void)zero, (void)err;
    unit->secondary_kept = false;
    return ZPP_OK;
}

static zpp_status keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->secondary_kept = false;
    return zpp_range_keep_shard(zero, unit, err);
}

const struct zpp_placement zpp_placement_sharded_net = {
    .name = "sharded_net", .moves = true,
    .seal = seal, .count_memory = count_memory,
    .lay_out = lay_out, .locate = zpp_range_locate, .drop = drop,
    .acquire = zpp_range_acquire, .release = zpp_range_release,
    .gather = gather, .wait = zpp_internode_gather_wait, .complete = complete, .make_exact = make_exact,
    .keep_shard = keep_shard, .publish = publish,
};
