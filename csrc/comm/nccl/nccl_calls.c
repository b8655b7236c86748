/* SPDX-License-Identifier: Apache-2.0
 *
 * Translation of a call (comm.h) to NCCL's functions. Collectives that only move data move bytes, so they take every
 * dtype; reductions take NCCL's dtypes and operations, and bool, whose sum is an or. Pieces for each rank (all-to-all,
 * gather, scatter) are sends and receives, pieces from each rank (all-gather into a list) are broadcasts, of one
 * group.
 */
#include "nccl_internal.h"

enum { NONE = -1 };

static int dtype_of(zpp_dtype dtype) {
    static const int codes[ZPP_DTYPES] = {
        [ZPP_F32] = ZPP_NCCL_FLOAT32, [ZPP_BF16] = ZPP_NCCL_BFLOAT16, [ZPP_F16] = ZPP_NCCL_FLOAT16,
        [ZPP_F64] = ZPP_NCCL_FLOAT64, [ZPP_I8] = ZPP_NCCL_INT8,       [ZPP_U8] = ZPP_NCCL_UINT8,
        [ZPP_I16] = NONE,             [ZPP_I32] = ZPP_NCCL_INT32,     [ZPP_I64] = ZPP_NCCL_INT64,
        [ZPP_BOOL] = ZPP_NCCL_UINT8,
    };
    return (unsigned)dtype < ZPP_DTYPES ? codes[dtype] : NONE;
}

static int op_of(zpp_reduce_op op, zpp_dtype dtype) {
    const bool truth = dtype == ZPP_BOOL; /* 0 or 1: the larger is the or, the smaller the and */
    switch (op) {
    case ZPP_SUM: return truth ? ZPP_NCCL_MAX : ZPP_NCCL_SUM;
    case ZPP_AVG: return ZPP_NCCL_AVG;
    case ZPP_PRODUCT: return truth ? ZPP_NCCL_MIN : ZPP_NCCL_PROD;
    case ZPP_MIN: return ZPP_NCCL_MIN;
    case ZPP_MAX: return ZPP_NCCL_MAX;
    case ZPP_BAND: return truth ? ZPP_NCCL_MIN : NONE;
    case ZPP_BOR: return truth ? ZPP_NCCL_MAX : NONE;
    default: return NONE;
    }
}

zpp_status zpp_nccl_check(const struct zpp_nccl *nccl, const struct zpp_call *call, struct zpp_err *err) {
    if (call->coll < ZPP_COLL_BARRIER || call->coll > ZPP_COLL_SCATTER)
        return zpp_fail(err, ZPP_NOT_BUILT, "comm: collective %d on CUDA memory is not supported yet", (int)call->coll);
    zpp_status status = zpp_root_check(nccl->control, call, err);
    if (status != ZPP_OK || !zpp_coll_reduces(call->coll)) return status;
    status = zpp_reduce_check(call->op, call->dtype, err);
    if (status != ZPP_OK) return status;
    if (dtype_of(call->dtype) == NONE || op_of(call->op, call->dtype) == NONE)
        return zpp_fail(err, ZPP_INVALID, "comm: %s of %s on CUDA memory, which NCCL does not have; use CPU tensors",
                        zpp_reduce_op_name(call->op), zpp_dtype_name(call->dtype));
    return ZPP_OK;
}

/* --- one call ----------------------------------------------------------------------------------------------------- */

struct way {
    const struct zpp_nccl_api *api;
    ncclComm_t comm;
    cudaStream_t stream;
    int rank, ranks;
};

/* Keep the first failure. */
static void note(ncclResult_t *result, ncclResult_t one) {
    if (*result == ZPP_NCCL_SUCCESS && one != ZPP_NCCL_IN_PROGRESS) *result = one;
}

