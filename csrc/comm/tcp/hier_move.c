/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives over hosts that move bytes without arithmetic. What a host needs from another one crosses the network
 * once and is shared inside the host. Bytes over the network per rank that receives, H hosts with L ranks each:
 *
 *   all_gather   (H - 1) * bytes: from the ranks at its own place on the other hosts; the L received pieces of each
 *                host are then gathered inside
 *   broadcast    bytes, at the lowest rank of each host but the root's
 *   all_to_all, gather, scatter   exactly the bytes that ranks on other hosts send to it
 *   barrier      0: frames between the lowest ranks
 *
 * In a sparse group the barrier and short gathers take log2(H) messages a rank (zpp_hier_share).
 */
#include <string.h>

#include "net.h"
#include "../reduce.h"

/* --- barrier ----------------------------------------------------------------------------------------------------- */

/* Bruck, Ho, Kipnis, Upfal, Weathersby 1997: after the round of distance d, a rank has the blocks of 2 d hosts. */
zpp_status zpp_hier_share(struct zpp_hier *hier, uint8_t *blocks, size_t bytes, uint32_t part, struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    zpp_status status = ZPP_OK;
    for (int distance = 1; status == ZPP_OK && distance < hosts->hosts; distance *= 2, part++) {
        const int missing = hosts->hosts - distance, count = distance < missing ? distance : missing;
        const int to = (hosts->mine + hosts->hosts - distance) % hosts->hosts;
        const int from = (hosts->mine + distance) % hosts->hosts;
        const size_t moved_bytes = bytes * (size_t)count;
        struct zpp_flow flow[2] = {
            zpp_flow_out(zpp_rank_at(hosts, to, hier->place), part, blocks, moved_bytes),
            zpp_flow_in(zpp_rank_at(hosts, from, hier->place), part, blocks + bytes * (size_t)distance, moved_bytes)};
        status = zpp_flows_run(&hier->internode, flow, 2, NULL, NULL, err);
    }
    return status;
}

static zpp_status meet_all(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    struct zpp_flow *flow = NULL;
    size_t count = 0;
    const zpp_status status = zpp_net_flows(hier->comm, 2 * (size_t)hosts->hosts, &flow, err);
    if (status != ZPP_OK) return status;
    for (int h = 0; h < hosts->hosts; h++) {
        if (h == hosts->mine) continue;
        flow[count++] = zpp_flow_out(zpp_rank_at(hosts, h, 0), 0, NULL, 0);
        flow[count++] = zpp_flow_in(zpp_rank_at(hosts, h, 0), 0, NULL, 0);
    }
    return zpp_flows_run(&hier->internode, flow, count, NULL, NULL, err);
}

zpp_status zpp_hier_barrier(struct zpp_hier *hier, struct zpp_err *err) {
    uint8_t none = 0;
    zpp_status status = ZPP_OK;
    if (hier->place == 0) status = hier->comm->door ? zpp_hier_share(hier, &none, 0, 0, err) : meet_all(hier, err);
    if (status == ZPP_OK) status = zpp_hier_intranode(&hier->after, err);
    return status == ZPP_OK ? zpp_exchange(&hier->after, err) : status;
}

/* --- all_gather -------------------------------------------------------------------------------------------------- */

/* Return the rank of host `host` that receives from `rank`, of another host; the receivers alternate. */
static int receiver_of(const struct zpp_hosts *hosts, int rank, int host) {
    return zpp_rank_at(hosts, host, hosts->index_of[rank] % hosts->count[host]);
}

static zpp_status gather_internode(struct zpp_hier *hier, void *const *dst, const void *src, size_t bytes,
                                   struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    struct zpp_flow *flow = NULL;
    size_t count = 0;
    const zpp_status status = zpp_net_flows(hier->comm, (size_t)(hosts->hosts + hier->comm->ranks), &flow, err);
    if (status != ZPP_OK) return status;
    for (int k = 1; k < hosts->hosts; k++) {
        const int h = (hosts->mine + k) % hosts->hosts;
        flow[count++] = zpp_flow_out(receiver_of(hosts, hier->me, h), 0, src, bytes);
        for (int i = 0; i < hosts->count[h]; i++) {
            const int rank = zpp_rank_at(hosts, h, i);
            if (receiver_of(hosts, rank, hosts->mine) != hier->me) continue;
            flow[count++] = zpp_flow_in(rank, 0, dst[rank], bytes);
        }
    }
    return zpp_flows_run(&hier->internode, flow, count, NULL, NULL, err);
}

static bool is_short(const struct zpp_hier *hier, size_t bytes) {
    return hier->comm->door && hier->hosts->even && bytes <= ZPP_SHARED_BYTES / (size_t)hier->hosts->hosts;
}

static zpp_status gather_shared(struct zpp_hier *hier, void *const *dst, const void *src, size_t bytes,
                                struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    uint8_t *blocks;
    zpp_status status = zpp_net_scratch(hier->comm, bytes * (size_t)hosts->hosts, &blocks, err);
    if (status != ZPP_OK) return status;
    memcpy(blocks, src, bytes);
    status = zpp_hier_share(hier, blocks, bytes, 0, err);
    for (int k = 1; status == ZPP_OK && k < hosts->hosts; k++)
        memcpy(dst[zpp_rank_at(hosts, (hosts->mine + k) % hosts->hosts, hier->place)], blocks + (size_t)k * bytes,
               bytes);
    return status;
}

