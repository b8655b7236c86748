/* SPDX-License-Identifier: Apache-2.0
 *
 * hpZ (ZeRO++, Wang et al. 2023, section 3.2) over several hosts: a second partition of the parameters inside each
 * host, so that only the first gather after a step crosses the network.
 *
 *   first need after a step   shards of all ranks, over the network; rank l of the L of a host keeps the l-th of L
 *                             parts
 *   every need after that     the parts of this host's ranks, through shared memory: backward, recomputation, further
 *                             micro-steps, evaluation
 *
 * Memory: 1/L of every SHARD unit besides its 1/N shard. Network bytes a step: Psi in place of 2 Psi for parameters.
 * All ranks gather in one program order (internode.h), so all hold a part, or none does. Where parameters travel
 * quantised (wire.h) the parts hold the rounded values: what everybody computes with.
 */
#ifndef ZPP_ZERO_SECONDARY_H
#define ZPP_ZERO_SECONDARY_H

#include "zero.h"

/* After the units' sizes are known; frees nothing of its own on failure. */
zpp_status zpp_secondary_seal(zpp_zero *zero, struct zpp_err *err);
void zpp_secondary_free(zpp_zero *zero);
/* The unit is whole, with the values that are computed with: keep this rank's part, if that is not there yet. */
void zpp_secondary_keep(zpp_zero *zero, struct zpp_unit *unit);
/* As zpp_internode_gather, from the parts of this host; for units with `secondary_kept`. */
zpp_status zpp_secondary_gather(zpp_zero *zero, struct zpp_unit *unit, zpp_work **work, struct zpp_err *err);
/* Shards were written: all parts are of old values. */
void zpp_secondary_forget(zpp_zero *zero);

#endif
