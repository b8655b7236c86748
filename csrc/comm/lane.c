/* SPDX-License-Identifier: Apache-2.0
 *
 * Lanes: each rank owns a ring of ZPP_LANE_RING notices in a region, a word that counts what it posted, and a word that
 * counts what it has acknowledged of its peers. A notice stands until every peer has acknowledged it, so a reader that
 * has not acknowledged may read it again. Posting, reading and acknowledging are a few loads and stores.
 */
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct lane_memory {
    struct zpp_line_word posted, acked;
    struct {
        _Alignas(ZPP_LINE_BYTES) struct zpp_notice notice;
    } ring[ZPP_LANE_RING];
};

struct zpp_lane {
    struct zpp_comm *comm;
    struct zpp_region *region;
    void *base[ZPP_RANKS_MAX];
    _Atomic uint64_t posted; /* by the thread that posts; zpp_lane_acked may look from another */
    uint64_t acked;
    void (*describe)(void *ctx, const struct zpp_notice *, char *text, size_t room);
    void *describe_ctx;
    char name[64];
};

static void describe_notice(const struct zpp_lane *lane, const struct zpp_notice *notice, char *text, size_t room) {
    if (lane->describe)
        lane->describe(lane->describe_ctx, notice, text, room);
    else
        snprintf(text, room, "kind %" PRIu64 ", object %" PRIu64 ", step %" PRIu64 ", %" PRIu64 " elements",
                 notice->kind, notice->object, notice->step, notice->elems);
}

/* What a wait on a lane is for. */
struct purpose {
    const struct zpp_lane *lane;
    const struct zpp_notice *notice; /* what is expected or was posted; NULL: anything */
    uint64_t seq;
    bool acknowledgement;
};

static void describe_purpose(const void *ctx, char *text, size_t room) {
    const struct purpose *purpose = ctx;
    if (purpose->lane->describe && purpose->notice) {
        char words[200];
        describe_notice(purpose->lane, purpose->notice, words, sizeof words);
        snprintf(text, room, "%s%s", purpose->acknowledgement ? "the end of " : "", words);
        return;
    }
    snprintf(text, room, "%s #%" PRIu64 " of lane \"%s\"",
             purpose->acknowledgement ? "acknowledgement of notice" : "notice", purpose->seq, purpose->lane->name);
}

static struct zpp_turn turn_for(const struct purpose *purpose, const struct zpp_wait *wait) {
    const struct zpp_turn turn = {
        .comm = purpose->lane->comm, .wait = wait, .describe = describe_purpose, .ctx = purpose};
    return turn;
}

zpp_status zpp_lane_create(zpp_comm *comm, const char *name, zpp_lane **out, struct zpp_err *err) {
    if (comm->net)
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "comm: lane \"%s\" of group \"%s\", whose ranks are on %d hosts; lanes work within one "
                        "host only",
                        name, comm->name, zpp_comm_hosts(comm));
    struct zpp_lane *lane = calloc(1, sizeof *lane);
    if (!lane) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for lane \"%s\"", name);
    lane->comm = comm;
    snprintf(lane->name, sizeof lane->name, "%s", name);
    const zpp_status status =
        zpp_region_create(comm, ZPP_REGION_PER_RANK, sizeof(struct lane_memory), &lane->region, err);
    if (status != ZPP_OK) {
        free(lane);
        return status;
    }
    for (int r = 0; r < comm->ranks; r++) lane->base[r] = zpp_region_base(lane->region, r);
    *out = lane;
    return ZPP_OK;
}

void zpp_lane_destroy(zpp_lane *lane) {
    if (!lane) return;
    zpp_region_destroy(lane->region);
    free(lane);
}

void zpp_lane_set_describe(zpp_lane *lane,
                           void (*describe)(void *ctx, const struct zpp_notice *, char *text, size_t room), void *ctx) {
    lane->describe = describe;
    lane->describe_ctx = ctx;
}

static struct lane_memory *memory_of(const struct zpp_lane *lane, int rank) { return lane->base[rank]; }

/* A wait for the peers to acknowledge what this rank posted, which stands in its ring until then. */
static struct purpose acknowledgement_of(const struct zpp_lane *lane, uint64_t seq) {
    const struct zpp_notice *notice = &memory_of(lane, lane->comm->rank)->ring[seq % ZPP_LANE_RING].notice;
    return (struct purpose){lane, notice, seq, true};
}

