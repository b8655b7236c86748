/* SPDX-License-Identifier: Apache-2.0
 *
 * All-to-all of any sizes, and gather and scatter, which are all-to-alls where only one rank receives or sends. Each
 * rank publishes how many bytes it has for each peer; a mismatch is an error at once. Each rank reads exactly what it
 * receives from others:
 *
 *   small     no rank sends more than ZPP_SMALL_BYTES in all: payloads beside the signatures
 *   in place  every rank's pieces lie in an arena, one after the other: peers copy them from there; one copy a byte,
 *             one final phase, unless the pieces stay where they are
 *   staged    rounds: my slot holds, for each peer, the next piece for it; as many rounds as the largest pair needs
 */
#include <inttypes.h>
#include <string.h>

#include "../internal.h"
#include "../reduce.h"

static const uint64_t NOTHING = UINT64_MAX; /* in place of an arena: this rank sends nothing to its peers */

struct job {
    struct zpp_wait_ctx *wait_ctx;
    const struct zpp_call *call;
    size_t piece_bytes;
};

static const uint64_t *counts_of(const struct zpp_comm *comm, int rank) {
    return zpp_control(comm, rank)->counts[comm->seq % 2];
}

static void publish_counts(struct zpp_comm *comm, const struct zpp_call *call) {
    uint64_t *counts = zpp_control(comm, comm->rank)->counts[comm->seq % 2];
    for (int r = 0; r < comm->ranks; r++) counts[r] = call->src_bytes[r];
}

static uint64_t sum_without(const uint64_t *counts, int ranks, int rank) {
    uint64_t sum = 0;
    for (int r = 0; r < ranks; r++) sum += r == rank ? 0 : counts[r];
    return sum;
}

/* Write this rank's small payload: the pieces for its peers, one after the other. Return its length, 0 if it is too
 * large for the slot. */
static size_t pack_small(struct zpp_comm *comm, const struct zpp_call *call) {
    uint8_t *slot = zpp_control(comm, comm->rank)->small[comm->seq % 2];
    size_t used = 0;
    if (sum_without(counts_of(comm, comm->rank), comm->ranks, comm->rank) > ZPP_SMALL_BYTES) return 0;
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank || !call->src_bytes[r]) continue;
        memcpy(slot + used, call->srcs[r], call->src_bytes[r]);
        used += call->src_bytes[r];
    }
    return used;
}

static zpp_status check_counts(const struct job *job, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    char doing[160];
    for (int r = 0; r < comm->ranks; r++) {
        const uint64_t comes = counts_of(comm, r)[comm->rank];
        if (comes == job->call->dst_bytes[r]) continue;
        job->wait_ctx->describe(job->wait_ctx->ctx, doing, sizeof doing);
        return zpp_comm_fail(comm, ZPP_PEER, r, err,
                             "comm: in %s of group \"%s\" rank %d sends %" PRIu64
                             " bytes to rank %d, which expects %zu; the split sizes of "
                             "the two must agree",
                             doing, comm->name, zpp_label(comm, r), comes, zpp_label(comm, comm->rank),
                             job->call->dst_bytes[r]);
    }
    return ZPP_OK;
}

static void unpack_small(const struct job *job) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank || !job->call->dst_bytes[r]) continue;
        const uint64_t *counts = counts_of(comm, r);
        uint64_t before = 0;
        for (int p = 0; p < comm->rank; p++) before += p == r ? 0 : counts[p];
        memcpy(job->call->dsts[r], zpp_control(comm, r)->small[comm->seq % 2] + before, job->call->dst_bytes[r]);
    }
}

/* --- in place ---------------------------------------------------------------------------------------------------- */

/* Find where this rank's pieces begin, if they lie one after the other in an arena; empty ones may lie anywhere. */
static struct zpp_place place_of(struct zpp_comm *comm, const struct zpp_call *call) {
    struct zpp_place place = {0};
    const uint8_t *first = NULL;
    size_t bytes = 0;
    bool joined = true;
    if (!sum_without(counts_of(comm, comm->rank), comm->ranks, comm->rank)) return (struct zpp_place){.arena = NOTHING};
    for (int r = 0; r < comm->ranks; r++) {
        if (!call->src_bytes[r]) continue;
        if (!first) first = call->srcs[r];
        joined = joined && call->srcs[r] == first + bytes;
        bytes += call->src_bytes[r];
    }
    if (!joined || !zpp_arena_find(comm, first, bytes, &place)) return (struct zpp_place){0};
    return place;
}

/* Map the pieces for this rank; NULL where a peer sends none, and its own. */
static zpp_status map_pieces(const struct job *job, const void **pieces, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    zpp_status status = ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++) {
        const uint64_t *counts = counts_of(comm, r);
        const uint8_t *src = NULL;
        uint64_t before = 0;
        pieces[r] = NULL;
        if (r == comm->rank || !job->call->dst_bytes[r]) continue;
        for (int p = 0; p < comm->rank; p++) before += counts[p];
        status = zpp_arena_at(job->wait_ctx, r, &zpp_post_of(comm, r)->place, before + job->call->dst_bytes[r], &src,
                              err);
        if (status == ZPP_OK) pieces[r] = src + before;
    }
    return status;
}

