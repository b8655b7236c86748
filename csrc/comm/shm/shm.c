/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared memory as a row of the table of transports: the ranks of one host. One algorithm a collective (coll_*.c).
 */
#include "../tcp/net.h"

typedef zpp_status (*run_fn)(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err);

static struct zpp_tensor tensor_of(const struct zpp_call *call) {
    return (struct zpp_tensor){call->dtype, call->op, call->elems, call->elems * zpp_dtype_bytes(call->dtype)};
}

static zpp_status barrier(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    (void)call;
    return zpp_exchange(wait_ctx, err);
}

static zpp_status all_reduce(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    const struct zpp_tensor tensor = tensor_of(call);
    return zpp_coll_all_reduce(wait_ctx, call->dst, &tensor, err);
}

static zpp_status reduce(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    const struct zpp_tensor tensor = tensor_of(call);
    return zpp_coll_reduce(wait_ctx, call->dst, &tensor, call->root, err);
}

static zpp_status reduce_scatter(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    const struct zpp_tensor tensor = tensor_of(call);
    return zpp_coll_reduce_scatter(wait_ctx, call->dst, call->src, &tensor, err);
}

static zpp_status broadcast(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    return zpp_coll_broadcast(wait_ctx, call->dst, tensor_of(call).bytes, call->root, err);
}

/* One `dst` for all ranks consists of N pieces, one after the other. */
static zpp_status all_gather(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    const size_t bytes = tensor_of(call).bytes;
    void *dst[ZPP_RANKS_MAX];
    if (call->dsts) return zpp_coll_all_gather(wait_ctx, call->dsts, call->src, bytes, err);
    for (int r = 0; r < wait_ctx->comm->ranks; r++) dst[r] = (uint8_t *)call->dst + (size_t)r * bytes;
    return zpp_coll_all_gather(wait_ctx, dst, call->src, bytes, err);
}

static zpp_status run(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    static const run_fn algorithm[ZPP_COLLS] = {
        [ZPP_COLL_BARRIER] = barrier,
        [ZPP_COLL_ALL_REDUCE] = all_reduce,
        [ZPP_COLL_REDUCE] = reduce,
        [ZPP_COLL_ALL_GATHER] = all_gather,
        [ZPP_COLL_REDUCE_SCATTER] = reduce_scatter,
        [ZPP_COLL_BROADCAST] = broadcast,
        [ZPP_COLL_ALL_TO_ALL] = zpp_coll_all_to_all,
        [ZPP_COLL_GATHER] = zpp_coll_all_to_all,
        [ZPP_COLL_SCATTER] = zpp_coll_all_to_all,
        [ZPP_COLL_ALL_GATHER_QUANT] = zpp_coll_quant,
        [ZPP_COLL_REDUCE_SCATTER_QUANT] = zpp_coll_quant,
        [ZPP_COLL_ALL_REDUCE_QUANT] = zpp_coll_quant,
    };
    return algorithm[call->coll](wait_ctx, call, err);
}

static bool carries(const struct zpp_comm *comm, const struct zpp_call *call) {
    (void)call;
    return !comm->net;
}

static bool reaches(const struct zpp_comm *comm, int rank) { return !zpp_net_elsewhere(comm, rank); }

const struct zpp_transport zpp_transport_memory = {
    .name = "shared memory", .carries = carries, .run = run, .identify = barrier, .reaches = reaches,
    .channels = &zpp_channels_memory};
