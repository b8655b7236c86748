/* SPDX-License-Identifier: Apache-2.0
 *
 * What ends a group on GPUs, and who says so. A thread looks every 0.1 s while there is work: at the communicator,
 * whose comm error names a rank that died, is late or diverged; at what NCCL found by itself; at how long the oldest
 * work takes. Without work it sleeps.
 */
#include <errno.h>
#include <stdio.h>
#include <time.h>

#include "nccl_internal.h"

/* The communicator's own time-out names who is absent, so it goes first. */
static const uint64_t LOOK_NS = 100000000u, AFTER_CONTROL_NS = 3000000000u, AFTER_DEATH_NS = 2000000000u;

zpp_status zpp_nccl_break(struct zpp_nccl *nccl, const struct zpp_err *cause, struct zpp_err *err) {
    if (nccl->error.status == ZPP_OK) {
        if (zpp_comm_health(nccl->control, &nccl->error) == ZPP_OK)
            (void)zpp_comm_fail(nccl->control, cause->status, cause->rank, &nccl->error, "%s", cause->text);
        if (nccl->comm) nccl->api->ncclCommAbort(nccl->comm); /* kernels that wait for a peer end, too */
        nccl->comm = NULL;
    }
    if (err) *err = nccl->error;
    return nccl->error.status;
}

static zpp_status break_by_nccl(struct zpp_nccl *nccl, ncclResult_t result, const char *doing, struct zpp_err *err) {
    const char *more = nccl->api->ncclGetLastError && nccl->comm ? nccl->api->ncclGetLastError(nccl->comm) : NULL;
    struct zpp_err cause = ZPP_ERR_INIT;
    zpp_fail_rank(&cause, ZPP_DEVICE, nccl->control->rank, "comm: rank %d of group \"%s\" in %s: NCCL: %s%s%.300s",
                  nccl->control->rank, nccl->control->name, doing, nccl->api->ncclGetErrorString(result),
                  more && more[0] ? ": " : "", more ? more : "");
    return zpp_nccl_break(nccl, &cause, err);
}

static zpp_status break_by_time(struct zpp_nccl *nccl, const char *doing, uint64_t waited_ns, struct zpp_err *err) {
    struct zpp_err cause = ZPP_ERR_INIT;
    zpp_fail_rank(&cause, ZPP_TIMEOUT, nccl->control->rank,
                  "comm: the GPU of rank %d of group \"%s\" has not finished %s after %.3g s; it, a peer's, or what "
                  "joins them hangs. Timed out waiting %.0fms",
                  nccl->control->rank, nccl->control->name, doing, (double)waited_ns / 1e9, (double)waited_ns / 1e6);
    return zpp_nccl_break(nccl, &cause, err);
}

/* The caller gets what its tick said, everybody else that this rank was interrupted. */
static zpp_status break_by_tick(struct zpp_nccl *nccl, const char *doing, const struct zpp_err *said,
                                struct zpp_err *err) {
    struct zpp_err cause = ZPP_ERR_INIT;
    zpp_fail_rank(&cause, ZPP_ABORTED, nccl->control->rank, "comm: rank %d of group \"%s\" was interrupted in %s",
                  nccl->control->rank, nccl->control->name, doing);
    (void)zpp_nccl_break(nccl, &cause, NULL);
    if (err) *err = *said;
    return said->status;
}

/* Every rank called it, and one went before its GPU was through. Who only left, left finished: its GPU had done its
 * part, and ours will soon. */
static zpp_status break_by_death(struct zpp_nccl *nccl, const char *doing, int rank) {
    struct zpp_err cause = ZPP_ERR_INIT;
    zpp_fail_rank(&cause, ZPP_PEER, rank,
                  "comm: rank %d of group \"%s\" died or left while the GPU of rank %d was in %s", rank,
                  nccl->control->name, nccl->control->rank, doing);
    return zpp_nccl_break(nccl, &cause, NULL);
}

static int find_gone(const struct zpp_comm *control) {
    for (int r = 0; r < control->ranks; r++)
        if (r != control->rank && zpp_peer_gone(control, r)) return r;
    return ZPP_NO_RANK;
}

static uint64_t limit_ns(const struct zpp_nccl *nccl, const struct zpp_wait *wait) {
    return wait ? wait->timeout_ns : nccl->control->timeout_ns;
}

