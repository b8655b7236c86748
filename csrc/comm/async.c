/* SPDX-License-Identifier: Apache-2.0
 *
 * Asynchronous collectives: one queue and one progress thread per communicator, both made at the first asynchronous
 * call. Calls run in the order of submission; a blocking call waits until the queue is empty and then runs in its own
 * thread, so all ranks see one order, whatever mixture of calls they use. A call that fails ends the group (the comm
 * error remains), so calls queued behind it fail with the same error.
 *
 * Threads: submission and blocking calls come from one thread at a time (comm.h); waiting on a work, from any.
 * `lock` guards queue, states and counts; nothing is called with it held.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "internal.h"

struct zpp_work {
    struct zpp_work *next;
    struct zpp_async *async;
    struct zpp_call call;
    void (*done)(void *ctx, zpp_status status, const struct zpp_err *err);
    void *done_ctx;
    zpp_status status; /* AGAIN until it is finished */
    struct zpp_err err;
    int holders; /* queue and caller */
};

struct zpp_async {
    pthread_mutex_t lock;
    pthread_cond_t queued, finished;
    pthread_t thread;
    struct zpp_work *first, **last;
    _Atomic uint64_t pending; /* queued or running */
    size_t holders;           /* held by the communicator, and by works that were not freed */
    bool ending;
};

static void async_free(struct zpp_async *async) {
    pthread_cond_destroy(&async->queued);
    pthread_cond_destroy(&async->finished);
    pthread_mutex_destroy(&async->lock);
    free(async);
}

static void async_drop(struct zpp_async *async) {
    pthread_mutex_lock(&async->lock);
    const bool last = --async->holders == 0;
    pthread_mutex_unlock(&async->lock);
    if (last) async_free(async);
}

static void work_drop(struct zpp_work *work) {
    struct zpp_async *async = work->async;
    pthread_mutex_lock(&async->lock);
    const bool last = --work->holders == 0;
    pthread_mutex_unlock(&async->lock);
    if (!last) return;
    free(work);
    async_drop(async);
}

static struct zpp_work *next_work(struct zpp_async *async) {
    pthread_mutex_lock(&async->lock);
    while (!async->first && !async->ending) pthread_cond_wait(&async->queued, &async->lock);
    struct zpp_work *work = async->first;
    if (work) {
        async->first = work->next;
        if (!async->first) async->last = &async->first;
    }
    pthread_mutex_unlock(&async->lock);
    return work;
}

/* While a call waits for what is before it, other ranks may end the group. */
static zpp_status group_stands(void *ctx, struct zpp_err *err) {
    zpp_comm_look_for_dead(ctx);
    return zpp_comm_check(ctx, err);
}

static zpp_status run_call(struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err) {
    const struct zpp_wait wait = {0, group_stands, comm};
    zpp_status status = call->before ? call->before(call->ctx, &wait, err) : ZPP_OK;
    if (status != ZPP_OK) {
        zpp_comm_abort(comm, err->text);
        return status;
    }
    status = zpp_call_now(comm, call, NULL, err);
    return status == ZPP_OK && call->after ? call->after(call->ctx, err) : status;
}

static void *run(void *arg) {
    struct zpp_comm *comm = arg;
    struct zpp_async *async = comm->async;
    struct zpp_work *work;
    while ((work = next_work(async)) != NULL) {
        struct zpp_err err = ZPP_ERR_INIT;
        const zpp_status status = run_call(comm, &work->call, &err);
        pthread_mutex_lock(&async->lock);
        work->status = status;
        work->err = err;
        atomic_fetch_sub(&async->pending, 1);
        pthread_cond_broadcast(&async->finished);
        pthread_mutex_unlock(&async->lock);
        if (work->done) work->done(work->done_ctx, status, &err);
        work_drop(work);
    }
    return NULL;
}

static zpp_status async_make(struct zpp_comm *comm, struct zpp_err *err) {
    struct zpp_async *async = calloc(1, sizeof *async);
    if (!async) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for a progress thread");
    async->last = &async->first;
    async->holders = 1;
    pthread_mutex_init(&async->lock, NULL);
    zpp_cond_init(&async->queued);
    zpp_cond_init(&async->finished);
    comm->async = async;
    const int failed = pthread_create(&async->thread, NULL, run, comm);
    if (!failed) return ZPP_OK;
    comm->async = NULL;
    free(async);
    return zpp_fail_os(err, failed, "comm: no progress thread for group \"%s\"", comm->name);
}

