/* SPDX-License-Identifier: Apache-2.0
 *
 * Pieces of a range over threads of another library: pool.h. A shared counter hands the pieces out, so a thread that
 * lost its core for a while takes fewer of them.
 *
 * Locks: `callers` is held by the one running caller.
 */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

enum { PIECES_A_THREAD = 4, MAX_THREADS = 1024 };

struct zpp_pool {
    pthread_mutex_t callers;
    int threads;
    zpp_spread_fn spread;
    unsigned forks; /* fork_count when created: another value means that the threads stayed in the parent */
    /* the job */
    zpp_range_fn body;
    void *arg;
    size_t items, piece_items;
    _Atomic size_t next_item;
};

static __thread bool in_body; /* nested calls run in the calling thread */

static _Atomic unsigned fork_count;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static void count_fork(void) { atomic_fetch_add(&fork_count, 1); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

zpp_status zpp_pool_create(zpp_spread_fn spread, int threads, zpp_pool **out, struct zpp_err *err) {
    if (threads < 1 || threads > MAX_THREADS) {
        return zpp_fail(err, ZPP_INVALID, "thread pool: threads is %d, wanted 1 to %d", threads, MAX_THREADS);
    }
    pthread_once(&fork_once, watch_forks);
    zpp_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return zpp_fail(err, ZPP_NOMEM, "thread pool: no memory for %d threads", threads);
    pool->threads = threads;
    pool->spread = spread;
    pool->forks = atomic_load(&fork_count);
    pthread_mutex_init(&pool->callers, NULL);
    *out = pool;
    return ZPP_OK;
}

void zpp_pool_destroy(zpp_pool *pool) {
    if (!pool) return;
    if (pool->forks == atomic_load(&fork_count)) pthread_mutex_destroy(&pool->callers);
    free(pool);
}

int zpp_pool_threads(const zpp_pool *pool) { return pool ? pool->threads : 1; }

static void take_pieces(void *arg_pool) {
    zpp_pool *pool = arg_pool;
    const zpp_range_fn body = pool->body;
    void *const arg = pool->arg;
    const size_t items = pool->items, piece_items = pool->piece_items;
    in_body = true;
    for (;;) {
        const size_t begin = atomic_fetch_add_explicit(&pool->next_item, piece_items, memory_order_relaxed);
        if (begin >= items) break;
        body(begin, items - begin < piece_items ? items : begin + piece_items, arg);
    }
    in_body = false;
}

/* Return the items of a piece, so that each thread gets a few pieces. */
static size_t piece_items(const zpp_pool *pool, size_t items, size_t grain) {
    const size_t wanted = items / ((size_t)pool->threads * PIECES_A_THREAD);
    const size_t grains = wanted / grain + (wanted % grain != 0);
    return grains ? grains * grain : grain;
}

void zpp_pool_run(zpp_pool *pool, size_t items, size_t grain, zpp_range_fn body, void *arg) {
    if (!items) return;
    if (!grain) grain = 1;
    if (!pool || pool->threads < 2 || in_body || items <= grain || pool->forks != atomic_load(&fork_count)) {
        body(0, items, arg);
        return;
    }
    pthread_mutex_lock(&pool->callers);
    pool->body = body;
    pool->arg = arg;
    pool->items = items;
    pool->piece_items = piece_items(pool, items, grain);
    atomic_store(&pool->next_item, 0);
    pool->spread(pool->threads, take_pieces, pool);
    pthread_mutex_unlock(&pool->callers);
}
