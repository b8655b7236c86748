/* SPDX-License-Identifier: Apache-2.0
 *
 * One collective in the calling thread: arguments are checked here, the signature is made here, then the transport that
 * carries the call runs it.
 */
#include "internal.h"

static bool is_quantised(const struct zpp_call *call) {
    return call->coll == ZPP_COLL_ALL_GATHER_QUANT || call->coll == ZPP_COLL_REDUCE_SCATTER_QUANT ||
           call->coll == ZPP_COLL_ALL_REDUCE_QUANT;
}

static zpp_status check_call(const struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err) {
    const size_t elem_bytes = zpp_dtype_bytes(call->dtype);
    if (call->coll < ZPP_COLL_BARRIER || call->coll >= ZPP_COLLS)
        return zpp_fail(err, ZPP_INVALID, "comm: unknown collective %d, wanted %d to %d", (int)call->coll,
                        (int)ZPP_COLL_BARRIER, (int)ZPP_COLLS - 1);
    if (elem_bytes == 0 && call->coll != ZPP_COLL_BARRIER)
        return zpp_fail(err, ZPP_INVALID, "comm: unknown dtype %d of a collective", (int)call->dtype);
    const zpp_status status = zpp_root_check(comm, call, err);
    if (status != ZPP_OK) return status;
    if (call->object >= 1u << 24)
        return zpp_fail(err, ZPP_INVALID, "comm: object %u of a collective, wanted less than %u", call->object,
                        1u << 24);
    if (elem_bytes && call->elems > SIZE_MAX / 2 / elem_bytes / (size_t)comm->ranks)
        return zpp_fail(err, ZPP_INVALID, "comm: %zu elements exceed the address space", call->elems);
    if (zpp_coll_reduces(call->coll)) return zpp_reduce_check(call->op, call->dtype, err);
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
    case ZPP_COLL_ALL_TO_ALL: return zpp_sig_make(call->coll, call->dtype, ZPP_NO_OP, ZPP_NO_ROOT, call->rows);
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

void zpp_call_describe(const struct zpp_comm *comm, const struct zpp_call *call, char *text, size_t capacity) {
    const struct zpp_sig sig = sig_of(comm, call);
    zpp_sig_describe(&sig, text, capacity);
}

/* --- the table of transports, in the order in which they are asked ------------------------------------------------ */

static const struct zpp_transport *const table[] = {&zpp_transport_nccl, &zpp_transport_memory, &zpp_transport_tcp};
enum { ROWS = sizeof table / sizeof *table };

const struct zpp_transport *zpp_transport_of(const struct zpp_comm *comm, const struct zpp_call *call) {
    size_t at = 0;
    while (at + 1 < ROWS && !table[at]->carries(comm, call)) at++;
    return table[at];
}

const struct zpp_transport *zpp_transport_to(const struct zpp_comm *comm, int rank) {
    size_t at = 0;
    while (at + 1 < ROWS && !(table[at]->channels && table[at]->reaches(comm, rank))) at++;
    return table[at];
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

/* Runs in the calling thread, whatever is queued. */
zpp_status zpp_call_now(zpp_comm *comm, const struct zpp_call *call, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_wait_ctx wait_ctx;
    zpp_status status = check_call(comm, call, err);
    if (status != ZPP_OK) return status;
    if (atomic_exchange_explicit(&comm->busy, true, memory_order_acquire))
        return zpp_fail(err, ZPP_STATE,
                        "comm: rank %d called collectives of group \"%s\" from two threads at once; their order is "
                        "undefined. Use one group per thread",
                        comm->rank, comm->name);
    status = zpp_enter(comm, sig_of(comm, call), wait, &wait_ctx, err);
    if (status == ZPP_OK) status = zpp_transport_of(comm, call)->run(&wait_ctx, call, err);
    atomic_store_explicit(&comm->busy, false, memory_order_release);
    return status;
}
