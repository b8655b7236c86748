/* SPDX-License-Identifier: Apache-2.0
 *
 * Locked, page-aligned buffers: arena.h. First fit inside the shared slabs; their lists are short (a slab is 8 MiB),
 * and tiers keep their buffers, so a faster search would not pay.
 */
#include "arena.h"

#include <pthread.h>
#include <stdlib.h>

#include "../base/mem.h"

struct arena_block {
    struct arena_block *next;
    size_t offset_bytes, bytes;
};

struct zpp_aio_arena {
    pthread_mutex_t lock; /* guards everything below, and the slabs */
    struct zpp_aio_sys sys;
    struct zpp_aio_slab *slabs;
    size_t limit_bytes, held_bytes, used_bytes;
    int lock_errno;
    bool changed; /* some slab is new or dead for the follower */
    void (*notify)(void *ctx);
    void *notify_ctx;
    size_t refs; /* the engine, and each block */
};

static size_t whole_pages(size_t bytes) { return (bytes + zpp_page_bytes() - 1) / zpp_page_bytes() * zpp_page_bytes(); }

static void free_slab(zpp_aio_arena *arena, struct zpp_aio_slab *slab) {
    if (slab->locked) arena->sys.unlock(arena->sys.ctx, slab->base, slab->bytes);
    arena->held_bytes -= slab->bytes;
    zpp_mem_free(slab->base, slab->bytes);
    free(slab);
}

static void unlink_slab(zpp_aio_arena *arena, struct zpp_aio_slab *slab) {
    struct zpp_aio_slab **link = &arena->slabs;
    while (*link != slab) link = &(*link)->next;
    *link = slab->next;
}

