/* SPDX-License-Identifier: Apache-2.0
 *
 * Arenas: shared memory of one rank, handed out in blocks. An arena is one sparse memfd as large as the machine's
 * memory (only touched pages take memory), made at the first request without a call on the peers: its descriptor waits
 * in their sockets until they see a tensor in it. Blocks are found first-fit in a list of spans sorted by offset;
 * freed pages stay warm up to a limit, because touching fresh pages costs more than copying into them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../internal.h"
#include "../../base/mem.h"
#include "memfd.h"

enum { SMALL_ALIGN = 256, PAGED_FROM = 65536, PUNCH_FROM = 1 << 20 };
static const size_t WARM_BYTES = (size_t)512 << 20, MOST_BYTES = (size_t)1 << 38;

struct span {
    struct span *next;
    size_t offset, bytes;
    bool used;
};

struct zpp_arena {
    struct zpp_arena *next;
    int rank;
    uint64_t id; /* 1, 2, ... of that rank */
    uint8_t *base;
    size_t bytes;
    /* For arenas of this rank only; guarded by `lock`. */
    pthread_mutex_t lock;
    struct span *spans;
    size_t blocks, warm_bytes;
    bool orphan; /* the communicator is destroyed; zpp_block_free of the last block frees the arena */
};

struct zpp_block {
    struct zpp_arena *arena;
    size_t offset, bytes;
};

static void arena_free(struct zpp_arena *arena) {
    for (struct span *span = arena->spans, *next; span; span = next) {
        next = span->next;
        free(span);
    }
    zpp_memfd_unmap(arena->base, arena->bytes);
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

static struct zpp_arena *arena_new(int rank, uint64_t id, size_t bytes, struct zpp_err *err) {
    struct zpp_arena *arena = calloc(1, sizeof *arena);
    if (!arena) {
        (void)zpp_fail(err, ZPP_NOMEM, "comm: no memory for an arena");
        return NULL;
    }
    arena->rank = rank;
    arena->id = id;
    arena->bytes = bytes;
    pthread_mutex_init(&arena->lock, NULL);
    return arena;
}

/* --- spans ------------------------------------------------------------------------------------------------------- */

static size_t align_up(size_t value, size_t align) { return (value + align - 1) & ~(align - 1); }

/* Cut [at, at + bytes) out of a free span. Return it marked used, or NULL without memory. */
static struct span *carve(struct span *span, size_t at, size_t bytes) {
    struct span *head = NULL, *tail = NULL;
    if (at > span->offset && !(head = malloc(sizeof *head))) return NULL;
    if (at + bytes < span->offset + span->bytes && !(tail = malloc(sizeof *tail))) {
        free(head);
        return NULL;
    }
    if (tail) {
        *tail = (struct span){span->next, at + bytes, span->offset + span->bytes - at - bytes, false};
        span->next = tail;
    }
    if (head) { /* the old node keeps the front, so its predecessor need not change */
        *head = (struct span){span->next, at, bytes, true};
        span->bytes = at - span->offset;
        span->next = head;
        return head;
    }
    span->bytes = bytes;
    span->used = true;
    return span;
}

static struct span *take_span(struct zpp_arena *arena, size_t bytes) {
    const size_t align = bytes >= PAGED_FROM ? zpp_page_bytes() : SMALL_ALIGN;
    const size_t rounded = align_up(bytes ? bytes : 1, align);
    for (struct span *span = arena->spans; span; span = span->next) {
        const size_t at = align_up(span->offset, align), skipped = at - span->offset;
        if (!span->used && span->bytes >= rounded && span->bytes - rounded >= skipped) return carve(span, at, rounded);
    }
    return NULL;
}

static void join_next(struct span *span) {
    struct span *next = span->next;
    if (!next || next->used || span->used) return;
    span->bytes += next->bytes;
    span->next = next->next;
    free(next);
}

static void give_span(struct zpp_arena *arena, size_t offset) {
    struct span *before = NULL, *span = arena->spans;
    while (span && span->offset != offset) {
        before = span;
        span = span->next;
    }
    if (!span) return;
    span->used = false;
    arena->warm_bytes += span->bytes;
    if (arena->warm_bytes > WARM_BYTES && span->bytes >= PUNCH_FROM) {
        zpp_memfd_punch(arena->base + span->offset, span->bytes);
        arena->warm_bytes -= span->bytes;
    }
    join_next(span);
    if (before) join_next(before);
}

/* --- own arenas -------------------------------------------------------------------------------------------------- */

static size_t machine_bytes(void) {
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    const size_t bytes = pages > 0 && page > 0 ? align_up((size_t)pages * (size_t)page, zpp_page_bytes())
                                               : (size_t)1 << 32;
    return bytes < MOST_BYTES ? bytes : MOST_BYTES;
}

static zpp_status announce(struct zpp_comm *comm, const struct zpp_arena *arena, int fd, struct zpp_err *err) {
    const struct zpp_message content = {ZPP_MESSAGE_ARENA, arena->id, arena->bytes, 0};
    zpp_status status = ZPP_OK;
    if (comm->net) return ZPP_OK; /* the local group stages everything, so no peer would take the message */
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++)
        if (r != comm->rank) status = zpp_message_send(comm, r, &content, fd, err);
    return status;
}

