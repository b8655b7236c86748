/* SPDX-License-Identifier: Apache-2.0
 *
 * Descriptor rings: each rank owns a ring of ZPP_DESC_RING_ENTRIES descriptors in a region, a counter that counts what
 * it posted, and a counter that counts what it has acknowledged of its peers. A descriptor stands until every peer has
 * acknowledged it, so a reader that has not acknowledged may read it again. Posting, reading and acknowledging are a
 * few loads and stores.
 */
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../internal.h"

struct ring_memory {
    struct zpp_line_counter posted, acked;
    struct {
        _Alignas(ZPP_LINE_BYTES) struct zpp_desc desc;
    } ring[ZPP_DESC_RING_ENTRIES];
};

struct zpp_desc_ring {
    struct zpp_comm *comm;
    struct zpp_region *region;
    void *base[ZPP_RANKS_MAX];
    _Atomic uint64_t posted; /* written by the thread that posts; zpp_desc_ring_acked may read it from another */
    uint64_t acked;
    void (*describe)(void *ctx, const struct zpp_desc *, char *text, size_t capacity);
    void *describe_ctx;
    bool fatal; /* a wait that fails ends the group */
    char name[64];
};

static void describe_desc(const struct zpp_desc_ring *ring, const struct zpp_desc *desc, char *text, size_t capacity) {
    if (ring->describe)
        ring->describe(ring->describe_ctx, desc, text, capacity);
    else
        snprintf(text, capacity, "kind %" PRIu64 ", object %" PRIu64 ", step %" PRIu64 ", %" PRIu64 " elements",
                 desc->kind, desc->object, desc->step, desc->elems);
}

/* The purpose of a wait on a descriptor ring, for messages. */
struct purpose {
    const struct zpp_desc_ring *ring;
    const struct zpp_desc *desc; /* the descriptor expected or posted; NULL: any */
    uint64_t seq;
    bool acknowledgement;
};

static void describe_purpose(const void *ctx, char *text, size_t capacity) {
    const struct purpose *purpose = ctx;
    if (purpose->ring->describe && purpose->desc) {
        char described[200];
        describe_desc(purpose->ring, purpose->desc, described, sizeof described);
        snprintf(text, capacity, "%s%s", purpose->acknowledgement ? "the end of " : "", described);
        return;
    }
    snprintf(text, capacity, "%s #%" PRIu64 " of descriptor ring \"%s\"",
             purpose->acknowledgement ? "acknowledgement of descriptor" : "descriptor", purpose->seq,
             purpose->ring->name);
}

static struct zpp_wait_ctx wait_ctx_for(const struct purpose *purpose, const struct zpp_wait *wait) {
    const struct zpp_desc_ring *ring = purpose->ring;
    const struct zpp_wait_ctx wait_ctx = {
        .comm = ring->comm, .wait = wait, .fatal = ring->fatal, .describe = describe_purpose, .ctx = purpose};
    return wait_ctx;
}

zpp_status zpp_desc_ring_create(zpp_comm *comm, const char *name, zpp_desc_ring **out, struct zpp_err *err) {
    if (comm->net)
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "comm: descriptor ring \"%s\" of group \"%s\", whose ranks are on %d hosts; rings work within "
                        "one host only",
                        name, comm->name, zpp_comm_hosts(comm));
    struct zpp_desc_ring *ring = calloc(1, sizeof *ring);
    if (!ring) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for descriptor ring \"%s\"", name);
    ring->comm = comm;
    snprintf(ring->name, sizeof ring->name, "%s", name);
    const zpp_status status =
        zpp_region_create(comm, ZPP_REGION_PER_RANK, sizeof(struct ring_memory), &ring->region, err);
    if (status != ZPP_OK) {
        free(ring);
        return status;
    }
    for (int r = 0; r < comm->ranks; r++) ring->base[r] = zpp_region_base(ring->region, r);
    *out = ring;
    return ZPP_OK;
}

void zpp_desc_ring_destroy(zpp_desc_ring *ring) {
    if (!ring) return;
    zpp_region_destroy(ring->region);
    free(ring);
}

void zpp_desc_ring_set_describe(zpp_desc_ring *ring,
                                void (*describe)(void *ctx, const struct zpp_desc *, char *text, size_t capacity),
                                void *ctx) {
    ring->describe = describe;
    ring->describe_ctx = ctx;
}

void zpp_desc_ring_set_fatal(zpp_desc_ring *ring) { ring->fatal = true; }

static struct ring_memory *memory_of(const struct zpp_desc_ring *ring, int rank) { return ring->base[rank]; }

/* A wait until the peers acknowledge a descriptor of this rank, which stays in its ring until then. */
static struct purpose acknowledgement_of(const struct zpp_desc_ring *ring, uint64_t seq) {
    const struct zpp_desc *desc = &memory_of(ring, ring->comm->rank)->ring[seq % ZPP_DESC_RING_ENTRIES].desc;
    return (struct purpose){ring, desc, seq, true};
}

