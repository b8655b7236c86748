/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a unit's parameters live, and how the whole unit comes to memory: a table of functions for each way, in a file
 * of its own. Nothing else in csrc tests where a unit lives.
 *
 *   placement     the values are                                       a gather
 *   replicated    in memory of every rank, whole                       never; after a step, the others' shards
 *   host_shared   in one copy a host, in shared memory                 never
 *   sharded       a shard a rank, in memory that all ranks map         reads the peers' shards
 *   sharded_net   a shard a rank, on several hosts                     an all-gather; with hpZ from secondary shards
 *   offloaded     a shard a rank, in memory of the host                copies of the shards to an accelerator
 *   offloaded_whole   the same, and whole on an accelerator            never; after a step, the shards of all ranks
 *   offloaded_net     as offloaded, on several hosts                   an all-gather, then a copy to the accelerator
 *   offloaded_whole_net   as offloaded_whole, on several hosts         never; after a step, the same
 *   on_device     a shard a rank, in memory of an accelerator, or of   copies of the peers' shards
 *                 the host, which the accelerator reads and writes
 *   on_device_whole   in memory of every rank's accelerator, whole     never; after a step, the others' shards
 *   nvme          in a file that the ranks of a host share             a read of the whole unit
 *   nvme_up       the same, and whole on an accelerator                the same, then a copy to the accelerator
 *   nvme_net      in a file a rank, of its shards, on several hosts    a read of the shard, then an all-gather
 *
 * A gather costs one indirect call for each of acquire, gather, wait and complete, a release one; none is made for an
 * element. unit.c calls them; NULL means that there is nothing to do.
 *
 * Threads: the coordinator's.
 */
#ifndef ZPP_ZERO_PLACEMENT_H
#define ZPP_ZERO_PLACEMENT_H

#include "zero.h"

struct zpp_placement {
    const char *name;
    bool moves;   /* units are SHARDED, gathered when they are needed, and released */
    bool in_file; /* this rank's shard is written to a file after it was changed */
    bool keeps;   /* a release may keep the values for the backward, because to get them again is slow */
    bool steps_whole; /* a step inside the backward leaves the whole unit new, so that the next forward may keep it */

    /* --- the coordinator's: called of the placement that its moving units have ------------------------------------ */
    zpp_status (*open)(zpp_zero *zero, struct zpp_err *err); /* create: its streams */
    /* seal, after the regions were made. `warm_bytes`: memory that may wait for the next gather. */
    zpp_status (*seal)(zpp_zero *zero, size_t warm_bytes, struct zpp_err *err);
    void (*fini)(zpp_zero *zero); /* destroy, after all streams */
    bool (*reads)(const zpp_zero *zero); /* true if a read is under way; NULL: there is no file */
    void (*count_memory)(const zpp_zero *zero, struct zpp_zero_memory *out); /* adds to `out` */

    /* Before the votes of a step: this rank's gathers read no shard any more. */
    zpp_status (*settle)(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err);
    /* After the votes, before shards are written; and before the barrier behind that, in place of `publish`. */
    zpp_status (*begin_writes)(zpp_zero *zero, struct zpp_err *err);
    zpp_status (*end_writes)(zpp_zero *zero, struct zpp_err *err);

    /* --- one unit: its life --------------------------------------------------------------------------------------- */
    /* seal, before there is memory: where its values and addresses are to be. */
    zpp_status (*lay_out)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
    void (*locate)(zpp_zero *zero, struct zpp_unit *unit); /* seal: unit->whole, unit->shard */
    void (*drop)(zpp_zero *zero, struct zpp_unit *unit);   /* end a gather under way, whatever its state */

    /* --- one unit: gathers ---------------------------------------------------------------------------------------- */
    zpp_status (*acquire)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err); /* memory for the whole unit */
    /* acquire said AGAIN, because other units are whole where this one would lie, and it is needed now: from here on
     * acquire succeeds. unit->whole may change. NULL: acquire never says so. */
    zpp_status (*evict)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
    zpp_status (*release)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err); /* that memory goes */
    /* Begin to fill it: everything launched on zero->compute before may still use the memory. */
    zpp_status (*gather)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
    /* What is launched on zero->compute from now on sees the values. AGAIN: `wait` is NULL, and not yet. NULL: the
     * event unit->ready says so. */
    zpp_status (*wait)(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err);
    zpp_status (*complete)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err); /* how the gather ended */
    /* This rank has no gradient of the unit, and other ranks may step it inside the backward once they know: its
     * gathers read no shard any more. With a gradient that is so, because the gradient came after them. AGAIN as in
     * `wait`. */
    zpp_status (*end_reads)(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err);
    /* The exact values, into the memory of a unit that was gathered quantised. */
    zpp_status (*make_exact)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);

    /* --- one unit: its shard -------------------------------------------------------------------------------------- */
    /* zpp_zero_keep_shard: this rank's part of the whole unit becomes its shard. */
    zpp_status (*keep_shard)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
    /* The shard has new values: make what is made from it. */
    zpp_status (*publish)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
    /* step_end, after all ranks have written: the shards of the others. */
    zpp_status (*collect)(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err);
    /* A step inside the backward: unit->shard is in memory; written to its file; gone again. */
    zpp_status (*open_shard)(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err);
    zpp_status (*write_begin)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
    zpp_status (*write_wait)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
    zpp_status (*close_shard)(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
};

