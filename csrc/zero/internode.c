/* SPDX-License-Identifier: Apache-2.0
 *
 * See internode.h. What a collective reads and writes is borrowed until it is finished: units stay GATHERING and
 * buckets stay listed until then, as they do on one host until the peers have read them.
 */
#include "internode.h"

#include "internal.h"

enum { EXCHANGE_OBJECTS = ZPP_OBJECTS / 2 }; /* objects from here on are exchanges, below are units, from 1 on */

uint32_t zpp_internode_object(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_comm_object(zero->number, 1 + (uint32_t)unit->index);
}

static struct zpp_call gather_call(const zpp_zero *zero, const struct zpp_unit *unit) {
    return (struct zpp_call){ .coll = ZPP_COLL_ALL_GATHER,
                              .dtype = unit->dtype,
                              .dst = unit->whole,
                              .src = unit->shard,
                              .elems = unit->shard_elems,
                              .object = zpp_internode_object(zero, unit) };
}

void zpp_internode_quantise(struct zpp_call *call, const struct zpp_quant_spec *spec) {
    call->coll = call->coll == ZPP_COLL_ALL_GATHER ? ZPP_COLL_ALL_GATHER_QUANT : ZPP_COLL_REDUCE_SCATTER_QUANT;
    call->bits = spec->bits;
    call->block_elems = spec->block_elems;
}

zpp_status zpp_internode_gather(zpp_zero *zero, struct zpp_unit *unit, void (*before)(void *unit),
                                struct zpp_err *err) {
    struct zpp_call call = gather_call(zero, unit);
    call.before = before;
    call.before_ctx = before ? unit : NULL;
    if (unit->quantised) zpp_internode_quantise(&call, &zero->wire.params);
    return zpp_comm_submit(zero->options.comm, &call, NULL, NULL, &unit->gather_work, err);
}

zpp_status zpp_internode_gather_now(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                    struct zpp_err *err) {
    const struct zpp_call call = gather_call(zero, unit); /* a shard that lies at its place is not copied */
    return zpp_comm_call(zero->options.comm, &call, wait, err);
}

zpp_status zpp_internode_await(zpp_work **work, const struct zpp_wait *wait, struct zpp_err *err) {
    if (!*work) return ZPP_OK;
    if (!wait && !zpp_work_finished(*work)) return ZPP_AGAIN;
    const zpp_status status = zpp_work_wait(*work, wait, err);
    if (!zpp_work_finished(*work)) return status; /* interrupted, or late */
    zpp_work_free(*work);
    *work = NULL;
    return status;
}

zpp_status zpp_internode_gather_wait(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                     struct zpp_err *err) {
    (void)zero;
    return zpp_internode_await(&unit->gather_work, wait, err);
}

void zpp_internode_drop(zpp_comm *comm, zpp_work **work) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (!*work) return;
    if (!zpp_work_finished(*work)) zpp_comm_abort(comm, "left in the middle of a gather or reduction");
    (void)zpp_work_wait(*work, NULL, &ignored);
    zpp_work_free(*work);
    *work = NULL;
}

zpp_status zpp_internode_exchange(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                                  const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_call call = { .coll = ZPP_COLL_ALL_GATHER,
                                   .dtype = ZPP_U8,
                                   .dst = all,
                                   .src = mine,
                                   .elems = bytes,
                                   .object = zpp_comm_object(zero->number, EXCHANGE_OBJECTS + (uint32_t)kind) };
    return zpp_comm_call(zero->options.comm, &call, wait, err);
}
