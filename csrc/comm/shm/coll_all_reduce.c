/* SPDX-License-Identifier: Apache-2.0
 *
 * All-reduce in the order of ranks. Bytes read from peers, per rank:
 *
 *   small     (N - 1) * bytes: payload beside the signature, every rank combines everything; one publication, one round
 *             of reads
 *   staged    2 (N - 1) / N * bytes, reduce-scatter then all-gather within each round: stage 0 carries the chunk in,
 *             the owner of each shard combines it into stage 1, and every rank copies the other shards from there
 *   in place  2 (N - 1) / N * bytes: every tensor lies in an arena. Per round each rank combines its shard of all
 *             tensors into its own tensor, and copies the other shards from the ranks that combined them, one round
 *             behind
 */
#include <string.h>

#include "../internal.h"
#include "../reduce.h"

/* In place, one round covers as much of each tensor as still lies in a last-level cache when the shards are copied. */
enum { IN_PLACE_BYTES = 1024 * 1024 };
/* In staged rounds, combined data goes into the slot a block at a time, out of the first-level cache. */
enum { BLOCK_BYTES = 16 * 1024 };

struct job {
    struct zpp_wait_ctx *wait_ctx;
    const struct zpp_tensor *tensor;
    uint8_t *data;
    size_t elem_bytes, round_bytes;
};

static void combine(const struct job *job, void *dst, const uint8_t *const *part, size_t bytes, bool stream) {
    zpp_reduce_op_sources(dst, job->tensor->op, (const void *const *)part, job->wait_ctx->comm->ranks,
                          job->tensor->dtype, bytes / job->elem_bytes, stream);
}

static size_t round_at(const struct job *job, size_t at) {
    const size_t left = job->tensor->bytes - at;
    return left < job->round_bytes ? left : job->round_bytes;
}

/* Shard `rank` of a round of `bytes`: whole cache lines; the last ranks get less or nothing. */
static void shard_of(const struct job *job, size_t bytes, int rank, size_t *begin, size_t *length) {
    const size_t ranks = (size_t)job->wait_ctx->comm->ranks;
    const size_t share = (bytes / ranks + ZPP_LINE_BYTES) & ~(size_t)(ZPP_LINE_BYTES - 1);
    *begin = share * (size_t)rank < bytes ? share * (size_t)rank : bytes;
    *length = bytes - *begin < share ? bytes - *begin : share;
}

static zpp_status small(const struct job *job, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t bytes = job->tensor->bytes;
    const zpp_status status = zpp_exchange_small(job->wait_ctx, job->data, bytes, err);
    const uint8_t *part[ZPP_RANKS_MAX];
    if (status != ZPP_OK) return status;
    for (int r = 0; r < comm->ranks; r++) part[r] = r == comm->rank ? job->data : zpp_payload(comm, r, bytes);
    combine(job, job->data, part, bytes, false);
    return ZPP_OK;
}

/* --- staged ------------------------------------------------------------------------------------------------------ */

static size_t rounds_of(const struct job *job) {
    return (job->tensor->bytes + job->round_bytes - 1) / job->round_bytes;
}

/* Copy every shard but this rank's own to its place in the slot. */
static void fill_shards(const void *ctx, size_t round, uint8_t *slot) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * job->round_bytes;
    for (int r = 0; r < comm->ranks; r++) {
        size_t begin, length;
        shard_of(job, round_at(job, at), r, &begin, &length);
        if (r != comm->rank) zpp_stage_copy(comm, slot + begin, job->data + at + begin, length);
    }
}

static void combine_shard(const void *ctx, size_t round, uint32_t staged, uint8_t *slot) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * job->round_bytes;
    const uint8_t *part[ZPP_RANKS_MAX];
    size_t begin, length;
    shard_of(job, round_at(job, at), comm->rank, &begin, &length);
    for (size_t done = 0; done < length; done += BLOCK_BYTES) {
        const size_t bytes = length - done < BLOCK_BYTES ? length - done : BLOCK_BYTES;
        uint8_t *mine = job->data + at + begin + done;
        for (int r = 0; r < comm->ranks; r++)
            part[r] = r == comm->rank ? mine : zpp_stage(comm, r, 0, staged) + begin + done;
        combine(job, mine, part, bytes, false);
        zpp_stage_copy(comm, slot + done, mine, bytes);
    }
}

