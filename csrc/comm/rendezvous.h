/* SPDX-License-Identifier: Apache-2.0
 *
 * What a rank puts into the store while a group is created, and how a sparse group gathers it (rendezvous_tree.c).
 */
#ifndef ZPP_COMM_RENDEZVOUS_H
#define ZPP_COMM_RENDEZVOUS_H

#include "tcp/net.h"

enum { ZPP_ENDPOINT_MAGIC = 0x5a505031, ZPP_SECRET_BYTES = 16 };

struct zpp_endpoint {
    uint32_t magic, rank, ranks, pid;
    uint64_t base_bytes; /* differs between versions of zeropp that lay out their memory differently */
    uint8_t secret[ZPP_SECRET_BYTES];
    char identity[80], host[64], socket_name[64];
    uint32_t full_ranks, zero;    /* a group of more ranks is sparse */
    struct zpp_door_address door; /* of a sparse group */
};

/* Return PEER unless `endpoint`, of `bytes`, is that of `rank` of the group that `own` belongs to. */
zpp_status zpp_endpoint_check(const struct zpp_comm *comm, const struct zpp_endpoint *own,
                              const struct zpp_endpoint *endpoint, size_t bytes, int rank, struct zpp_err *err);

/* A sparse group, collective: fill endpoint[r] for the ranks of this host, from endpoint[comm->rank], and set here[r]
 * for them. Each rank reads at most 18 values, whatever the size of the group. */
zpp_status zpp_gather_endpoints(const struct zpp_comm *comm, const struct zpp_store *store,
                                struct zpp_endpoint *endpoint, bool *here, struct zpp_err *err);
/* Afterwards, when the ranks of this host are connected: the door gets the directory of the group, which the lowest
 * rank of the host (`first` of `locals`) reads and hands to the others; so do the number of hosts and host_of[] of
 * `hosts`. */
zpp_status zpp_share_directory(struct zpp_wait_ctx *wait_ctx, const struct zpp_store *store, int first, int locals,
                               struct zpp_hosts *hosts, struct zpp_err *err);

#endif