/* Shard `rank` of the whole unit, which is in memory. */
static inline unsigned char *zpp_unit_shard_of_whole(const struct zpp_unit *unit, int rank) {
    return unit->whole + (size_t)rank * zpp_unit_shard_bytes(unit);
}

extern const struct zpp_placement zpp_placement_replicated, zpp_placement_host_shared, zpp_placement_sharded,
    zpp_placement_sharded_net, zpp_placement_nvme, zpp_placement_nvme_net, zpp_placement_offloaded,
    zpp_placement_nvme_up, zpp_placement_offloaded_whole, zpp_placement_offloaded_net,
    zpp_placement_offloaded_whole_net, zpp_placement_on_device, zpp_placement_on_device_whole;

/* For placements whose whole units lie in the coordinator's range of addresses, or in its backing (sharded.c). */
void zpp_range_lay_out(zpp_zero *zero, struct zpp_unit *unit);
void zpp_range_locate(zpp_zero *zero, struct zpp_unit *unit); /* the shard is in the region `zero->params` */
zpp_status zpp_range_acquire(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_range_release(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_range_keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
size_t zpp_range_memory_bytes(const zpp_zero *zero); /* of whole units, and waiting for them */
/* For placements whose whole units are on an accelerator (wrapped.c): those that move, and those that stay. */
zpp_status zpp_wrapped_open(zpp_zero *zero, struct zpp_err *err);
zpp_status zpp_wrapped_seal(zpp_zero *zero, struct zpp_err *err);
void zpp_wrapped_locate(zpp_zero *zero, struct zpp_unit *unit);
zpp_status zpp_wrapped_acquire(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_wrapped_release(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_wrapped_evict(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* Memory of its own, for good, for a unit that is not whole and that no graph refers to. unit->whole changes. */
zpp_status zpp_wrapped_give_own(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
void zpp_wrapped_count_memory(const zpp_zero *zero, struct zpp_zero_memory *out);
void zpp_resident_lay_out(zpp_zero *zero, struct zpp_unit *unit);
zpp_status zpp_resident_make(zpp_zero *zero, struct zpp_err *err); /* seal: of all of them */
void zpp_resident_locate(zpp_zero *zero, struct zpp_unit *unit);
void zpp_wrapped_fini(zpp_zero *zero);
/* For placements with shards on the host of an accelerator (offloaded.c). */
void zpp_offloaded_lay_out_shard(zpp_zero *zero, struct zpp_unit *unit);
void zpp_offloaded_locate(zpp_zero *zero, struct zpp_unit *unit);
zpp_status zpp_offloaded_keep_shard(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_offloaded_lay_out_whole(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
void zpp_offloaded_locate_whole(zpp_zero *zero, struct zpp_unit *unit);
/* For placements in a file (nvme.c): in the file `zero->unit_file`, elements [first, first + elems) of the unit. */
zpp_status zpp_file_lay_out(zpp_zero *zero, struct zpp_unit *unit, size_t first_elem, size_t elems,
                            struct zpp_err *err);
/* A file that the ranks of a host share: all of the unit. */
zpp_status zpp_file_lay_out_whole(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
void zpp_file_count_memory(const zpp_zero *zero, struct zpp_zero_memory *out);
bool zpp_file_reads(const zpp_zero *zero);
/* How the read of the unit ended. An error names the parameter, and the expert, at which the file failed. */
zpp_status zpp_file_read_status(zpp_zero *zero, const struct zpp_unit *unit, struct zpp_err *err);
/* The quantised copy of the unit, where the file keeps them. */
zpp_status zpp_file_keep_qcopy(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_file_write_begin(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_file_write_wait(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);

#endif
