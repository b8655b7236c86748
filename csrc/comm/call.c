/* SPDX-License-Identifier: Apache-2.0
 *
 * The doors of the collectives: arguments are checked here, the signature is made here, then one algorithm runs
 * (coll_*.c). A call that other threads queued before (async.c) goes first, so that all ranks keep one order.
 */
#include "shm/channel.h"
#include "tcp/net.h"
#include "reduce.h"

static bool is_quantised(const struct zpp_call *call) {
    return call->coll == ZPP_COLL_ALL_GATHER_QUANT || call->coll == ZPP_COLL_REDUCE_SCATTER_QUANT ||
           call->coll == ZPP_COLL_ALL_REDUCE_QUANT;
}

static zpp_status check_call(const struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err) {
    const size_t elem_bytes = zpp_dtype_bytes(call->dtype);
    if (call->coll < ZPP_COLL_BARRIER || call->coll >= ZPP_COLLS)
        return zpp_fail(err, ZPP_INVALID, "comm: collective %d is none", (int)call->coll);
    const bool rooted = call->coll == ZPP_COLL_BROADCAST || call->coll == ZPP_COLL_REDUCE ||
                        call->coll == ZPP_COLL_GATHER || call->coll == ZPP_COLL_SCATTER;
    if (elem_bytes == 0 && call->coll != ZPP_COLL_BARRIER)
        return zpp_fail(err, ZPP_INVALID, "comm: dtype %d is none that a collective knows", (int)call->dtype);
    if (rooted && (call->root < 0 || call->root >= comm->ranks))
        return zpp_fail(err, ZPP_INVALID, "comm: root %d, wanted a rank of group \"%s\", 0..%d", call->root, comm->name,
                        comm->ranks - 1);
    if (call->object >= 1u << 24)
        return zpp_fail(err, ZPP_INVALID, "comm: object %u of a collective, wanted less than %u", call->object,
                        1u << 24);
    if (elem_bytes && call->elems > SIZE_MAX / 2 / elem_bytes / (size_t)comm->ranks)
        return zpp_fail(err, ZPP_INVALID, "comm: %zu elements are more than memory holds", call->elems);
    if (call->coll == ZPP_COLL_ALL_REDUCE || call->coll == ZPP_COLL_REDUCE || call->coll == ZPP_COLL_REDUCE_SCATTER)
        return zpp_reduce_check(call->op, call->dtype, err);
    if (is_quantised(call)) return zpp_quant_check(comm, call, err);
    return ZPP_OK;
}

static struct zpp_sig sig_of_kind(const struct zpp_call *call) {
    switch (call->coll) {
    case ZPP_COLL_ALL_REDUCE:
    case ZPP_COLL_REDUCE_SCATTER: return zpp_sig_make(call->coll, call->dtype, call->op, ZPP_NO_ROOT, call->elems);
    case ZPP_COLL_REDUCE: return zpp_sig_make(call->coll, call->dtype, call->op, (unsigned)call->root, call->elems);
    case ZPP_COLL_BROADCAST: return zpp_sig_make(call->coll, call->dtype, ZPP_NO_OP, (unsigned)call->root, call->elems);
    case ZPP_COLL_GATHER:
    case ZPP_COLL_SCATTER: return zpp_sig_make(call->coll, call->dtype, ZPP_NO_OP, (unsigned)call->root, 0);
    case ZPP_COLL_ALL_GATHER: return zpp_sig_make(call->coll, call->dtype, ZPP_NO_OP, ZPP_NO_ROOT, call->elems);
    case ZPP_COLL_ALL_TO_ALL: return zpp_sig_make(call->coll, call->dtype, ZPP_NO_OP, ZPP_NO_ROOT, 0);
    default: return zpp_sig_make(call->coll, ZPP_U8, ZPP_NO_OP, ZPP_NO_ROOT, 0);
    }
}

static struct zpp_sig sig_of(const struct zpp_comm *comm, const struct zpp_call *call) {
    if (is_quantised(call)) return zpp_quant_sig(comm, call);
    struct zpp_sig sig = sig_of_kind(call);
    sig.what |= (uint64_t)call->object << 40;
    if (call->beside) sig.what |= ZPP_SIG_BESIDE;
    return sig;
}

void zpp_call_describe(const struct zpp_comm *comm, const struct zpp_call *call, char *text, size_t room) {
    const struct zpp_sig sig = sig_of(comm, call);
    zpp_sig_describe(&sig, text, room);
}

/* One dst for all ranks is N pieces one after the other. */
static zpp_status all_gather(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, size_t bytes,
                             struct zpp_err *err) {
    void *dst[ZPP_RANKS_MAX];
    if (call->dsts) return zpp_coll_all_gather(wait_ctx, call->dsts, call->src, bytes, err);
    for (int r = 0; r < wait_ctx->comm->ranks; r++) dst[r] = (uint8_t *)call->dst + (size_t)r * bytes;
    return zpp_coll_all_gather(wait_ctx, dst, call->src, bytes, err);
}

