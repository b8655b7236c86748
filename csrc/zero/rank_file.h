/* SPDX-License-Identifier: Apache-2.0
 *
 * FILE units over several hosts: the ranks of a host have no file in common, because gathers are collectives of all
 * ranks (internode.h). Each rank has a file of its own with its shards, one mapping for them (unit_file.h), and a range
 * of addresses in which units are whole, as SHARD units have:
 *
 *   fetch   the shard's memory is opened and its read begins; the all-gather goes into the queue at once, at its place
 *           in program order, and begins when the shard has come; then the shard's memory goes again
 *   step    through windows of the shards' mapping, as on one host
 *
 * So a rank reads 1/N of what is gathered, and H hosts read from H disks side by side (bandwidth-centric partitioning,
 * ZeRO-Infinity, section 6.1). A read that fails sends NaN, so that the peers, which cannot know, compute nothing that
 * looks right, and is this rank's error.
 */
#ifndef ZPP_ZERO_RANK_FILE_H
#define ZPP_ZERO_RANK_FILE_H

#include "unit_file.h"
#include "unit.h"
#include "zero.h"

/* Are FILE units of this coordinator gathered from files of each rank's own? */
bool zpp_rank_file(const zpp_zero *zero);
/* Memory for this rank's shard, and its read begins. */
zpp_status zpp_rank_file_begin(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* On the communicator's thread, before the gather: the shard is there, or NaN. `unit`: struct zpp_unit. */
void zpp_rank_file_await(void *unit);
/* After the gather, or if it never began. */
zpp_status zpp_rank_file_end(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* A step inside the backward: the shard's memory again, filled from the whole unit where that is there (`full`), else
 * from the file. Until zpp_rank_file_end. */
zpp_status zpp_rank_file_open(zpp_zero *zero, struct zpp_unit *unit, bool full, struct zpp_err *err);
/* This rank's shard of a gathered unit, to the file. */
zpp_status zpp_rank_file_keep(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);

#endif
