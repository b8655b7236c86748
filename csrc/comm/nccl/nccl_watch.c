/* SPDX-License-Identifier: Apache-2.0
 *
 * What ends a group on GPUs, and who says so. A thread looks every 0.1 s while there is work: at the communicator,
 * whose comm error names a rank that died, is late or diverged; at what NCCL found by itself; at how long the oldest
 * work takes. Without work it sleeps.
 */
#include <errno.h>
#include <time.h>

#include "nccl_internal.h"

/* The communicator's own time-out names who is absent, so it goes first. */
static const uint64_t AFTER_CONTROL_NS = 3000000000u, AFTER_DEATH_NS = 2000000000u;

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

static bool is_finished(const struct zpp_nccl_work *work) {
    return zpp_event_sync(work->done, NULL, NULL) == ZPP_OK;
}

static void check_oldest(struct zpp_nccl *nccl, const struct zpp_nccl_work *oldest) {
    const uint64_t took_ns = zpp_now_ns() - oldest->since_ns, most_ns = nccl->control->timeout_ns;
    ncclResult_t result = ZPP_NCCL_SUCCESS;
    const ncclResult_t asked = nccl->api->ncclCommGetAsyncError(nccl->comm, &result);
    if (asked != ZPP_NCCL_SUCCESS) result = asked;
    if (result != ZPP_NCCL_SUCCESS && result != ZPP_NCCL_IN_PROGRESS)
        (void)zpp_nccl_break_by_nccl(nccl, result, oldest->what, NULL);
    else if (took_ns > AFTER_DEATH_NS && find_gone(nccl->control) != ZPP_NO_RANK)
        (void)break_by_death(nccl, oldest->what, find_gone(nccl->control));
    else if (most_ns && took_ns > most_ns + AFTER_CONTROL_NS)
        (void)zpp_nccl_break_by_time(nccl, oldest->what, took_ns, NULL);
}

static void check_group(struct zpp_nccl *nccl) {
    const struct zpp_nccl_work *gathered = nccl->gathered.first;
    struct zpp_err seen = ZPP_ERR_INIT;
    if (gathered && zpp_now_ns() - gathered->since_ns > ZPP_NCCL_CHECK_NS) (void)zpp_nccl_flush(nccl, NULL);
    if (nccl->error.status == ZPP_OK && zpp_comm_health(nccl->control, &seen) != ZPP_OK)
        (void)zpp_nccl_break(nccl, &seen, NULL);
    if (nccl->error.status == ZPP_OK && nccl->running.first) check_oldest(nccl, nccl->running.first);
}

void zpp_nccl_check_health(struct zpp_nccl *nccl) {
    while (nccl->running.first && is_finished(nccl->running.first)) {
        nccl->running.first->finished = true;
        zpp_nccl_retire(&nccl->running);
    }
    if (nccl->error.status == ZPP_OK) check_group(nccl);
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
        const struct timespec until = zpp_moment_in((long)ZPP_NCCL_CHECK_NS);
        while (!nccl->ending && pthread_cond_timedwait(&nccl->changed, &nccl->lock, &until) != ETIMEDOUT) continue;
        zpp_nccl_check_health(nccl);
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