zpp_status zpp_nccl_settle(struct zpp_nccl *nccl, ncclResult_t result, const char *doing, const struct zpp_wait *wait,
                           struct zpp_err *err) {
    const uint64_t start_ns = zpp_now_ns(), most_ns = limit_ns(nccl, wait);
    uint64_t tick_ns = start_ns + LOOK_NS;
    while (result == ZPP_NCCL_IN_PROGRESS) {
        struct zpp_err seen = ZPP_ERR_INIT;
        const ncclResult_t asked = nccl->api->ncclCommGetAsyncError(nccl->comm, &result);
        if (asked != ZPP_NCCL_SUCCESS) result = asked;
        if (result != ZPP_NCCL_IN_PROGRESS) break;
        if (zpp_comm_health(nccl->control, &seen) != ZPP_OK) return zpp_nccl_break(nccl, &seen, err);
        const uint64_t now_ns = zpp_now_ns();
        if (most_ns && now_ns - start_ns > most_ns) return break_by_time(nccl, doing, now_ns - start_ns, err);
        if (now_ns > tick_ns && wait && wait->tick) {
            tick_ns = now_ns + LOOK_NS;
            if (wait->tick(wait->ctx, &seen) != ZPP_OK) return break_by_tick(nccl, doing, &seen, err);
        }
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
    return result == ZPP_NCCL_SUCCESS ? ZPP_OK : break_by_nccl(nccl, result, doing, err);
}

static bool is_finished(const struct zpp_nccl_work *work) {
    return zpp_event_sync(work->done, NULL, NULL) == ZPP_OK;
}

void zpp_nccl_look(struct zpp_nccl *nccl) {
    struct zpp_err seen = ZPP_ERR_INIT;
    ncclResult_t result = ZPP_NCCL_SUCCESS;
    while (nccl->running.first && is_finished(nccl->running.first)) {
        nccl->running.first->finished = true;
        zpp_nccl_retire(&nccl->running);
    }
    if (nccl->error.status == ZPP_OK && nccl->gathered.first &&
        zpp_now_ns() - nccl->gathered.first->since_ns > LOOK_NS)
        (void)zpp_nccl_flush(nccl, NULL);
    if (nccl->error.status == ZPP_OK && zpp_comm_health(nccl->control, &seen) != ZPP_OK)
        (void)zpp_nccl_break(nccl, &seen, NULL);
    if (nccl->error.status == ZPP_OK && nccl->running.first) {
        const struct zpp_nccl_work *oldest = nccl->running.first;
        const uint64_t took_ns = zpp_now_ns() - oldest->since_ns, most_ns = nccl->control->timeout_ns;
        const ncclResult_t asked = nccl->api->ncclCommGetAsyncError(nccl->comm, &result);
        if (asked != ZPP_NCCL_SUCCESS) result = asked;
        if (result != ZPP_NCCL_SUCCESS && result != ZPP_NCCL_IN_PROGRESS)
            (void)break_by_nccl(nccl, result, oldest->what, NULL);
        else if (took_ns > AFTER_DEATH_NS && find_gone(nccl->control) != ZPP_NO_RANK)
            (void)break_by_death(nccl, oldest->what, find_gone(nccl->control));
        else if (most_ns && took_ns > most_ns + AFTER_CONTROL_NS)
            (void)break_by_time(nccl, oldest->what, took_ns, NULL);
    }
    if (nccl->error.status == ZPP_OK) return;
    while (nccl->running.first) zpp_nccl_retire(&nccl->running);
    while (nccl->gathered.first) zpp_nccl_retire(&nccl->gathered);
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

static void *watch(void *arg) {
    struct zpp_nccl *nccl = arg;
    pthread_mutex_lock(&nccl->lock);
    while (!nccl->ending) {
        if (!nccl->running.first && !nccl->gathered.first) {
            pthread_cond_wait(&nccl->changed, &nccl->lock);
            continue;
        }
        const struct timespec until = zpp_moment_in((long)LOOK_NS);
        while (!nccl->ending && pthread_cond_timedwait(&nccl->changed, &nccl->lock, &until) != ETIMEDOUT) continue;
        zpp_nccl_look(nccl);
    }
    pthread_mutex_unlock(&nccl->lock);
    return NULL;
}

zpp_status zpp_nccl_watch_start(struct zpp_nccl *nccl, struct zpp_err *err) {
    const int failed = pthread_create(&nccl->watch, NULL, watch, nccl);
    if (failed) return zpp_fail_os(err, failed, "comm: no watching thread for group \"%s\"", nccl->control->name);
    nccl->watching = true;
    return ZPP_OK;
}

void zpp_nccl_watch_end(struct zpp_nccl *nccl) {
    if (!nccl->watching) return;
    pthread_mutex_lock(&nccl->lock);
    nccl->ending = true;
    pthread_cond_signal(&nccl->changed);
    pthread_mutex_unlock(&nccl->lock);
    pthread_join(nccl->watch, NULL);
    nccl->watching = false;
}