static zpp_status in_place(const struct job *job, uint64_t start_ns, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const void *pieces[ZPP_RANKS_MAX];
    const zpp_status status = map_pieces(job, pieces, err);
    if (status != ZPP_OK) return status;
    if (job->call->take) job->call->take(job->call->take_ctx, pieces);
    for (int k = 1; k < comm->ranks && !job->call->take; k++) {
        const int r = (comm->rank + k) % comm->ranks;
        if (pieces[r]) zpp_copy(job->call->dsts[r], pieces[r], job->call->dst_bytes[r], zpp_own_nontemporal(comm));
    }
    return job->call->stays ? ZPP_OK : zpp_step_last(job->wait_ctx, start_ns, err);
}

/* --- staged ------------------------------------------------------------------------------------------------------ */

static size_t piece_at(const struct job *job, size_t bytes, size_t at) {
    if (at >= bytes) return 0;
    return bytes - at < job->piece_bytes ? bytes - at : job->piece_bytes;
}

static void fill(const void *ctx, size_t round, uint8_t *slot) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * job->piece_bytes;
    for (int r = 0; r < comm->ranks; r++) {
        const size_t piece = r == comm->rank ? 0 : piece_at(job, job->call->src_bytes[r], at);
        if (piece)
            zpp_stage_copy(comm, slot + (size_t)r * job->piece_bytes, (const uint8_t *)job->call->srcs[r] + at, piece);
    }
}

static void take(const void *ctx, size_t round, uint32_t staged) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * job->piece_bytes;
    for (int k = 1; k < comm->ranks; k++) {
        const int r = (comm->rank + k) % comm->ranks;
        const size_t piece = piece_at(job, job->call->dst_bytes[r], at);
        const uint8_t *from = zpp_stage(comm, r, 0, staged) + (size_t)comm->rank * job->piece_bytes;
        if (piece) zpp_copy((uint8_t *)job->call->dsts[r] + at, from, piece, zpp_own_nontemporal(comm));
    }
}

static zpp_status staged(const struct job *job, uint64_t most, struct zpp_err *err) {
    const struct zpp_pipeline pipeline = {(most + job->piece_bytes - 1) / job->piece_bytes, job, fill, take, NULL};
    return zpp_pipeline_run(job->wait_ctx, &pipeline, err);
}

/* A summary of the posts of all ranks. */
struct survey {
    uint64_t most, received; /* bytes: of the longest piece, and of all that this rank receives from others */
    bool all_small, all_in_arenas;
};

static struct survey survey_posts(const struct zpp_comm *comm, const struct zpp_call *call) {
    struct survey survey = {0, 0, true, true};
    for (int r = 0; r < comm->ranks; r++) {
        const uint64_t *counts = counts_of(comm, r);
        if (!zpp_post_of(comm, r)->place.arena) survey.all_in_arenas = false;
        if (sum_without(counts, comm->ranks, r) > ZPP_SMALL_BYTES) survey.all_small = false;
        for (int p = 0; p < comm->ranks; p++)
            if (p != r && counts[p] > survey.most) survey.most = counts[p];
        if (r != comm->rank) survey.received += call->dst_bytes[r];
    }
    return survey;
}

zpp_status zpp_coll_all_to_all(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const struct job job = {wait_ctx, call, ZPP_STAGE_BYTES / (size_t)comm->ranks & ~(size_t)(ZPP_LINE_BYTES - 1)};
    const int me = comm->rank;
    publish_counts(comm, call);
    (void)pack_small(comm, call);
    zpp_my_post(comm)->place = place_of(comm, call);
    zpp_store_policy_post(comm, sum_without(counts_of(comm, me), comm->ranks, me) + call->src_bytes[me],
                          &zpp_my_post(comm)->place);
    zpp_post(comm);
    if (call->meanwhile) call->meanwhile(call->take_ctx);
    zpp_status status = zpp_await_posts(wait_ctx, err);
    if (status == ZPP_OK) status = check_counts(&job, err);
    if (status != ZPP_OK) return status;
    const uint64_t start_ns = zpp_now_ns();
    const struct survey survey = survey_posts(comm, call);
    zpp_count_call(comm, call->coll == ZPP_COLL_ALL_TO_ALL ? ZPP_TRAFFIC_ALL_TO_ALL : ZPP_TRAFFIC_OTHER,
                   survey.received);
    if (!survey.all_small) zpp_store_policy_adopt(comm, survey.all_in_arenas);
    if (call->src_bytes[me] && call->dsts[me] != call->srcs[me])
        zpp_copy(call->dsts[me], call->srcs[me], call->src_bytes[me], !survey.all_small && zpp_own_nontemporal(comm));
    if (survey.all_small) {
        unpack_small(&job);
        return ZPP_OK;
    }
    return survey.all_in_arenas ? in_place(&job, start_ns, err) : staged(&job, survey.most, err);
}