static void destroy(zpp_aio_arena *arena) {
    while (arena->slabs) {
        struct zpp_aio_slab *slab = arena->slabs;
        arena->slabs = slab->next;
        free_slab(arena, slab);
    }
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

/* Release one reference and the lock. */
static void unlock_and_unref(zpp_aio_arena *arena) {
    const bool last = --arena->refs == 0;
    pthread_mutex_unlock(&arena->lock);
    if (last) destroy(arena);
}

static zpp_status new_slab(zpp_aio_arena *arena, size_t bytes, struct zpp_aio_slab **out, struct zpp_err *err) {
    if (arena->limit_bytes && (bytes > arena->limit_bytes || arena->held_bytes > arena->limit_bytes - bytes)) {
        return zpp_fail(err, ZPP_NOMEM,
                        "aio: the arena holds %zu of at most %zu bytes, no room for %zu more; free tensors of "
                        "engine.empty(), or raise arena_bytes",
                        arena->held_bytes, arena->limit_bytes, bytes);
    }
    struct zpp_aio_slab *slab = calloc(1, sizeof *slab);
    void *base = NULL;
    if (!slab) return zpp_fail(err, ZPP_NOMEM, "aio: no memory for an arena of %zu bytes", bytes);
    const zpp_status status = zpp_mem_alloc(bytes, zpp_page_bytes(), &base, err);
    if (status != ZPP_OK) {
        free(slab);
        return status;
    }
    *slab = (struct zpp_aio_slab){.next = arena->slabs, .base = base, .bytes = bytes, .first_slot = -1};
    arena->slabs = slab;
    arena->held_bytes += bytes;
    if (arena->notify) {
        arena->changed = true;
    } else {
        const int locked = arena->sys.lock(arena->sys.ctx, base, bytes);
        slab->locked = locked == 0;
        if (locked < 0) arena->lock_errno = -locked;
    }
    *out = slab;
    return ZPP_OK;
}

/* Find a gap of `bytes` in the slab: write its place, and the link that the new block goes into. */
static bool find_gap(struct zpp_aio_slab *slab, size_t bytes, size_t *offset_bytes, struct arena_block ***link) {
    size_t at = 0;
    struct arena_block **place = &slab->blocks;
    for (; *place; place = &(*place)->next) {
        if ((*place)->offset_bytes - at >= bytes) break;
        at = (*place)->offset_bytes + (*place)->bytes;
    }
    if (slab->bytes - at < bytes) return false;
    *offset_bytes = at;
    *link = place;
    return true;
}

static bool take_from(zpp_aio_arena *arena, struct zpp_aio_slab *slab, struct arena_block *block, void **out) {
    struct arena_block **link;
    if (slab->dead || !find_gap(slab, block->bytes, &block->offset_bytes, &link)) return false;
    block->next = *link;
    *link = block;
    slab->used_bytes += block->bytes;
    arena->used_bytes += block->bytes;
    ++arena->refs;
    *out = slab->base + block->offset_bytes;
    return true;
}

static zpp_status alloc_locked(zpp_aio_arena *arena, struct arena_block *block, void **out, struct zpp_err *err) {
    struct zpp_aio_slab *slab = NULL;
    const bool shares = block->bytes <= ZPP_AIO_ARENA_SMALL_BYTES;
    for (slab = shares ? arena->slabs : NULL; slab; slab = slab->next) {
        if (slab->bytes == ZPP_AIO_ARENA_SLAB_BYTES && take_from(arena, slab, block, out)) return ZPP_OK;
    }
    zpp_status status = new_slab(arena, shares ? ZPP_AIO_ARENA_SLAB_BYTES : block->bytes, &slab, err);
    if (status != ZPP_OK && shares) status = new_slab(arena, block->bytes, &slab, err); /* the bound may allow that */
    if (status == ZPP_OK) take_from(arena, slab, block, out);
    return status;
}

zpp_status zpp_aio_arena_alloc(zpp_aio_arena *arena, size_t bytes, void **out, struct zpp_err *err) {
    if (bytes > SIZE_MAX - zpp_page_bytes()) return zpp_fail(err, ZPP_NOMEM, "aio: no room for %zu bytes", bytes);
    struct arena_block *block = malloc(sizeof *block);
    if (!block) return zpp_fail(err, ZPP_NOMEM, "aio: no memory for a block of %zu bytes", bytes);
    *block = (struct arena_block){.bytes = whole_pages(bytes ? bytes : 1)};
    pthread_mutex_lock(&arena->lock);
    const zpp_status status = alloc_locked(arena, block, out, err);
    void (*const notify)(void *) = arena->changed ? arena->notify : NULL;
    void *const ctx = arena->notify_ctx;
    /* Under the lock, so that zpp_aio_arena_unfollow's return means that notify is never called again. */
    if (notify) notify(ctx);
    pthread_mutex_unlock(&arena->lock);
    if (status != ZPP_OK) free(block);
    return status;
}

/* True if another shared slab is empty already. One is kept, so that a block that is often freed does not map each
 * time. */
static bool keeps_empty_slab(const zpp_aio_arena *arena, const struct zpp_aio_slab *but) {
    for (const struct zpp_aio_slab *slab = arena->slabs; slab; slab = slab->next) {
        if (slab != but && !slab->blocks && !slab->dead && slab->bytes == ZPP_AIO_ARENA_SLAB_BYTES) return true;
    }
    return false;
}

static void drop_if_empty(zpp_aio_arena *arena, struct zpp_aio_slab *slab) {
    if (slab->blocks) return;
    if (slab->bytes == ZPP_AIO_ARENA_SLAB_BYTES && !keeps_empty_slab(arena, slab)) return;
    if (arena->notify && slab->known) {
        slab->dead = true;
        arena->changed = true;
        arena->notify(arena->notify_ctx);
    } else {
        unlink_slab(arena, slab);
        free_slab(arena, slab);
    }
}

static struct zpp_aio_slab *find(zpp_aio_arena *arena, const void *memory, size_t bytes) {
    const unsigned char *at = memory;
    for (struct zpp_aio_slab *slab = arena->slabs; slab; slab = slab->next) {
        if (at >= slab->base && at < slab->base + slab->bytes) {
            return (size_t)(slab->base + slab->bytes - at) >= bytes ? slab : NULL;
        }
    }
    return NULL;
}

void zpp_aio_arena_free(zpp_aio_arena *arena, void *memory) {
    pthread_mutex_lock(&arena->lock);
    struct zpp_aio_slab *slab = find(arena, memory, 1);
    struct arena_block **link = slab ? &slab->blocks : NULL;
    while (link && *link && slab->base + (*link)->offset_bytes != memory) link = &(*link)->next;
    if (!link || !*link) { /* not ours: freeing nothing is better than freeing a neighbour */
        pthread_mutex_unlock(&arena->lock);
        return;
    }
    struct arena_block *block = *link;
    *link = block->next;
    slab->used_bytes -= block->bytes;
    arena->used_bytes -= block->bytes;
    free(block);
    drop_if_empty(arena, slab);
    unlock_and_unref(arena);
}

struct zpp_aio_slab *zpp_aio_arena_find(zpp_aio_arena *arena, const void *memory, size_t bytes) {
    pthread_mutex_lock(&arena->lock);
    struct zpp_aio_slab *slab = find(arena, memory, bytes);
    pthread_mutex_unlock(&arena->lock);
    return slab;
}

void zpp_aio_arena_follow(zpp_aio_arena *arena, void (*notify)(void *ctx), void *ctx) {
    pthread_mutex_lock(&arena->lock);
    arena->notify = notify;
    arena->notify_ctx = ctx;
    arena->changed = arena->slabs != NULL;
    pthread_mutex_unlock(&arena->lock);
}

void zpp_aio_arena_unfollow(zpp_aio_arena *arena) {
    pthread_mutex_lock(&arena->lock);
    arena->notify = NULL;
    arena->changed = false;
    for (struct zpp_aio_slab **link = &arena->slabs; *link;) {
        struct zpp_aio_slab *slab = *link;
        slab->first_slot = -1;
        if (slab->dead) {
            *link = slab->next;
            free_slab(arena, slab);
        } else {
            link = &slab->next;
        }
    }
    pthread_mutex_unlock(&arena->lock);
}

void zpp_aio_arena_changes(zpp_aio_arena *arena, void (*appeared)(void *ctx, struct zpp_aio_slab *slab),
                           void (*leaves)(void *ctx, struct zpp_aio_slab *slab), void *ctx) {
    pthread_mutex_lock(&arena->lock);
    struct zpp_aio_slab **link = &arena->slabs;
    while (arena->changed && *link) {
        struct zpp_aio_slab *slab = *link;
        if (slab->dead) {
            leaves(ctx, slab);
            *link = slab->next;
            free_slab(arena, slab);
            continue;
        }
        if (!slab->known) {
            slab->known = true;
            appeared(ctx, slab);
        }
        link = &slab->next;
    }
    arena->changed = false;
    pthread_mutex_unlock(&arena->lock);
}

void zpp_aio_arena_figures(zpp_aio_arena *arena, struct zpp_aio_arena_figures *out) {
    pthread_mutex_lock(&arena->lock);
    *out = (struct zpp_aio_arena_figures){arena->held_bytes, arena->used_bytes, arena->lock_errno};
    pthread_mutex_unlock(&arena->lock);
}

zpp_status zpp_aio_arena_create(size_t limit_bytes, const struct zpp_aio_sys *sys, zpp_aio_arena **out,
                                struct zpp_err *err) {
    zpp_aio_arena *arena = calloc(1, sizeof *arena);
    if (!arena) return zpp_fail(err, ZPP_NOMEM, "aio: no memory for the arena");
    arena->sys = *sys;
    arena->limit_bytes = limit_bytes;
    arena->refs = 1;
    pthread_mutex_init(&arena->lock, NULL);
    *out = arena;
    return ZPP_OK;
}

void zpp_aio_arena_unref(zpp_aio_arena *arena) {
    if (!arena) return;
    pthread_mutex_lock(&arena->lock);
    unlock_and_unref(arena);
}