/* Map the arena, or less of it, down to `wanted`, where the address space is limited (ulimit -v). */
static zpp_status map_some(struct zpp_arena *arena, size_t wanted, int *out_fd, struct zpp_err *err) {
    for (;; arena->bytes = align_up(arena->bytes / 2, zpp_page_bytes())) {
        void *base = NULL;
        int fd = -1;
        zpp_status status = zpp_memfd_create("zeropp-arena", arena->bytes, &fd, err);
        if (status == ZPP_OK) status = zpp_memfd_map(fd, arena->bytes, &base, err);
        if (status == ZPP_OK) {
            arena->base = base;
            *out_fd = fd;
            return ZPP_OK;
        }
        if (fd >= 0) close(fd);
        if (arena->bytes / 2 < wanted) return status;
    }
}

/* Make one free span of all that was mapped. */
static zpp_status make_spans(struct zpp_arena *arena, struct zpp_err *err) {
    arena->spans = malloc(sizeof *arena->spans);
    if (!arena->spans) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for an arena");
    *arena->spans = (struct span){NULL, 0, arena->bytes, false};
    return ZPP_OK;
}

/* Called with arena_lock held. */
static zpp_status arena_open(struct zpp_comm *comm, uint64_t id, size_t wanted, struct zpp_arena **out,
                             struct zpp_err *err) {
    size_t bytes = machine_bytes();
    if (bytes < wanted) bytes = wanted;
    struct zpp_arena *arena = arena_new(comm->rank, id, bytes, err);
    if (!arena) return ZPP_NOMEM;
    int fd = -1;
    zpp_status status = map_some(arena, wanted, &fd, err);
    if (status == ZPP_OK) status = make_spans(arena, err);
    if (status == ZPP_OK) status = announce(comm, arena, fd, err);
    if (fd >= 0) close(fd);
    if (status != ZPP_OK) {
        arena_free(arena);
        return status;
    }
    *out = arena;
    return ZPP_OK;
}

static zpp_status block_from(struct zpp_arena *arena, size_t bytes, struct zpp_block *block) {
    pthread_mutex_lock(&arena->lock);
    const struct span *span = take_span(arena, bytes);
    if (span) {
        *block = (struct zpp_block){arena, span->offset, bytes};
        arena->blocks++;
        arena->warm_bytes -= span->bytes < arena->warm_bytes ? span->bytes : arena->warm_bytes;
    }
    pthread_mutex_unlock(&arena->lock);
    return span ? ZPP_OK : ZPP_AGAIN;
}

zpp_status zpp_comm_alloc(zpp_comm *comm, size_t bytes, zpp_block **out, struct zpp_err *err) {
    zpp_status status = zpp_comm_check(comm, err);
    if (status != ZPP_OK) return status;
    if (bytes > SIZE_MAX / 4)
        return zpp_fail(err, ZPP_INVALID, "comm: a block of %zu bytes, wanted at most %zu", bytes, SIZE_MAX / 4);
    struct zpp_block *block = malloc(sizeof *block);
    if (!block) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for a block of %zu bytes", bytes);
    uint64_t newest = 0;
    status = ZPP_AGAIN;
    pthread_mutex_lock(&comm->arena_lock);
    for (struct zpp_arena *arena = comm->arenas; arena && status == ZPP_AGAIN; arena = arena->next) {
        if (arena->rank != comm->rank) continue;
        if (arena->id > newest) newest = arena->id;
        status = block_from(arena, bytes, block);
    }
    if (status == ZPP_AGAIN) {
        struct zpp_arena *arena = NULL;
        status = arena_open(comm, newest + 1, align_up(bytes + zpp_page_bytes(), zpp_page_bytes()), &arena, err);
        if (status == ZPP_OK) {
            arena->next = comm->arenas;
            comm->arenas = arena;
            status = block_from(arena, bytes, block);
            if (status == ZPP_AGAIN)
                status = zpp_fail(err, ZPP_NOMEM, "comm: no memory for a block of %zu bytes", bytes);
        }
    }
    pthread_mutex_unlock(&comm->arena_lock);
    if (status != ZPP_OK) {
        free(block);
        return status;
    }
    *out = block;
    return ZPP_OK;
}

