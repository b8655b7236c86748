/* SPDX-License-Identifier: Apache-2.0
 *
 * Reduce-scatter: src holds N shards; dst = shard `rank` combined over all ranks, in rank order. Each rank reads
 * (N - 1) * shard bytes from its peers:
 *
 *   small     all of src beside the signature; one publication, one round of reads
 *   in place  every src lies in an arena: its shards are combined straight from there, then one final phase
 *   staged    rounds: this rank's slot holds, for each peer, the next piece of that peer's shard; the pieces of the
 *             round before are combined
 */
#include <string.h>

#include "../internal.h"
#include "../reduce.h"

struct job {
    struct zpp_wait_ctx *wait_ctx;
    const struct zpp_tensor *tensor; /* elems, bytes: of one shard */
    uint8_t *dst;
    const uint8_t *src;
    size_t elem_bytes, piece_bytes; /* of one peer in a slot; whole cache lines, so whole elements */
};

static void combine(const struct job *job, const uint8_t *const *part, size_t at, size_t bytes) {
    zpp_reduce_op_sources(job->dst + at, job->tensor->op, (const void *const *)part, job->wait_ctx->comm->ranks,
                          job->tensor->dtype, bytes / job->elem_bytes, zpp_own_nontemporal(job->wait_ctx->comm));
}

static zpp_status small(const struct job *job, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t shard_bytes = job->tensor->bytes, all = shard_bytes * (size_t)comm->ranks;
    const zpp_status status = zpp_exchange_small(job->wait_ctx, job->src, all, err);
    const uint8_t *part[ZPP_RANKS_MAX];
    if (status != ZPP_OK) return status;
    for (int r = 0; r < comm->ranks; r++)
        part[r] = (r == comm->rank ? job->src : zpp_payload(comm, r, all)) + (size_t)comm->rank * shard_bytes;
    combine(job, part, 0, shard_bytes);
    return ZPP_OK;
}

static zpp_status in_place(const struct job *job, const uint8_t *const *tensor, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const uint64_t start_ns = zpp_now_ns();
    const uint8_t *part[ZPP_RANKS_MAX];
    for (int r = 0; r < comm->ranks; r++) part[r] = tensor[r] + (size_t)comm->rank * job->tensor->bytes;
    combine(job, part, 0, job->tensor->bytes);
    return zpp_step_last(job->wait_ctx, start_ns, err);
}

static size_t piece_at(const struct job *job, size_t at) {
    const size_t left = job->tensor->bytes - at;
    return left < job->piece_bytes ? left : job->piece_bytes;
}

static void fill(const void *ctx, size_t round, uint8_t *slot) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * job->piece_bytes;
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank) continue;
        const uint8_t *from = job->src + (size_t)r * job->tensor->bytes + at;
        zpp_stage_copy(comm, slot + (size_t)r * job->piece_bytes, from, piece_at(job, at));
    }
}

static void take(const void *ctx, size_t round, uint32_t staged) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * job->piece_bytes;
    const uint8_t *part[ZPP_RANKS_MAX];
    for (int r = 0; r < comm->ranks; r++)
        part[r] = r == comm->rank ? job->src + (size_t)r * job->tensor->bytes + at
                                  : zpp_stage(comm, r, 0, staged) + (size_t)comm->rank * job->piece_bytes;
    combine(job, part, at, piece_at(job, at));
}

static zpp_status staged(const struct job *job, struct zpp_err *err) {
    const size_t rounds = (job->tensor->bytes + job->piece_bytes - 1) / job->piece_bytes;
    const struct zpp_pipeline pipeline = {rounds, job, fill, take, NULL};
    return zpp_pipeline_run(job->wait_ctx, &pipeline, err);
}

zpp_status zpp_coll_reduce_scatter(struct zpp_wait_ctx *wait_ctx, void *dst, const void *src,
                                   const struct zpp_tensor *tensor, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const size_t all = tensor->bytes * (size_t)comm->ranks;
    const struct job job = {wait_ctx,
                            tensor,
                            dst,
                            src,
                            zpp_dtype_bytes(tensor->dtype),
                            ZPP_STAGE_BYTES / (size_t)comm->ranks & ~(size_t)(ZPP_LINE_BYTES - 1)};
    const uint8_t *parts[ZPP_RANKS_MAX];
    bool all_in_arenas = false;
    zpp_count_call(comm, ZPP_TRAFFIC_REDUCE_SCATTER, tensor->bytes * (uint64_t)(comm->ranks - 1));
    if (comm->ranks == 1) {
        const uint8_t *const own[1] = {src};
        if (dst != src) combine(&job, own, 0, tensor->bytes);
        return ZPP_OK;
    }
    if (all <= ZPP_SMALL_BYTES) return small(&job, err);
    const zpp_status status = zpp_exchange_place(wait_ctx, src, all, &all_in_arenas, parts, err);
    if (status != ZPP_OK) return status;
    return all_in_arenas ? in_place(&job, parts, err) : staged(&job, err);
}