static ncclResult_t all_gather(const struct way *way, const struct zpp_call *call, size_t bytes) {
    ncclResult_t result = ZPP_NCCL_SUCCESS;
    if (!call->dsts)
        return way->api->ncclAllGather(call->src, call->dst, bytes, ZPP_NCCL_UINT8, way->comm, way->stream);
    for (int r = 0; r < way->ranks; r++)
        note(&result, way->api->ncclBroadcast(r == way->rank ? call->src : call->dsts[r], call->dsts[r], bytes,
                                              ZPP_NCCL_UINT8, r, way->comm, way->stream));
    return result;
}

/* All-to-all, gather and scatter; 0 bytes: no send or receive. */
static ncclResult_t pieces(const struct way *way, const struct zpp_call *call) {
    ncclResult_t result = ZPP_NCCL_SUCCESS;
    for (int r = 0; r < way->ranks; r++) {
        if (call->src_bytes[r])
            note(&result, way->api->ncclSend(call->srcs[r], call->src_bytes[r], ZPP_NCCL_UINT8, r, way->comm,
                                             way->stream));
        if (call->dst_bytes[r])
            note(&result, way->api->ncclRecv(call->dsts[r], call->dst_bytes[r], ZPP_NCCL_UINT8, r, way->comm,
                                             way->stream));
    }
    return result;
}

static ncclResult_t one(const struct way *way, const struct zpp_call *call) {
    const struct zpp_nccl_api *api = way->api;
    const size_t bytes = call->elems * zpp_dtype_bytes(call->dtype);
    const int dtype = dtype_of(call->dtype), op = op_of(call->op, call->dtype);
    switch (call->coll) {
    case ZPP_COLL_ALL_REDUCE:
        return api->ncclAllReduce(call->dst, call->dst, call->elems, dtype, op, way->comm, way->stream);
    case ZPP_COLL_REDUCE:
        return api->ncclReduce(call->dst, call->dst, call->elems, dtype, op, call->root, way->comm, way->stream);
    case ZPP_COLL_REDUCE_SCATTER:
        return api->ncclReduceScatter(call->src, call->dst, call->elems, dtype, op, way->comm, way->stream);
    case ZPP_COLL_BROADCAST:
        return api->ncclBroadcast(call->dst, call->dst, bytes, ZPP_NCCL_UINT8, call->root, way->comm, way->stream);
    case ZPP_COLL_ALL_GATHER: return all_gather(way, call, bytes);
    case ZPP_COLL_BARRIER: return ZPP_NCCL_SUCCESS; /* no bytes: only its signature counts */
    default: return pieces(way, call);
    }
}

ncclResult_t zpp_nccl_enqueue(const struct zpp_nccl *nccl, const struct zpp_call *calls, size_t count,
                              const struct zpp_nccl_work *transfers, void *native) {
    const struct way way = {nccl->api, nccl->comm, native, nccl->control->rank, nccl->control->ranks};
    ncclResult_t result = nccl->api->ncclGroupStart();
    if (result != ZPP_NCCL_SUCCESS) return result;
    for (size_t i = 0; i < count; i++) note(&result, one(&way, &calls[i]));
    for (; transfers; transfers = transfers->next) {
        const struct zpp_call *call = &transfers->transfer;
        if (transfers->sends)
            note(&result, way.api->ncclSend(call->src, call->elems, ZPP_NCCL_UINT8, call->root, way.comm, native));
        else
            note(&result, way.api->ncclRecv(call->dst, call->elems, ZPP_NCCL_UINT8, call->root, way.comm, native));
    }
    const ncclResult_t ended = nccl->api->ncclGroupEnd();
    return result == ZPP_NCCL_SUCCESS ? ended : result;
}

/* --- as a row of the table ---------------------------------------------------------------------------------------- */

static bool carries(const struct zpp_comm *comm, const struct zpp_call *call) {
    (void)comm;
    return call->beside;
}

/* NCCL moves the bytes (zpp_nccl_submit); the group's own transport only compares the call. */
static zpp_status run(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    return wait_ctx->comm->transport->identify(wait_ctx, call, err);
}

const struct zpp_transport zpp_transport_nccl = {.name = "NCCL", .carries = carries, .run = run};