zpp_status zpp_desc_ring_post(zpp_desc_ring *ring, const struct zpp_desc *desc, const struct zpp_wait *wait,
                              uint64_t *seq, struct zpp_err *err) {
    zpp_status status = zpp_comm_check(ring->comm, err);
    if (status == ZPP_OK && ring->posted >= ZPP_DESC_RING_ENTRIES) {
        const struct purpose purpose = acknowledgement_of(ring, ring->posted + 1 - ZPP_DESC_RING_ENTRIES);
        struct zpp_wait_ctx wait_ctx = wait_ctx_for(&purpose, wait);
        const struct zpp_wait_target wait_target = {ring->base, offsetof(struct ring_memory, acked),
                                                    (uint32_t)purpose.seq};
        status = zpp_await_all(&wait_ctx, &wait_target, err);
    }
    if (status != ZPP_OK) return status;
    struct ring_memory *mine = memory_of(ring, ring->comm->rank);
    *seq = ++ring->posted;
    mine->ring[*seq % ZPP_DESC_RING_ENTRIES].desc = *desc;
    zpp_counter_raise(&mine->posted.counter, (uint32_t)*seq);
    return ZPP_OK;
}

static zpp_status diverged(const struct zpp_desc_ring *ring, int rank, uint64_t seq, const struct zpp_desc *here,
                           const struct zpp_desc *there, struct zpp_err *err) {
    char mine[200], theirs[200];
    describe_desc(ring, here, mine, sizeof mine);
    describe_desc(ring, there, theirs, sizeof theirs);
    /* Both sides may detect it at once; the comm error keeps one message for all. */
    if (ring->describe)
        return zpp_comm_fail(ring->comm, ZPP_PEER, rank, err,
                             "comm: rank %d of group \"%s\" is at %s but rank %d is at %s; the ranks took different "
                             "paths: all must run the same modules and the same steps in the same order",
                             zpp_label(ring->comm, ring->comm->rank), ring->comm->name, mine,
                             zpp_label(ring->comm, rank), theirs);
    return zpp_comm_fail(ring->comm, ZPP_PEER, rank, err,
                         "comm: ring \"%s\" of group \"%s\", descriptor #%" PRIu64 ": rank %d is at %s but rank %d is "
                         "at %s; the ranks took different paths",
                         ring->name, ring->comm->name, seq, zpp_label(ring->comm, ring->comm->rank), mine,
                         zpp_label(ring->comm, rank), theirs);
}

zpp_status zpp_desc_ring_read(zpp_desc_ring *ring, int rank, uint64_t seq, const struct zpp_desc *expect,
                              const struct zpp_wait *wait, struct zpp_desc *out, struct zpp_err *err) {
    assert(rank >= 0 && rank < ring->comm->ranks && seq > 0);
    const struct purpose purpose = {ring, expect, seq, false};
    struct zpp_wait_ctx wait_ctx = wait_ctx_for(&purpose, wait);
    const struct zpp_wait_target wait_target = {ring->base, offsetof(struct ring_memory, posted), (uint32_t)seq};
    const zpp_status status = zpp_await(&wait_ctx, &wait_target, rank, err);
    if (status != ZPP_OK) return status;
    const struct zpp_desc *desc = &memory_of(ring, rank)->ring[seq % ZPP_DESC_RING_ENTRIES].desc;
    if (expect && (expect->kind != desc->kind || expect->object != desc->object || expect->step != desc->step ||
                   expect->elems != desc->elems))
        return diverged(ring, rank, seq, expect, desc, err);
    if (out) *out = *desc;
    return ZPP_OK;
}

void zpp_desc_ring_ack(zpp_desc_ring *ring, uint64_t seq) {
    if (seq <= ring->acked) return;
    ring->acked = seq;
    zpp_counter_raise(&memory_of(ring, ring->comm->rank)->acked.counter, (uint32_t)seq);
}

uint64_t zpp_desc_ring_acked(const zpp_desc_ring *ring) {
    uint64_t lowest = ring->posted;
    for (int r = 0; r < ring->comm->ranks; r++) {
        if (r == ring->comm->rank) continue;
        /* A peer may be ahead of my own posts (it acknowledges numbers, not descriptors), never 2^31 of them. */
        const uint32_t theirs = atomic_load_explicit(&memory_of(ring, r)->acked.counter.value, memory_order_acquire);
        const int32_t behind = (int32_t)((uint32_t)ring->posted - theirs);
        if (behind > 0 && ring->posted - (uint64_t)behind < lowest) lowest = ring->posted - (uint64_t)behind;
    }
    return lowest;
}

zpp_status zpp_desc_ring_wait_acked(zpp_desc_ring *ring, uint64_t seq, const struct zpp_wait *wait,
                                    struct zpp_err *err) {
    assert(seq <= ring->posted);
    const struct purpose purpose = acknowledgement_of(ring, seq);
    struct zpp_wait_ctx wait_ctx = wait_ctx_for(&purpose, wait);
    const struct zpp_wait_target wait_target = {ring->base, offsetof(struct ring_memory, acked), (uint32_t)seq};
    return zpp_await_all(&wait_ctx, &wait_target, err);
}
