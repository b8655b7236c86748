/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator over several hosts, where no rank can read another's memory: gathers and reductions are collectives
 * of the communicator, submitted in program order (the same on every rank) and run on its progress thread. Each carries
 * its unit, so that ranks whose paths differ are told so. Bytes on the wire are those of zero.h, or of the quantised
 * collectives (wire.h); in stages 1 to 3 a reduction sums as the communicator does, first inside each host.
 */
#ifndef ZPP_ZERO_INTERNODE_H
#define ZPP_ZERO_INTERNODE_H

#include "reduce.h"
#include "zero.h"

static inline bool zpp_internode(const zpp_comm *comm) { return comm && zpp_comm_hosts(comm) > 1; }

/* What a collective for the unit is told by: two models of one shape are two. */
uint32_t zpp_internode_object(const zpp_zero *zero, const struct zpp_unit *unit);
/* A unit's shards into its memory, quantised on the way where unit->rounded; `*work` as from zpp_comm_submit. */
zpp_status zpp_internode_gather(zpp_zero *zero, struct zpp_unit *unit, zpp_work **work, struct zpp_err *err);
/* The shards as they are, into the memory of a unit that holds rounded ones. */
zpp_status zpp_internode_make_exact(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* AGAIN (`wait` NULL) while it runs; then its status, and *work is freed and NULL. */
zpp_status zpp_internode_await(zpp_work **work, const struct zpp_wait *wait, struct zpp_err *err);
/* End what is under way, whatever its state: what it reads and writes is about to go. */
void zpp_internode_drop(zpp_comm *comm, zpp_work **work);

/* A unit's bucket goes out: two collectives, which parameters have gradients and their sum. */
zpp_status zpp_internode_launch(zpp_zero *zero, struct zpp_unit_grad *grad, const uint8_t *touched,
                                unsigned char *bucket, struct zpp_err *err);
/* The operation that ends them: into the shard. `arg` points at a struct zpp_unit_grad pointer. */
zpp_status zpp_internode_finish(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err);

/* Few bytes of every rank, with what they are for. */
zpp_status zpp_internode_exchange(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                                  const struct zpp_wait *wait, struct zpp_err *err);
/* Stages 1 and 2, and small units: the shards that the others have written. */
zpp_status zpp_internode_collect(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                 struct zpp_err *err);

#endif
