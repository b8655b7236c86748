/* SPDX-License-Identifier: Apache-2.0
 *
 * A group: the ranks that hold the same parameters, partition them and add their gradients. Group 0 are all data ranks;
 * an expert's group are those of them that hold the same experts (DeepSpeed-MoE, Rajbhandari et al. 2022, 4.1):
 *
 *   4 data ranks, 2 parts     rank     0   1   2   3
 *                             part     0   1   0   1      group of part 0: ranks 0, 2; of part 1: ranks 1, 3
 *
 * All data ranks have the same units in the same order, of the same sizes, and unit i is of group g on all of them;
 * only the values differ between parts. So one coordinator has one order of reductions, one ring of descriptors and one
 * region for each kind of memory, over the data ranks: a rank reads there what the members of the unit's group have.
 * Two coordinators in one backward would have two orders, and could wait for each other
 * (docs/design/0043-groups-of-ranks.md).
 */
#ifndef ZPP_ZERO_GROUP_H
#define ZPP_ZERO_GROUP_H

#include "../comm/nccl/nccl.h"

struct zpp_zero;

struct zpp_group {
    char name[64];
    int rank, ranks;            /* this rank's number in the group, and their count */
    int members[ZPP_RANKS_MAX]; /* [ranks] their numbers among the data ranks, in order of the shards */
    int part, parts;            /* of the data ranks' different parameters, this rank has those of `part` */
    zpp_comm *comm;             /* of its ranks, borrowed; NULL: one rank, or not set */
    zpp_nccl *nccl;             /* over `comm`, where NCCL moves the bytes; NULL: one rank, or they copy */
    double divisor;             /* a gradient is the members' sum divided by this */
};

struct zpp_group_spec {
    const char *name;   /* for messages; copied */
    const int *part_of; /* [data ranks] the part that each one holds, from 0 on; the same everywhere; borrowed */
    double divisor;     /* above 0; 0: the number of data ranks, which makes the mean over the batches of all of them */
};

/* Group 0: all data ranks. */
void zpp_group_init_all(struct zpp_group *group, int rank, int ranks);
/* Collective, before units are added; `*index` is the number for struct zpp_unit_spec. INVALID: data ranks that add
 * different groups, parts of different sizes, or numbers that are not 0, 1, ..; NOT_BUILT where the coordinator has one
 * group alone (parameters in files over several hosts). */
zpp_status zpp_zero_add_group(struct zpp_zero *zero, const struct zpp_group_spec *spec, int *index,
                              struct zpp_err *err);
/* In by_nccl.c. Collective over `comm`: the group's ranks, in their order; borrowed until destroy. Over several hosts,
 * and where NCCL moves the bytes, a group of more than one rank needs it, before its first unit is added. */
zpp_status zpp_zero_set_group_comm(struct zpp_zero *zero, int index, zpp_comm *comm, struct zpp_err *err);

#endif