zpp_status zpp_comm_submit(zpp_comm *comm, const struct zpp_call *call,
                           void (*done)(void *ctx, zpp_status, const struct zpp_err *), void *done_ctx, zpp_work **out,
                           struct zpp_err *err) {
    zpp_status status = zpp_comm_check(comm, err);
    if (status == ZPP_OK && !comm->async) status = async_make(comm, err);
    if (status != ZPP_OK) return status;
    struct zpp_work *work = calloc(1, sizeof *work);
    if (!work) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for an asynchronous call");
    struct zpp_async *async = comm->async;
    *work = (struct zpp_work){
        .async = async, .call = *call, .done = done, .done_ctx = done_ctx, .status = ZPP_AGAIN, .holders = 2};
    pthread_mutex_lock(&async->lock);
    *async->last = work;
    async->last = &work->next;
    async->holders++;
    atomic_fetch_add(&async->pending, 1);
    pthread_cond_signal(&async->queued);
    pthread_mutex_unlock(&async->lock);
    *out = work;
    return ZPP_OK;
}

/* --- waiting. The running call watches peers and its timeout; here only ticks and the caller's patience count. --- */

struct patience {
    const struct zpp_wait *wait;
    uint64_t start_ns;
};

/* Called with the lock held; gives it up while it sleeps and ticks. */
static zpp_status wait_a_bit(struct zpp_async *async, const struct patience *patience, struct zpp_err *err) {
    const struct timespec until = zpp_moment_in(100000000);
    const struct zpp_wait *wait = patience->wait;
    zpp_status status = ZPP_OK;
    if (pthread_cond_timedwait(&async->finished, &async->lock, &until) != ETIMEDOUT || !wait) return ZPP_OK;
    pthread_mutex_unlock(&async->lock);
    if (wait->tick) status = wait->tick(wait->ctx, err);
    if (status == ZPP_OK && wait->timeout_ns && zpp_now_ns() - patience->start_ns >= wait->timeout_ns)
        status = zpp_fail(err, ZPP_TIMEOUT,
                          "comm: an asynchronous call is not finished after %.3g s. Timed out waiting %.0fms",
                          (double)wait->timeout_ns / 1e9, (double)wait->timeout_ns / 1e6);
    pthread_mutex_lock(&async->lock);
    return status;
}

zpp_status zpp_work_wait(zpp_work *work, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_async *async = work->async;
    const struct patience patience = {wait, zpp_now_ns()};
    zpp_status status = ZPP_OK;
    pthread_mutex_lock(&async->lock);
    while (work->status == ZPP_AGAIN && status == ZPP_OK) status = wait_a_bit(async, &patience, err);
    if (status == ZPP_OK) {
        status = work->status;
        if (status != ZPP_OK && err) *err = work->err;
    }
    pthread_mutex_unlock(&async->lock);
    return status;
}

bool zpp_work_finished(zpp_work *work) {
    struct zpp_async *async = work->async;
    pthread_mutex_lock(&async->lock);
    const bool finished = work->status != ZPP_AGAIN;
    pthread_mutex_unlock(&async->lock);
    return finished;
}

void zpp_work_free(zpp_work *work) {
    if (work) work_drop(work);
}

zpp_status zpp_async_drain(struct zpp_comm *comm, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_async *async = comm->async;
    if (!async || !atomic_load_explicit(&async->pending, memory_order_acquire)) return ZPP_OK;
    const struct patience patience = {wait, zpp_now_ns()};
    zpp_status status = ZPP_OK;
    pthread_mutex_lock(&async->lock);
    while (atomic_load(&async->pending) && status == ZPP_OK) status = wait_a_bit(async, &patience, err);
    pthread_mutex_unlock(&async->lock);
    return status;
}

/* Queued calls run first, so that all ranks keep one order. */
zpp_status zpp_comm_call(zpp_comm *comm, const struct zpp_call *call, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    const zpp_status status = zpp_async_drain(comm, wait, err);
    return status == ZPP_OK ? zpp_call_now(comm, call, wait, err) : status;
}

void zpp_async_destroy(struct zpp_comm *comm) {
    struct zpp_async *async = comm->async;
    if (!async || zpp_comm_forked(comm))
        return; /* in a forked child there is no thread, and the lock may be held for ever */
    if (atomic_load(&async->pending)) zpp_comm_abort(comm, "it was destroyed while asynchronous calls were pending");
    pthread_mutex_lock(&async->lock);
    async->ending = true;
    pthread_cond_signal(&async->queued);
    pthread_mutex_unlock(&async->lock);
    pthread_join(async->thread, NULL);
    comm->async = NULL;
    async_drop(async);
}