void *zpp_block_data(const zpp_block *block) { return block->arena->base + block->offset; }
size_t zpp_block_bytes(const zpp_block *block) { return block->bytes; }

void zpp_block_free(zpp_block *block) {
    if (!block) return;
    struct zpp_arena *arena = block->arena;
    pthread_mutex_lock(&arena->lock);
    give_span(arena, block->offset);
    const bool last = --arena->blocks == 0 && arena->orphan;
    pthread_mutex_unlock(&arena->lock);
    if (last) arena_free(arena);
    free(block);
}

void zpp_block_forget(zpp_block *block) {
    if (!block) return;
    pthread_mutex_lock(&block->arena->lock);
    block->arena->blocks--;
    pthread_mutex_unlock(&block->arena->lock);
    free(block);
}

/* --- tensors in arenas ------------------------------------------------------------------------------------------- */

bool zpp_arena_find(struct zpp_comm *comm, const void *data, size_t bytes, struct zpp_place *place) {
    const uintptr_t at = (uintptr_t)data;
    bool found = false;
    pthread_mutex_lock(&comm->arena_lock);
    for (const struct zpp_arena *arena = comm->arenas; arena && !found; arena = arena->next) {
        const uintptr_t base = (uintptr_t)arena->base;
        if (arena->rank != comm->rank || at < base || at - base > arena->bytes || bytes > arena->bytes - (at - base))
            continue;
        *place = (struct zpp_place){.arena = arena->id, .offset_bytes = at - base};
        found = true;
    }
    pthread_mutex_unlock(&comm->arena_lock);
    return found;
}

static struct zpp_arena *known_arena(struct zpp_comm *comm, int rank, uint64_t id) {
    pthread_mutex_lock(&comm->arena_lock);
    struct zpp_arena *arena = comm->arenas;
    while (arena && (arena->rank != rank || arena->id != id)) arena = arena->next;
    pthread_mutex_unlock(&comm->arena_lock);
    return arena;
}

static zpp_status learn_arena(struct zpp_wait_ctx *wait_ctx, int rank, uint64_t id, struct zpp_arena **out,
                              struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct zpp_message content;
    int fd = -1;
    void *base = NULL;
    zpp_status status = zpp_message_wait(wait_ctx, rank, ZPP_MESSAGE_ARENA, id, &content, &fd, err);
    if (status != ZPP_OK) return status;
    struct zpp_arena *arena = arena_new(rank, id, content.a, err);
    status = arena ? zpp_memfd_map(fd, content.a, &base, err) : ZPP_NOMEM;
    if (fd >= 0) close(fd);
    if (status != ZPP_OK) {
        if (arena) arena_free(arena);
        return status;
    }
    arena->base = base;
    pthread_mutex_lock(&comm->arena_lock);
    arena->next = comm->arenas;
    comm->arenas = arena;
    pthread_mutex_unlock(&comm->arena_lock);
    *out = arena;
    return ZPP_OK;
}

zpp_status zpp_arena_at(struct zpp_wait_ctx *wait_ctx, int rank, const struct zpp_place *place, size_t bytes,
                        const uint8_t **data, struct zpp_err *err) {
    struct zpp_arena *arena = known_arena(wait_ctx->comm, rank, place->arena);
    if (!arena) {
        const zpp_status status = learn_arena(wait_ctx, rank, place->arena, &arena, err);
        if (status != ZPP_OK) return status;
    }
    if (place->offset_bytes > arena->bytes || bytes > arena->bytes - place->offset_bytes)
        return zpp_fail_rank(err, ZPP_PEER, rank,
                             "comm: rank %d says that its tensor of %zu bytes lies at %llu of an arena of %zu bytes",
                             rank, bytes, (unsigned long long)place->offset_bytes, arena->bytes);
    *data = arena->base + place->offset_bytes;
    return ZPP_OK;
}

void zpp_arena_clear(struct zpp_comm *comm) {
    for (struct zpp_arena *arena = comm->arenas, *next; arena; arena = next) {
        next = arena->next;
        pthread_mutex_lock(&arena->lock);
        const bool keep = arena->blocks > 0;
        arena->orphan = keep;
        pthread_mutex_unlock(&arena->lock);
        if (!keep) arena_free(arena);
    }
    comm->arenas = NULL;
}