/* Share the pieces of another host, each held by the rank here that received it, with all ranks here. */
static zpp_status share(struct zpp_hier *hier, int host, void *const *dst, size_t bytes, struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    zpp_status status = ZPP_OK;
    if (hosts->count[host] == hier->locals) {
        void *there[ZPP_RANKS_MAX];
        for (int i = 0; i < hier->locals; i++) there[i] = dst[zpp_rank_at(hosts, host, i)];
        status = zpp_hier_intranode(&hier->after, err);
        return status == ZPP_OK ? zpp_coll_all_gather(&hier->after, there, there[hier->place], bytes, err)
                                : status;
    }
    for (int i = 0; status == ZPP_OK && i < hosts->count[host]; i++) {
        status = zpp_hier_intranode(&hier->after, err);
        if (status != ZPP_OK) break;
        status = zpp_coll_broadcast(&hier->after, dst[zpp_rank_at(hosts, host, i)], bytes, i % hier->locals, err);
    }
    return status;
}

zpp_status zpp_hier_all_gather(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_call *call = hier->call;
    const struct zpp_hosts *hosts = hier->hosts;
    const size_t bytes = call->elems * zpp_dtype_bytes(call->dtype);
    void *dst[ZPP_RANKS_MAX], *here[ZPP_RANKS_MAX];
    for (int r = 0; r < hier->comm->ranks; r++)
        dst[r] = call->dsts ? call->dsts[r] : (uint8_t *)call->dst + (size_t)r * bytes;
    for (int i = 0; i < hier->locals; i++) here[i] = dst[zpp_rank_at(hosts, hosts->mine, i)];
    zpp_status status = zpp_hier_intranode(&hier->before, err);
    if (status == ZPP_OK) status = zpp_coll_all_gather(&hier->before, here, call->src, bytes, err);
    if (status == ZPP_OK)
        status = (is_short(hier, bytes) ? gather_shared : gather_internode)(hier, dst, call->src, bytes, err);
    for (int h = 0; status == ZPP_OK && h < hosts->hosts && hier->locals > 1; h++)
        if (h != hosts->mine) status = share(hier, h, dst, bytes, err);
    return status;
}

/* --- broadcast --------------------------------------------------------------------------------------------------- */

zpp_status zpp_hier_broadcast(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_call *call = hier->call;
    const struct zpp_hosts *hosts = hier->hosts;
    const size_t bytes = call->elems * zpp_dtype_bytes(call->dtype);
    const bool root_here = hosts->host_of[call->root] == hosts->mine;
    const int root_place = root_here ? hosts->index_of[call->root] : 0;
    struct zpp_flow *flow = NULL;
    size_t count = 0;
    zpp_status status = zpp_net_flows(hier->comm, (size_t)hosts->hosts, &flow, err);
    if (status != ZPP_OK) return status;
    for (int h = 0; hier->me == call->root && h < hosts->hosts; h++)
        if (h != hosts->mine) flow[count++] = zpp_flow_out(zpp_rank_at(hosts, h, 0), 0, call->dst, bytes);
    if (!root_here && hier->place == 0) flow[count++] = zpp_flow_in(call->root, 0, call->dst, bytes);
    if (count) status = zpp_flows_run(&hier->internode, flow, count, NULL, NULL, err);
    if (status == ZPP_OK) status = zpp_hier_intranode(&hier->after, err);
    return status == ZPP_OK ? zpp_coll_broadcast(&hier->after, call->dst, bytes, root_place, err) : status;
}

/* --- all_to_all, gather, scatter --------------------------------------------------------------------------------- */

static zpp_status all_to_all_intranode(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_call *call = hier->call;
    const struct zpp_hosts *hosts = hier->hosts;
    void *dsts[ZPP_RANKS_MAX];
    const void *srcs[ZPP_RANKS_MAX];
    size_t dst_bytes[ZPP_RANKS_MAX], src_bytes[ZPP_RANKS_MAX];
    for (int i = 0; i < hier->locals; i++) {
        const int rank = zpp_rank_at(hosts, hosts->mine, i);
        dsts[i] = call->dsts[rank];
        srcs[i] = call->srcs[rank];
        dst_bytes[i] = call->dst_bytes[rank];
        src_bytes[i] = call->src_bytes[rank];
    }
    struct zpp_call inside = *call;
    inside.dsts = dsts;
    inside.srcs = srcs;
    inside.dst_bytes = dst_bytes;
    inside.src_bytes = src_bytes;
    inside.take = NULL; /* pieces from other hosts lie in `dsts`, so all are to */
    const zpp_status status = zpp_hier_intranode(&hier->before, err);
    return status == ZPP_OK ? zpp_coll_all_to_all(&hier->before, &inside, err) : status;
}

zpp_status zpp_hier_all_to_all(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_call *call = hier->call;
    struct zpp_comm *comm = hier->comm;
    struct zpp_flow *flow = NULL;
    size_t count = 0;
    zpp_status status = zpp_net_flows(hier->comm, 2 * (size_t)comm->ranks, &flow, err);
    if (status != ZPP_OK) return status;
    for (int k = 1; k < comm->ranks; k++) { /* each rank begins with the next one, so that receivers differ */
        const int to = (hier->me + k) % comm->ranks, from = (hier->me + comm->ranks - k) % comm->ranks;
        if (zpp_net_elsewhere(comm, to)) flow[count++] = zpp_flow_out(to, 0, call->srcs[to], call->src_bytes[to]);
        if (zpp_net_elsewhere(comm, from))
            flow[count++] = zpp_flow_in(from, 0, call->dsts[from], call->dst_bytes[from]);
    }
    status = all_to_all_intranode(hier, err);
    return status == ZPP_OK ? zpp_flows_run(&hier->internode, flow, count, NULL, NULL, err) : status;
}
