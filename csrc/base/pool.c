/* SPDX-License-Identifier: Apache-2.0
 *
 * Thread pool: pool.h. A run is a door that the caller opens and closes:
 *
 *   caller   fills the job, opens the door (open = 1), wakes who sleeps, takes pieces; when none is left closes the
 *            door and waits until nobody is inside
 *   helper   goes in (inside += 1), looks whether the door is open; if so takes pieces; goes out (inside -= 1)
 *
 * So a helper that comes late (the system gave its core to somebody else) costs nothing: the door is shut, and the
 * caller has done its pieces. Going in and looking, closing and counting are sequentially consistent: either the helper
 * sees the door shut or the caller sees it inside. The job is written only while the door is shut and nobody is inside
 * who read it open.
 *
 * Locks: `callers` is held by the one running caller. Helpers take no lock.
 */
#include "pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "wait.h"

enum { SPIN_NS = 50000, SPINS_A_LOOK = 64, PIECES_A_THREAD = 4, MAX_THREADS = 1024 };

struct zpp_pool {
    pthread_mutex_t callers;
    int threads; /* helpers + the caller */
    int helpers; /* threads that were really started */
    zpp_spread_fn spread; /* NULL: own helpers */
    unsigned forks; /* fork_count when created: another value means that the helpers stayed in the parent */
    /* the job */
    zpp_range_fn body;
    void *arg;
    size_t items, piece_items;
    _Atomic size_t next_item;
    /* the door */
    _Atomic uint32_t open, inside, stop;
    _Atomic uint32_t runs;     /* helpers sleep on it; counts openings */
    _Atomic uint32_t sleepers; /* helpers asleep or about to be */
    _Atomic uint32_t caller_sleeps;
    pthread_t ids[];
};

static __thread bool in_body; /* nested calls run in the calling thread */

static _Atomic unsigned fork_count;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static void count_fork(void) { atomic_fetch_add(&fork_count, 1); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static void futex_sleep(_Atomic uint32_t *word, uint32_t expected) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}
static void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

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

/* Wait until `runs` differs from `seen`: first spinning, then asleep. */
static void wait_for_run(zpp_pool *pool, uint32_t seen) {
    const uint64_t start_ns = zpp_now_ns();
    for (;;) {
        for (int spin = 0; spin < SPINS_A_LOOK; ++spin) {
            if (atomic_load(&pool->runs) != seen) return;
            relax();
        }
        if (zpp_now_ns() - start_ns > SPIN_NS) break;
    }
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->runs) == seen) futex_sleep(&pool->runs, seen);
    atomic_fetch_sub(&pool->sleepers, 1);
}

static void *helper_main(void *arg) {
    zpp_pool *pool = arg;
    uint32_t seen = 0;
    for (;;) {
        wait_for_run(pool, seen);
        seen = atomic_load(&pool->runs);
        if (atomic_load(&pool->stop)) return NULL;
        atomic_fetch_add(&pool->inside, 1);
        if (atomic_load(&pool->open)) take_pieces(pool);
        if (atomic_fetch_sub(&pool->inside, 1) == 1 && atomic_load(&pool->caller_sleeps)) {
            futex_wake_all(&pool->inside);
        }
    }
}

static void wake_helpers(zpp_pool *pool) {
    atomic_fetch_add(&pool->runs, 1);
    if (atomic_load(&pool->sleepers)) futex_wake_all(&pool->runs);
}

static void wait_until_nobody_is_inside(zpp_pool *pool) {
    const uint64_t start_ns = zpp_now_ns();
    while (atomic_load(&pool->inside)) {
        for (int spin = 0; spin < SPINS_A_LOOK && atomic_load(&pool->inside); ++spin) relax();
        if (zpp_now_ns() - start_ns < SPIN_NS) continue;
        atomic_store(&pool->caller_sleeps, 1);
        const uint32_t inside = atomic_load(&pool->inside);
        if (inside) futex_sleep(&pool->inside, inside);
        atomic_store(&pool->caller_sleeps, 0);
    }
}

static zpp_status new_pool(int threads, zpp_pool **out, struct zpp_err *err) {
    if (threads < 1 || threads > MAX_THREADS) {
        return zpp_fail(err, ZPP_INVALID, "thread pool: threads is %d, wanted 1 to %d", threads, MAX_THREADS);
    }
    pthread_once(&fork_once, watch_forks);
    zpp_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof pool->ids[0]);
    if (!pool) return zpp_fail(err, ZPP_NOMEM, "thread pool: no memory for %d threads", threads);
    pool->threads = threads;
    pool->forks = atomic_load(&fork_count);
    pthread_mutex_init(&pool->callers, NULL);
    *out = pool;
    return ZPP_OK;
}

zpp_status zpp_pool_create_over(zpp_spread_fn spread, int threads, zpp_pool **out, struct zpp_err *err) {
    const zpp_status status = new_pool(threads, out, err);
    if (status == ZPP_OK) (*out)->spread = spread;
    return status;
}

zpp_status zpp_pool_create(int threads, zpp_pool **out, struct zpp_err *err) {
    zpp_pool *pool = NULL;
    const zpp_status status = new_pool(threads, &pool, err);
    if (status != ZPP_OK) return status;
    for (; pool->helpers < threads - 1; ++pool->helpers) {
        const int failed = pthread_create(&pool->ids[pool->helpers], NULL, helper_main, pool);
        if (failed) {
            const int made = pool->helpers;
            zpp_pool_destroy(pool);
            return zpp_fail_os(err, failed, "thread pool: could not start thread %d of %d", made + 2, threads);
        }
    }
    *out = pool;
    return ZPP_OK;
}

void zpp_pool_destroy(zpp_pool *pool) {
    if (!pool) return;
    if (pool->forks == atomic_load(&fork_count)) {
        atomic_store(&pool->stop, 1);
        wake_helpers(pool);
        for (int helper = 0; helper < pool->helpers; ++helper) pthread_join(pool->ids[helper], NULL);
        pthread_mutex_destroy(&pool->callers);
    }
    free(pool);
}

int zpp_pool_threads(const zpp_pool *pool) { return pool ? pool->threads : 1; }

/* A few pieces a thread, so that one that lost its core for a while leaves work for the others. */
static size_t piece_items(const zpp_pool *pool, size_t items, size_t grain) {
    const size_t wanted = items / ((size_t)pool->threads * PIECES_A_THREAD);
    const size_t grains = wanted / grain + (wanted % grain != 0);
    return grains ? grains * grain : grain;
}

static void run_with_helpers(zpp_pool *pool) {
    atomic_store(&pool->open, 1);
    wake_helpers(pool);
    take_pieces(pool);
    atomic_store(&pool->open, 0);
    wait_until_nobody_is_inside(pool);
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
    if (pool->spread) pool->spread(pool->threads, take_pieces, pool);
    else run_with_helpers(pool);
    pthread_mutex_unlock(&pool->callers);
}
