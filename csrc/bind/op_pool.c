/* SPDX-License-Identifier: Apache-2.0
 *
 * The threads of ops (op_entries.h) are torch's: those spin for a while after each of torch's operators, and threads of
 * ours would share the cores with them (docs/design/0002). One pool a process: torch calls ops from any thread, and a
 * second op at the same time runs in its own thread alone, which is what a second caller of one pool would wait for
 * anyway.
 */
#include "op_entries.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held from take to give; guards pool and pool_threads */
static zpp_pool *pool;
static uint32_t pool_threads;

struct each {
    void (*call)(void *arg);
    void *arg;
};

static void call_each(int64_t begin, int64_t end, void *ctx) {
    const struct each *each = ctx;
    (void)begin, (void)end;
    each->call(each->arg);
}

static void spread(int threads, void (*call)(void *arg), void *arg) {
    struct each each = {call, arg};
    if (zpp_torch.torch_parallel_for(0, threads, 1, call_each, &each) != 0) call(arg);
}

zpp_status zpp_op_pool_create(int threads, zpp_pool **out, struct zpp_err *err) {
    return zpp_pool_create(spread, threads, out, err);
}

static void resize(uint32_t threads) {
    if (threads == pool_threads) return;
    zpp_pool_destroy(pool);
    pool = NULL;
    pool_threads = threads; /* also where it fails: the next call does not try again */
    if (threads > 1) (void)zpp_op_pool_create((int)threads, &pool, NULL);
}

zpp_pool *zpp_op_pool_take(void) {
    uint32_t threads = 1;
    if (zpp_torch.torch_get_num_threads(&threads) != 0 || threads <= 1) return NULL;
    if (pthread_mutex_trylock(&lock) != 0) return NULL;
    resize(threads);
    if (!pool) pthread_mutex_unlock(&lock);
    return pool;
}

void zpp_op_pool_give(zpp_pool *taken) {
    if (taken) pthread_mutex_unlock(&lock);
}
