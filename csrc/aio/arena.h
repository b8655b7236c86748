/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine's buffers: page-aligned blocks of exact size (rounded up to a page, never to a power of two), inside slabs
 * that are locked in memory. Blocks of up to ZPP_AIO_ARENA_SMALL_BYTES share slabs; a larger one is a slab of its own.
 *
 * Locking is done in one of two ways. Where a ring drives the engine, its thread registers each slab with the ring,
 * which locks the pages; the slab then waits in the list that zpp_aio_arena_changes hands out, and so does one that is
 * to be freed. Otherwise slabs are locked with mlock at once. Locking may fail (a small memlock limit); the block is
 * valid nevertheless.
 *
 * Threads: every function may be called from any thread. The arena's lock is a leaf: nothing is called under it but
 * malloc, mmap and mlock. The arena lives until its last block is freed, even past the engine.
 */
#ifndef ZPP_AIO_ARENA_H
#define ZPP_AIO_ARENA_H

#include "../base/status.h"
#include "sys.h"

typedef struct zpp_aio_arena zpp_aio_arena;

enum { ZPP_AIO_ARENA_SMALL_BYTES = 1 << 20, ZPP_AIO_ARENA_SLAB_BYTES = 8 << 20 };

/* One mapping. The ring's thread owns `first_slot` and `slots`; the rest belongs to the arena. */
struct zpp_aio_slab {
    struct zpp_aio_slab *next;
    struct arena_block *blocks; /* taken, by address */
    unsigned char *base;
    size_t bytes, used_bytes;
    int first_slot; /* in the ring's table of buffers; -1: not registered */
    int slots;      /* a registered buffer is at most 1 GiB */
    bool known;     /* the ring's thread has tried to register it */
    bool dead;      /* empty, waits for the ring's thread to unregister it */
    bool locked;    /* locked by mlock */
};

/* `limit_bytes` bounds the slabs together; 0: no bound. `sys` is copied. New; release with zpp_aio_arena_unref. */
zpp_status zpp_aio_arena_create(size_t limit_bytes, const struct zpp_aio_sys *sys, zpp_aio_arena **out,
                                struct zpp_err *err);
void zpp_aio_arena_unref(zpp_aio_arena *arena); /* NULL is fine */

/* Allocate a page-aligned block of at least `bytes` (rounded up to a page). Free with zpp_aio_arena_free. The message
 * of NOMEM names the bound. */
zpp_status zpp_aio_arena_alloc(zpp_aio_arena *arena, size_t bytes, void **out, struct zpp_err *err);
void zpp_aio_arena_free(zpp_aio_arena *arena, void *block);

/* Return the slab that holds all of [memory, memory + bytes), or NULL. It lives as long as a block of it. */
struct zpp_aio_slab *zpp_aio_arena_find(zpp_aio_arena *arena, const void *memory, size_t bytes);

/* Tell the arena that a ring's thread follows it: `notify(ctx)` is called under the arena's lock whenever
 * zpp_aio_arena_changes has something, so it may only wake that thread. After zpp_aio_arena_unfollow it is not called
 * any more, and slabs count as not registered. */
void zpp_aio_arena_follow(zpp_aio_arena *arena, void (*notify)(void *ctx), void *ctx);
void zpp_aio_arena_unfollow(zpp_aio_arena *arena);

/* For the ring's thread: call `appeared` for each new slab, `leaves` for each one that is to be freed (just after it).
 * Both run under the arena's lock, so that no slab changes meanwhile. */
void zpp_aio_arena_changes(zpp_aio_arena *arena, void (*appeared)(void *ctx, struct zpp_aio_slab *slab),
                           void (*leaves)(void *ctx, struct zpp_aio_slab *slab), void *ctx);

struct zpp_aio_arena_figures {
    size_t held_bytes, used_bytes; /* slabs; blocks */
    int lock_errno;                /* of the last slab that could not be locked with mlock; 0: none */
};
void zpp_aio_arena_figures(zpp_aio_arena *arena, struct zpp_aio_arena_figures *out);

#endif
