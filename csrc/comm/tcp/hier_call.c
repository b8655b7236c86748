/* SPDX-License-Identifier: Apache-2.0
 *
 * A collective over several hosts: the ranks compare signatures (inside each host, as in a group of one host; between
 * hosts by the frames of the transfers), run its algorithm (hier_move.c, hier_reduce.c, hier_quant.c), and count the
 * bytes it moved.
 */
#include "net.h"

/* A wait for the network lasts a little longer than a wait inside a host, and a wait for the result of that longer
 * still, so the rank that waits for the failed rank itself reports it first. */
static const uint64_t INTERNODE_NS = 1000000000u, AFTER_NS = 3000000000u;

static void set_wait_ctx(const struct zpp_hier *hier, const struct zpp_wait_ctx *like, struct zpp_comm *comm,
                         uint64_t more_ns, struct zpp_wait *wait, struct zpp_wait_ctx *out) {
    const uint64_t timeout_ns = like->wait ? like->wait->timeout_ns : hier->comm->timeout_ns;
    *wait = like->wait ? *like->wait : (struct zpp_wait){0, NULL, NULL};
    wait->timeout_ns = timeout_ns ? timeout_ns + more_ns : 0;
    *out = *like;
    out->comm = comm;
    out->wait = wait;
    out->start_ns = out->check_ns = out->log_ns = 0;
}

static enum zpp_traffic_kind kind_of(enum zpp_coll coll) {
    switch (coll) {
    case ZPP_COLL_ALL_REDUCE:
    case ZPP_COLL_ALL_REDUCE_QUANT: return ZPP_TRAFFIC_ALL_REDUCE;
    case ZPP_COLL_ALL_GATHER:
    case ZPP_COLL_ALL_GATHER_QUANT: return ZPP_TRAFFIC_ALL_GATHER;
    case ZPP_COLL_REDUCE_SCATTER:
    case ZPP_COLL_REDUCE_SCATTER_QUANT: return ZPP_TRAFFIC_REDUCE_SCATTER;
    case ZPP_COLL_BROADCAST: return ZPP_TRAFFIC_BROADCAST;
    case ZPP_COLL_ALL_TO_ALL: return ZPP_TRAFFIC_ALL_TO_ALL;
    default: return ZPP_TRAFFIC_OTHER;
    }
}

static uint64_t intranode_bytes(const struct zpp_comm *local) {
    uint64_t sum = 0;
    for (int kind = 0; kind < ZPP_TRAFFIC_KINDS; kind++)
        sum += atomic_load_explicit(&local->traffic_bytes[kind], memory_order_relaxed);
    return sum;
}

static zpp_status run_parts(struct zpp_hier *hier, struct zpp_err *err) {
    switch (hier->call->coll) {
    case ZPP_COLL_BARRIER: return zpp_hier_barrier(hier, err);
    case ZPP_COLL_ALL_REDUCE: return zpp_hier_all_reduce(hier, err);
    case ZPP_COLL_REDUCE: return zpp_hier_reduce(hier, err);
    case ZPP_COLL_REDUCE_SCATTER: return zpp_hier_reduce_scatter(hier, err);
    case ZPP_COLL_ALL_GATHER: return zpp_hier_all_gather(hier, err);
    case ZPP_COLL_BROADCAST: return zpp_hier_broadcast(hier, err);
    case ZPP_COLL_ALL_GATHER_QUANT:
    case ZPP_COLL_REDUCE_SCATTER_QUANT:
    case ZPP_COLL_ALL_REDUCE_QUANT: return zpp_hier_quant(hier, err);
    default: return zpp_hier_all_to_all(hier, err);
    }
}

/* Run a collective; `parts` is its algorithm, between the exchange of signatures and the traffic count. */
static zpp_status run_as(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call,
                         zpp_status (*parts)(struct zpp_hier *hier, struct zpp_err *err), struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct zpp_net *net = comm->net;
    struct zpp_hier hier = {.comm = comm,
                            .net = net,
                            .hosts = &net->hosts,
                            .call = call,
                            .me = comm->rank,
                            .place = net->hosts.index_of[comm->rank],
                            .locals = net->local->ranks};
    const enum zpp_traffic_kind kind = kind_of(call->coll);
    const uint64_t intranode_before = intranode_bytes(net->local), network_before = net->received_bytes;
    net->local->timeout_ns = comm->timeout_ns;
    set_wait_ctx(&hier, wait_ctx, net->local, 0, &hier.before_wait, &hier.before);
    set_wait_ctx(&hier, wait_ctx, comm, INTERNODE_NS, &hier.internode_wait, &hier.internode);
    set_wait_ctx(&hier, wait_ctx, net->local, AFTER_NS, &hier.after_wait, &hier.after);
    zpp_status status = zpp_hier_intranode(&hier.before, err);
    if (status == ZPP_OK) status = zpp_exchange(&hier.before, err);
    if (status == ZPP_OK) status = parts(&hier, err);
    const uint64_t network = net->received_bytes - network_before;
    zpp_count_call(comm, kind, intranode_bytes(net->local) - intranode_before + network);
    atomic_fetch_add_explicit(&net->network_bytes[kind], network, memory_order_relaxed);
    return status;
}

/* --- as a row of the table --------------------------------------------------------------------------------------- */

static zpp_status run(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    return run_as(wait_ctx, call, run_parts, err);
}

static zpp_status identify(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    return run_as(wait_ctx, call, zpp_hier_barrier, err);
}

static bool carries(const struct zpp_comm *comm, const struct zpp_call *call) {
    (void)call;
    return comm->net;
}

static bool reaches(const struct zpp_comm *comm, int rank) { return comm->net && rank < comm->ranks; }

const struct zpp_transport zpp_transport_tcp = {.name = "TCP",
                                                .carries = carries,
                                                .run = run,
                                                .identify = identify,
                                                .reaches = reaches,
                                                .channels = &zpp_channels_tcp,
                                                .gone = zpp_net_gone,
                                                .tell = zpp_net_tell};
