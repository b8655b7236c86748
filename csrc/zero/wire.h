/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards and buckets in 8 or 4 bits (ZeRO++, Wang et al. 2023), read in place by the peers like the exact ones;
 * blocks, scales and errors: ops/quant/quant.h, symmetric. A quantised copy of E elements: an fp32 scale a block, then
 * the codes, w(E) = E * bits / 8 + 4 a block. Decisions: docs/design/0015.
 *
 *   parameters (qwZ)  Beside its shard each rank keeps the shard's quantised copy, written where shards are written
 *   (the step),
 *                     so a step quantises once for its two gathers. A gather reads quantised copies, its own too: every
 *                     rank computes with the same bits. The shards, which the optimizer updates, stay exact.
 *   gradients (qgZ)   A bucket is quantised shard by shard, in place, before the peers hear of it; rank r adds the
 *                     quantised copies of shard r in fp32, in rank order: one quantisation, because one host is one
 *                     hop.
 *
 * Bytes read per rank and step: (N - 1) w(shard) a gather and a reduction, in place of (N - 1) * shard bytes.
 *
 * Gradients that add in fp32 and travel in 16 bits (a unit's wire_dtype) are rounded to nearest in place in the same
 * manner, and added in fp32. Over several hosts they are rounded to a copy (reduce_net.c).
 *
 * Over several hosts both are the quantised collectives of the communicator (comm/tcp/hier_quant.c), which quantise
 * at each gather and add as qgZ does: inside each host, quantised again, then over hosts. With one rank a host the bits
 * are the same as here.
 */
#ifndef ZPP_ZERO_WIRE_H
#define ZPP_ZERO_WIRE_H

#include "../ops/quant/quant.h"
#include "zero.h"

struct zpp_wire {
    struct zpp_quant_spec params, grads; /* bits 0: exact */
    zpp_region *qcopies;                  /* PER_RANK: of my shards of sharded units */
    size_t qcopies_bytes, scratch_bytes;
    unsigned char *scratch; /* the quantised copy of one shard of a bucket */
};

/* Part of seal and destroy. */
zpp_status zpp_wire_seal(zpp_zero *zero, struct zpp_err *err);
void zpp_wire_fini(zpp_zero *zero);

/* True if gathers of sharded units are to read quantised copies. */
bool zpp_wire_quantises_params(const zpp_zero *zero);
/* An error where the unit's elements cannot be quantised. */
zpp_status zpp_wire_check_unit(const struct zpp_unit *unit, struct zpp_err *err);
/* Part of seal: a place for the quantised copy of this rank's shard, which peers read. make_qcopy fills it, after the
 * shard was written. */
zpp_status zpp_wire_add_qcopy(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
void zpp_wire_make_qcopy(zpp_zero *zero, const struct zpp_unit *unit);
/* memory[elems] = the values of every rank's quantised copy of the unit. */
void zpp_wire_gather(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *memory);

/* Are gradients to travel as quantised copies? */
bool zpp_wire_quantises_grads(const zpp_zero *zero);
/* Between parameters lies what the memory held before, which must not widen the scale of a block. */
void zpp_wire_clear_gaps(const struct zpp_unit *unit, unsigned char *bucket);
/* Every shard of the unit's bucket becomes its quantised copy, at the front of the shard's place. */
void zpp_wire_quantise_bucket(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *bucket);
/* Do the unit's gradients travel in fewer bits than they add in (and not as quantised copies)? */
static inline bool zpp_wire_narrows(const struct zpp_unit *unit) {
    return unit->wire_dtype != unit->grad_dtype;
}
/* Of one shard as it travels then. */
static inline size_t zpp_wire_shard_bytes(const struct zpp_unit *unit) {
    return unit->shard_elems * zpp_dtype_bytes(unit->wire_dtype);
}
/* Every shard of the unit's bucket becomes its elements of wire_dtype, at the front of the shard's place. */
void zpp_wire_narrow(const zpp_zero *zero, const struct zpp_unit *unit, unsigned char *bucket);
/* A copy of such a shard, until the next call. */
const void *zpp_wire_aside(zpp_zero *zero, const struct zpp_unit *unit, const void *shard);
/* Of the quantised copy of one shard. */
size_t zpp_wire_qcopy_bytes(const zpp_zero *zero, const struct zpp_unit *unit);
/* to = (sum of the quantised copies) * factor, or to += that; `elems` of dtype. */
void zpp_wire_add(zpp_zero *zero, const void *const *qcopies, int count, float factor, void *to, zpp_dtype dtype,
                    bool accumulate, size_t elems);

#endif
