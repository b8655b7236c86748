/* SPDX-License-Identifier: Apache-2.0
 *
 * All-gather: dst[r] = src of rank r. Each rank reads (N - 1) * bytes from its peers, by any of these algorithms:
 *
 *   small     payload beside the signature; one publication, one round of reads
 *   in place  every src lies in an arena: peers copy it from there; one copy a byte, one final phase (until it is
 *             passed, src is being read)
 *   staged    rounds of ZPP_STAGE_BYTES: fill my slot, copy out of the peers' slots of the round before
 */
#include <string.h>

#include "../internal.h"
#include "../reduce.h"

static void copy_own(void *dst, const void *src, size_t bytes, bool stream) {
    if (dst != src && bytes) zpp_copy(dst, src, bytes, stream);
}

static zpp_status small(struct zpp_wait_ctx *wait_ctx, void *const *dst, const void *src, size_t bytes,
                        struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const zpp_status status = zpp_exchange_small(wait_ctx, src, bytes, err);
    if (status != ZPP_OK) return status;
    for (int r = 0; r < comm->ranks; r++) {
        if (r != comm->rank)
            memcpy(dst[r], zpp_payload(comm, r, bytes), bytes);
        else
            copy_own(dst[r], src, bytes, false);
    }
    return ZPP_OK;
}

static zpp_status in_place(struct zpp_wait_ctx *wait_ctx, void *const *dst, const uint8_t *const *src, size_t bytes,
                           struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const uint64_t start_ns = zpp_now_ns();
    for (int k = 0; k < comm->ranks; k++) { /* each rank begins with itself, so that readers spread over the sources */
        const int r = (comm->rank + k) % comm->ranks;
        copy_own(dst[r], src[r], bytes, zpp_own_nontemporal(comm));
    }
    return zpp_step_last(wait_ctx, start_ns, err);
}

struct job {
    const struct zpp_comm *comm;
    void *const *dst;
    const uint8_t *src;
    size_t bytes;
};

static size_t chunk_at(const struct job *job, size_t at) {
    return job->bytes - at < ZPP_STAGE_BYTES ? job->bytes - at : ZPP_STAGE_BYTES;
}

static void fill(const void *ctx, size_t round, uint8_t *slot) {
    const struct job *job = ctx;
    const size_t at = round * ZPP_STAGE_BYTES, chunk = chunk_at(job, at);
    zpp_stage_copy(job->comm, slot, job->src + at, chunk);
    /* the slot's copy has just brought it into the cache */
    copy_own((uint8_t *)job->dst[job->comm->rank] + at, job->src + at, chunk, zpp_own_nontemporal(job->comm));
}

static void take(const void *ctx, size_t round, uint32_t staged) {
    const struct job *job = ctx;
    const size_t at = round * ZPP_STAGE_BYTES, chunk = chunk_at(job, at);
    for (int k = 1; k < job->comm->ranks; k++) {
        const int r = (job->comm->rank + k) % job->comm->ranks;
        zpp_copy((uint8_t *)job->dst[r] + at, zpp_stage(job->comm, r, 0, staged), chunk,
                 zpp_own_nontemporal(job->comm));
    }
}

static zpp_status staged(struct zpp_wait_ctx *wait_ctx, void *const *dst, const uint8_t *src, size_t bytes,
                         struct zpp_err *err) {
    const struct job job = {wait_ctx->comm, dst, src, bytes};
    const struct zpp_pipeline pipeline = {(bytes + ZPP_STAGE_BYTES - 1) / ZPP_STAGE_BYTES, &job, fill, take, NULL};
    return zpp_pipeline_run(wait_ctx, &pipeline, err);
}

zpp_status zpp_coll_all_gather(struct zpp_wait_ctx *wait_ctx, void *const *dst, const void *src, size_t bytes,
                               struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const uint8_t *tensor[ZPP_RANKS_MAX];
    bool all_in_arenas = false;
    zpp_count_call(comm, ZPP_TRAFFIC_ALL_GATHER, bytes * (uint64_t)(comm->ranks - 1));
    if (comm->ranks == 1) {
        copy_own(dst[0], src, bytes, bytes >= ZPP_STREAM_BYTES);
        return ZPP_OK;
    }
    if (bytes <= ZPP_SMALL_BYTES) return small(wait_ctx, dst, src, bytes, err);
    const zpp_status status = zpp_exchange_place(wait_ctx, src, bytes, &all_in_arenas, tensor, err);
    if (status != ZPP_OK) return status;
    return all_in_arenas ? in_place(wait_ctx, dst, tensor, bytes, err) : staged(wait_ctx, dst, src, bytes, err);
}
