/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator's collectives over several hosts, where no rank can read another's memory: they are submitted in
 * program order (the same on every rank) and run on the communicator's progress thread. Each carries its unit, so that
 * ranks whose paths differ get an error that says so. Bytes on the wire are those of zero.h, or of the quantised
 * collectives (wire.h).
 */
#ifndef ZPP_ZERO_INTERNODE_H
#define ZPP_ZERO_INTERNODE_H

#include "../ops/quant/quant.h"
#include "zero.h"

static inline bool zpp_internode(const zpp_comm *comm) { return comm && zpp_comm_hosts(comm) > 1; }

/* The number of the unit in its collectives: two models of one shape have two. */
uint32_t zpp_internode_object(const zpp_zero *zero, const struct zpp_unit *unit);
/* The same collective, with quantised elements. */
void zpp_internode_quantise(struct zpp_call *call, const struct zpp_quant_spec *spec);
/* Submit as unit->gather_work: the unit's shards into its memory, quantised on the way where unit->quantised. `before`
 * (NULL: nothing) runs on the communicator's thread before the gather begins. */
zpp_status zpp_internode_gather(zpp_zero *zero, struct zpp_unit *unit, void (*before)(void *unit),
                                struct zpp_err *err);
/* placement.h's wait, for that gather. */
zpp_status zpp_internode_gather_wait(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                     struct zpp_err *err);
/* The exact shards into the unit's memory; returns when they are there. */
zpp_status zpp_internode_gather_now(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                    struct zpp_err *err);
/* AGAIN (`wait` NULL) while it runs; then its status, and *work is freed and NULL. */
zpp_status zpp_internode_await(zpp_work **work, const struct zpp_wait *wait, struct zpp_err *err);
/* End what is under way, whatever its state, because what it reads and writes is about to go. */
void zpp_internode_drop(zpp_comm *comm, zpp_work **work);
/* A few bytes of every rank, with what they are for. */
zpp_status zpp_internode_exchange(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                                  const struct zpp_wait *wait, struct zpp_err *err);

#endif
