/* SPDX-License-Identifier: Apache-2.0
 *
 * Reduce to one rank, in the order of ranks; the other ranks' tensors stay as they are. The root reads (N - 1) * bytes:
 *
 *   small     payload beside the signature
 *   in place  every tensor lies in an arena
 *   staged    rounds of ZPP_STAGE_BYTES; the root publishes empty rounds, the others take rounds without reading them
 */
#include <string.h>

#include "../internal.h"
#include "../reduce.h"

struct job {
    struct zpp_wait_ctx *wait_ctx;
    const struct zpp_tensor *tensor;
    uint8_t *data;
};

static void combine(const struct job *job, const uint8_t *const *part, size_t at, size_t bytes) {
    zpp_reduce_op_sources(job->data + at, job->tensor->op, (const void *const *)part, job->wait_ctx->comm->ranks,
                          job->tensor->dtype, bytes / zpp_dtype_bytes(job->tensor->dtype), false);
}

static zpp_status small(const struct job *job, bool root, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t bytes = job->tensor->bytes;
    const zpp_status status = zpp_exchange_small(job->wait_ctx, job->data, bytes, err);
    const uint8_t *part[ZPP_RANKS_MAX];
    if (status != ZPP_OK || !root) return status;
    for (int r = 0; r < comm->ranks; r++) part[r] = r == comm->rank ? job->data : zpp_payload(comm, r, bytes);
    combine(job, part, 0, bytes);
    return ZPP_OK;
}

static zpp_status send(const struct job *job, size_t at, size_t bytes, struct zpp_err *err) {
    uint8_t *slot = NULL;
    const zpp_status status = zpp_stage_begin(job->wait_ctx, 0, &slot, err);
    if (status != ZPP_OK) return status;
    memcpy(slot, job->data + at, bytes);
    zpp_stage_publish(job->wait_ctx->comm, 0);
    zpp_take_end(job->wait_ctx->comm, 0);
    return ZPP_OK;
}

static zpp_status receive(const struct job *job, size_t at, size_t bytes, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const uint8_t *part[ZPP_RANKS_MAX];
    zpp_stage_publish(comm, 0);
    const zpp_status status = zpp_take_begin(job->wait_ctx, 0, err);
    if (status != ZPP_OK) return status;
    for (int r = 0; r < comm->ranks; r++)
        part[r] = r == comm->rank ? job->data + at : zpp_stage(comm, r, 0, comm->taken[0]);
    combine(job, part, at, bytes);
    zpp_take_end(comm, 0);
    return ZPP_OK;
}

zpp_status zpp_coll_reduce(struct zpp_wait_ctx *wait_ctx, void *data, const struct zpp_tensor *tensor, int root,
                           struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const struct job job = {wait_ctx, tensor, data};
    const bool at_root = comm->rank == root;
    const uint8_t *parts[ZPP_RANKS_MAX];
    bool all_in_arenas = false;
    zpp_count_call(comm, ZPP_TRAFFIC_OTHER, at_root ? tensor->bytes * (uint64_t)(comm->ranks - 1) : 0);
    if (comm->ranks == 1) return ZPP_OK;
    if (tensor->bytes <= ZPP_SMALL_BYTES) return small(&job, at_root, err);
    zpp_status status = zpp_exchange_place(wait_ctx, data, tensor->bytes, &all_in_arenas, parts, err);
    if (status != ZPP_OK) return status;
    if (all_in_arenas) {
        if (at_root) combine(&job, parts, 0, tensor->bytes);
        return zpp_step_wait(wait_ctx, zpp_step_pass(comm), err);
    }
    for (size_t at = 0; status == ZPP_OK && at < tensor->bytes; at += ZPP_STAGE_BYTES) {
        const size_t left = tensor->bytes - at, bytes = left < ZPP_STAGE_BYTES ? left : ZPP_STAGE_BYTES;
        status = at_root ? receive(&job, at, bytes, err) : send(&job, at, bytes, err);
    }
    return status;
}