static zpp_status run(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    const struct zpp_tensor tensor = {call->dtype, call->op, call->elems, call->elems * zpp_dtype_bytes(call->dtype)};
    if (call->beside) return zpp_exchange(wait_ctx, err);
    switch (call->coll) {
    case ZPP_COLL_BARRIER: return zpp_exchange(wait_ctx, err);
    case ZPP_COLL_ALL_REDUCE: return zpp_coll_all_reduce(wait_ctx, call->dst, &tensor, err);
    case ZPP_COLL_REDUCE: return zpp_coll_reduce(wait_ctx, call->dst, &tensor, call->root, err);
    case ZPP_COLL_ALL_GATHER: return all_gather(wait_ctx, call, tensor.bytes, err);
    case ZPP_COLL_REDUCE_SCATTER: return zpp_coll_reduce_scatter(wait_ctx, call->dst, call->src, &tensor, err);
    case ZPP_COLL_BROADCAST: return zpp_coll_broadcast(wait_ctx, call->dst, tensor.bytes, call->root, err);
    case ZPP_COLL_ALL_TO_ALL:
    case ZPP_COLL_GATHER:
    case ZPP_COLL_SCATTER: return zpp_coll_all_to_all(wait_ctx, call, err);
    case ZPP_COLL_ALL_GATHER_QUANT:
    case ZPP_COLL_REDUCE_SCATTER_QUANT:
    case ZPP_COLL_ALL_REDUCE_QUANT: return zpp_coll_quant(wait_ctx, call, err);
    default: return zpp_fail(err, ZPP_INVALID, "comm: collective %d is none", (int)call->coll);
    }
}

/* --- transports -------------------------------------------------------------------------------------------------- */

static bool in_memory(const struct zpp_comm *comm, int rank) { return !zpp_net_elsewhere(comm, rank); }

static bool anywhere(const struct zpp_comm *comm, int rank) { return comm->net && rank < comm->ranks; }

const struct zpp_transport zpp_transport_memory = {"shared memory", in_memory, run, &zpp_channels_memory};
const struct zpp_transport zpp_transport_tcp = {"TCP", anywhere, zpp_hier_run, &zpp_channels_tcp};

const struct zpp_transport *zpp_transport_to(const struct zpp_comm *comm, int rank) {
    static const struct zpp_transport *const table[] = {&zpp_transport_memory, &zpp_transport_tcp};
    size_t at = 0;
    while (at + 1 < sizeof table / sizeof *table && !table[at]->reaches(comm, rank)) at++;
    return table[at];
}

/* Runs in the calling thread, whatever is queued. */
zpp_status zpp_call_now(zpp_comm *comm, const struct zpp_call *call, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_wait_ctx wait_ctx;
    zpp_status status = check_call(comm, call, err);
    if (status != ZPP_OK) return status;
    if (atomic_exchange_explicit(&comm->busy, true, memory_order_acquire))
        return zpp_fail(err, ZPP_STATE,
                        "comm: two threads of rank %d are in collectives of group \"%s\" at once, so their order is no "
                        "order; give each thread a group of its own",
                        comm->rank, comm->name);
    status = zpp_enter(comm, sig_of(comm, call), wait, &wait_ctx, err);
    if (status == ZPP_OK) status = (comm->net ? &zpp_transport_tcp : &zpp_transport_memory)->run(&wait_ctx, call, err);
    atomic_store_explicit(&comm->busy, false, memory_order_release);
    return status;
}

zpp_status zpp_comm_call(zpp_comm *comm, const struct zpp_call *call, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    const zpp_status status = zpp_async_drain(comm, wait, err);
    return status == ZPP_OK ? zpp_call_now(comm, call, wait, err) : status;
}

zpp_status zpp_all_reduce(zpp_comm *comm, void *data, size_t elems, zpp_dtype dtype, zpp_reduce_op op,
                          const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_REDUCE, .dtype = dtype, .op = op, .dst = data, .elems = elems};
    return zpp_comm_call(comm, &call, wait, err);
}

zpp_status zpp_all_gather(zpp_comm *comm, void *dst, const void *src, size_t src_bytes, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    const struct zpp_call call = {
        .coll = ZPP_COLL_ALL_GATHER, .dtype = ZPP_U8, .dst = dst, .src = src, .elems = src_bytes};
    return zpp_comm_call(comm, &call, wait, err);
}

zpp_status zpp_reduce_scatter(zpp_comm *comm, void *dst, const void *src, size_t dst_elems, zpp_dtype dtype,
                              zpp_reduce_op op, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_call call = {
        .coll = ZPP_COLL_REDUCE_SCATTER, .dtype = dtype, .op = op, .dst = dst, .src = src, .elems = dst_elems};
    return zpp_comm_call(comm, &call, wait, err);
}

zpp_status zpp_broadcast(zpp_comm *comm, void *data, size_t bytes, int root, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    const struct zpp_call call = {
        .coll = ZPP_COLL_BROADCAST, .dtype = ZPP_U8, .root = root, .dst = data, .elems = bytes};
    return zpp_comm_call(comm, &call, wait, err);
}

zpp_status zpp_barrier(zpp_comm *comm, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_call call = {.coll = ZPP_COLL_BARRIER};
    return zpp_comm_call(comm, &call, wait, err);
}
