/* SPDX-License-Identifier: Apache-2.0
 *
 * FILE units over several hosts: the ranks of a host have no file in common, because gathers are collectives of all
 * ranks (internode.h). Each rank has a file of its own with its slices, one mapping for them (unit_file.h), and a range
 * of addresses in which units are whole, as SHARD units have:
 *
 *   fetch   the slice's memory is opened and its read begins; the all-gather goes into the queue at once, at its place
 *           in program order, and begins when the slice has come; then the slice's memory goes again
 *   step    through windows of the slices' mapping, as on one host
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
/* Memory for this rank's slice, and its read begins. */
zpp_status zpp_rank_file_begin(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* On the communicator's thread, before the gather: the slice is there, or NaN. `unit`: struct zpp_unit. */
void zpp_rank_file_await(void *unit);
/* After the gather, or if it never began. */
zpp_status zpp_rank_file_end(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* A step inside the backward: the slice's memory again, filled from the whole unit where that is there (`full`), else
 * from the file. Until zpp_rank_file_end. */
zpp_status zpp_rank_file_open(zpp_zero *zero, struct zpp_unit *unit, bool full, struct zpp_err *err);
/* This rank's slice of a gathered unit, to the file. */
zpp_status zpp_rank_file_keep(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);

#endif