zpp_status zpp_lane_post(zpp_lane *lane, const struct zpp_notice *notice, const struct zpp_wait *wait, uint64_t *seq,
                         struct zpp_err *err) {
    zpp_status status = zpp_comm_check(lane->comm, err);
    if (status == ZPP_OK && lane->posted >= ZPP_LANE_RING) {
        const struct purpose purpose = acknowledgement_of(lane, lane->posted + 1 - ZPP_LANE_RING);
        struct zpp_turn turn = turn_for(&purpose, wait);
        const struct zpp_gate gate = {lane->base, offsetof(struct lane_memory, acked), (uint32_t)purpose.seq};
        status = zpp_await_all(&turn, &gate, err);
    }
    if (status != ZPP_OK) return status;
    struct lane_memory *mine = memory_of(lane, lane->comm->rank);
    *seq = ++lane->posted;
    mine->ring[*seq % ZPP_LANE_RING].notice = *notice;
    zpp_word_raise(&mine->posted.word, (uint32_t)*seq);
    return ZPP_OK;
}

static zpp_status diverged(const struct zpp_lane *lane, int rank, uint64_t seq, const struct zpp_notice *here,
                           const struct zpp_notice *there, struct zpp_err *err) {
    char mine[200], theirs[200];
    describe_notice(lane, here, mine, sizeof mine);
    describe_notice(lane, there, theirs, sizeof theirs);
    /* Both sides may find out at once; the comm error keeps one sentence for all. */
    if (lane->describe)
        return zpp_comm_fail(lane->comm, ZPP_PEER, rank, err,
                             "comm: rank %d of group \"%s\" is at %s but rank %d is at %s; the ranks took different "
                             "paths: all must run the same modules and the same steps in the same order",
                             lane->comm->rank, lane->comm->name, mine, rank, theirs);
    return zpp_comm_fail(lane->comm, ZPP_PEER, rank, err,
                         "comm: lane \"%s\" of group \"%s\", notice #%" PRIu64 ": rank %d is at %s but rank %d is at "
                         "%s; "
                         "the ranks took different paths",
                         lane->name, lane->comm->name, seq, lane->comm->rank, mine, rank, theirs);
}

zpp_status zpp_lane_read(zpp_lane *lane, int rank, uint64_t seq, const struct zpp_notice *expect,
                         const struct zpp_wait *wait, struct zpp_notice *out, struct zpp_err *err) {
    assert(rank >= 0 && rank < lane->comm->ranks && seq > 0);
    const struct purpose purpose = {lane, expect, seq, false};
    struct zpp_turn turn = turn_for(&purpose, wait);
    const struct zpp_gate gate = {lane->base, offsetof(struct lane_memory, posted), (uint32_t)seq};
    const zpp_status status = zpp_await(&turn, &gate, rank, err);
    if (status != ZPP_OK) return status;
    const struct zpp_notice *notice = &memory_of(lane, rank)->ring[seq % ZPP_LANE_RING].notice;
    if (expect && (expect->kind != notice->kind || expect->object != notice->object || expect->step != notice->step ||
                   expect->elems != notice->elems))
        return diverged(lane, rank, seq, expect, notice, err);
    if (out) *out = *notice;
    return ZPP_OK;
}

void zpp_lane_ack(zpp_lane *lane, uint64_t seq) {
    if (seq <= lane->acked) return;
    lane->acked = seq;
    zpp_word_raise(&memory_of(lane, lane->comm->rank)->acked.word, (uint32_t)seq);
}

uint64_t zpp_lane_acked(const zpp_lane *lane) {
    uint64_t lowest = lane->posted;
    for (int r = 0; r < lane->comm->ranks; r++) {
        if (r == lane->comm->rank) continue;
        /* A peer may be ahead of my own posts (it acknowledges numbers, not notices), never 2^31 of them. */
        const uint32_t theirs = atomic_load_explicit(&memory_of(lane, r)->acked.word.value, memory_order_acquire);
        const int32_t behind = (int32_t)((uint32_t)lane->posted - theirs);
        if (behind > 0 && lane->posted - (uint64_t)behind < lowest) lowest = lane->posted - (uint64_t)behind;
    }
    return lowest;
}

zpp_status zpp_lane_wait_acked(zpp_lane *lane, uint64_t seq, const struct zpp_wait *wait, struct zpp_err *err) {
    assert(seq <= lane->posted);
    const struct purpose purpose = acknowledgement_of(lane, seq);
    struct zpp_turn turn = turn_for(&purpose, wait);
    const struct zpp_gate gate = {lane->base, offsetof(struct lane_memory, acked), (uint32_t)seq};
    return zpp_await_all(&turn, &gate, err);
}