static void gather_shards(const void *ctx, size_t round, uint32_t staged) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * job->round_bytes;
    for (int k = 1; k < comm->ranks; k++) {
        const int r = (comm->rank + k) % comm->ranks;
        size_t begin, length;
        shard_of(job, round_at(job, at), r, &begin, &length);
        memcpy(job->data + at + begin, zpp_stage(comm, r, 1, staged), length);
    }
}

static zpp_status staged(const struct job *job, struct zpp_err *err) {
    const struct zpp_pipeline pipeline = {rounds_of(job), job, fill_shards, gather_shards, combine_shard};
    return zpp_pipeline_run(job->wait_ctx, &pipeline, err);
}

/* --- in place ---------------------------------------------------------------------------------------------------- */

static void combine_in_place(const struct job *job, const uint8_t *const *tensor, size_t at) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const uint8_t *part[ZPP_RANKS_MAX];
    size_t begin, length;
    shard_of(job, round_at(job, at), comm->rank, &begin, &length);
    for (int r = 0; r < comm->ranks; r++) part[r] = tensor[r] + at + begin;
    /* Only this rank reads or writes this shard before the phase ends. Its lines may still lie in the peers' caches;
     * then writing around the cache can be several times faster than invalidating them one by one. */
    combine(job, job->data + at + begin, part, length, zpp_shared_nontemporal(comm));
}

static void copy_in_place(const struct job *job, const uint8_t *const *tensor, size_t at) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    for (int k = 1; k < comm->ranks; k++) {
        const int r = (comm->rank + k) % comm->ranks;
        size_t begin, length;
        shard_of(job, round_at(job, at), r, &begin, &length);
        zpp_copy(job->data + at + begin, tensor[r] + at + begin, length, zpp_own_nontemporal(comm));
    }
}

static zpp_status in_place(const struct job *job, const uint8_t *const *tensor, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const uint64_t start_ns = zpp_now_ns();
    zpp_status status = ZPP_OK;
    size_t at = 0;
    for (; status == ZPP_OK && at < job->tensor->bytes; at += job->round_bytes) {
        combine_in_place(job, tensor, at);
        const uint32_t step = zpp_step_pass(comm);
        if (!at) continue;
        status = zpp_step_wait(job->wait_ctx, step - 1, err);
        if (status == ZPP_OK) copy_in_place(job, tensor, at - job->round_bytes);
    }
    if (status == ZPP_OK) status = zpp_step_wait(job->wait_ctx, comm->step, err);
    if (status != ZPP_OK) return status;
    copy_in_place(job, tensor, at - job->round_bytes);
    return zpp_step_last(job->wait_ctx, start_ns, err);
}

zpp_status zpp_coll_all_reduce(struct zpp_wait_ctx *wait_ctx, void *data, const struct zpp_tensor *tensor,
                               struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct job job = {wait_ctx, tensor, data, zpp_dtype_bytes(tensor->dtype), ZPP_STAGE_BYTES};
    const uint64_t ranks = (uint64_t)comm->ranks;
    const uint8_t *parts[ZPP_RANKS_MAX];
    bool all_in_arenas = false;
    if (comm->ranks == 1 || tensor->bytes <= ZPP_SMALL_BYTES) {
        zpp_count_call(comm, ZPP_TRAFFIC_ALL_REDUCE, tensor->bytes * (ranks - 1));
        return comm->ranks == 1 ? ZPP_OK : small(&job, err);
    }
    zpp_count_call(comm, ZPP_TRAFFIC_ALL_REDUCE, 2 * tensor->bytes * (ranks - 1) / ranks);
    const zpp_status status = zpp_exchange_place(wait_ctx, data, tensor->bytes, &all_in_arenas, parts, err);
    if (status != ZPP_OK) return status;
    if (all_in_arenas) {
        job.round_bytes = IN_PLACE_BYTES;
        return in_place(&job, parts, err);
    }
    return staged(&job, err);
}
