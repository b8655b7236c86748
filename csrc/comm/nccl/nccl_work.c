/* SPDX-License-Identifier: Apache-2.0
 *
 * Works of a group on GPUs: their lists, calls of NCCL and waits for it, the end of a group that fails, and the
 * watching thread. The thread checks every 0.1 s while there is work: the communicator, whose comm error names a rank
 * that died, is late or diverged; errors that NCCL detected; how long the oldest work takes. Without work it sleeps.
 * The lock is held in all of it, but for zpp_nccl_drop and the start and end of the thread.
 */
#include "nccl_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

/* --- works -------------------------------------------------------------------------------------------------------- */

void zpp_nccl_drop(struct zpp_nccl *nccl) {
    pthread_mutex_lock(&nccl->lock);
    const bool last = --nccl->holders == 0;
    pthread_mutex_unlock(&nccl->lock);
    if (!last) return;
    pthread_cond_destroy(&nccl->changed);
    pthread_mutex_destroy(&nccl->lock);
    free(nccl);
}

bool zpp_nccl_work_drop(struct zpp_nccl_work *work) {
    if (--work->holders) return false;
    zpp_event_destroy(work->done);
    free(work);
    return true;
}

void zpp_nccl_append(struct zpp_nccl_list *list, struct zpp_nccl_work *work) {
    work->next = NULL;
    *list->last = work;
    list->last = &work->next;
}

static struct zpp_nccl_work *take_first(struct zpp_nccl_list *list) {
    struct zpp_nccl_work *work = list->first;
    list->first = work->next;
    if (!list->first) list->last = &list->first;
    return work;
}

void zpp_nccl_retire(struct zpp_nccl_list *list) {
    struct zpp_nccl_work *work = take_first(list);
    struct zpp_nccl *nccl = work->nccl;
    if (zpp_nccl_work_drop(work)) nccl->holders--; /* freed by the caller; the group keeps itself */
}

struct zpp_nccl_work *zpp_nccl_work_new(struct zpp_nccl *nccl, struct zpp_err *err) {
    struct zpp_nccl_work *work = calloc(1, sizeof *work);
    if (!work) {
        zpp_fail(err, ZPP_NOMEM, "comm: no memory for a call on a GPU");
        return NULL;
    }
    if (zpp_event_create(nccl->device, &work->done, err) != ZPP_OK) {
        free(work);
        return NULL;
    }
    work->nccl = nccl;
    work->holders = 2;
    work->since_ns = zpp_now_ns();
    nccl->holders++;
    return work;
}

void zpp_nccl_work_undo(struct zpp_nccl_work *work) {
    work->nccl->holders--;
    work->holders = 1;
    (void)zpp_nccl_work_drop(work);
}

/* --- the end of a group ------------------------------------------------------------------------------------------- */

zpp_status zpp_nccl_break(struct zpp_nccl *nccl, const struct zpp_err *cause, struct zpp_err *err) {
    if (nccl->error.status == ZPP_OK) {
        if (zpp_comm_health(nccl->control, &nccl->error) == ZPP_OK)
            (void)zpp_comm_fail(nccl->control, cause->status, cause->rank, &nccl->error, "%s", cause->text);
        if (nccl->halt) __atomic_store_n(nccl->halt, 1, __ATOMIC_SEQ_CST);
        if (nccl->comm) nccl->api->ncclCommAbort(nccl->comm); /* kernels that wait for a peer end, too */
        nccl->comm = NULL;
    }
    return zpp_fail_again(err, &nccl->error);
}

zpp_status zpp_nccl_break_by_nccl(struct zpp_nccl *nccl, ncclResult_t result, const char *doing, struct zpp_err *err) {
    const char *more = nccl->api->ncclGetLastError && nccl->comm ? nccl->api->ncclGetLastError(nccl->comm) : NULL;
    struct zpp_err cause = ZPP_ERR_INIT;
    zpp_fail_rank(&cause, ZPP_DEVICE, nccl->control->rank, "comm: rank %d of group \"%s\" in %s: NCCL: %s%s%.300s",
                  nccl->control->rank, nccl->control->name, doing, nccl->api->ncclGetErrorString(result),
                  more && more[0] ? ": " : "", more ? more : "");
    return zpp_nccl_break(nccl, &cause, err);
}

zpp_status zpp_nccl_break_by_time(struct zpp_nccl *nccl, const char *doing, uint64_t waited_ns, struct zpp_err *err) {
    struct zpp_err cause = ZPP_ERR_INIT;
    zpp_fail_rank(&cause, ZPP_TIMEOUT, nccl->control->rank,
                  "comm: the GPU of rank %d of group \"%s\" has not finished %s after %.3g s; this GPU, a "
                  "peer's, or their link hangs. Timed out waiting %.0fms",
                  nccl->control->rank, nccl->control->name, doing, (double)waited_ns / 1e9, (double)waited_ns / 1e6);
    return zpp_nccl_break(nccl, &cause, err);
}

/* The caller gets the tick's error, the other ranks one that this rank was interrupted. */
static zpp_status break_by_tick(struct zpp_nccl *nccl, const char *doing, const struct zpp_err *said,
                                struct zpp_err *err) {
    struct zpp_err cause = ZPP_ERR_INIT;
    zpp_fail_rank(&cause, ZPP_ABORTED, nccl->control->rank, "comm: rank %d of group \"%s\" was interrupted in %s",
                  nccl->control->rank, nccl->control->name, doing);
    (void)zpp_nccl_break(nccl, &cause, NULL);
    return zpp_fail_again(err, said);
}

static uint64_t limit_ns(const struct zpp_nccl *nccl, const struct zpp_wait *wait) {
    return wait ? wait->timeout_ns : nccl->control->timeout_ns;
}

zpp_status zpp_nccl_settle(struct zpp_nccl *nccl, ncclResult_t result, const char *doing, const struct zpp_wait *wait,
                           struct zpp_err *err) {
    const uint64_t start_ns = zpp_now_ns(), most_ns = limit_ns(nccl, wait);
    uint64_t tick_ns = start_ns + ZPP_NCCL_CHECK_NS;
    while (result == ZPP_NCCL_IN_PROGRESS) {
        struct zpp_err seen = ZPP_ERR_INIT;
        const ncclResult_t asked = nccl->api->ncclCommGetAsyncError(nccl->comm, &result);
        if (asked != ZPP_NCCL_SUCCESS) result = asked;
        if (result != ZPP_NCCL_IN_PROGRESS) break;
        if (zpp_comm_health(nccl->control, &seen) != ZPP_OK) return zpp_nccl_break(nccl, &seen, err);
        const uint64_t now_ns = zpp_now_ns();
        if (most_ns && now_ns - start_ns > most_ns) return zpp_nccl_break_by_time(nccl, doing, now_ns - start_ns, err);
        if (now_ns > tick_ns && wait && wait->tick) {
            tick_ns = now_ns + ZPP_NCCL_CHECK_NS;
            if (wait->tick(wait->ctx, &seen) != ZPP_OK) return break_by_tick(nccl, doing, &seen, err);
        }
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
    return result == ZPP_NCCL_SUCCESS ? ZPP_OK : zpp_nccl_break_by_nccl(nccl, result, doing, err);
}

/* --- launching; the lock is held ---------------------------------------------------------------------------------- */

struct enqueue {
    const struct zpp_nccl *nccl;
    const struct zpp_call *calls;
    size_t count;
    const struct zpp_nccl_work *transfers;
    ncclResult_t *result;
};

static zpp_status enqueue(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    const struct enqueue *what = arg;
    *what->result = zpp_nccl_enqueue(what->nccl, what->calls, what->count, what->transfers, native);
    return ZPP_OK; /* NCCL's error belongs to the group, not to the stream */
}

zpp_status zpp_nccl_launch(struct zpp_nccl *nccl, const struct zpp_call *calls, size_t count,
                           const struct zpp_nccl_work *transfers, const char *what, const struct zpp_wait *wait,
                           struct zpp_err *err) {
    ncclResult_t result = ZPP_NCCL_SUCCESS;
    const struct enqueue arg = {nccl, calls, count, transfers, &result};
    zpp_status status = zpp_stream_launch(nccl->stream, enqueue, &arg, sizeof arg, err);
    return status == ZPP_OK ? zpp_nccl_settle(nccl, result, what, wait, err) : status;
}

zpp_status zpp_nccl_run(struct zpp_nccl *nccl, struct zpp_nccl_work *work, zpp_status status, struct zpp_err *err) {
    if (status == ZPP_OK) status = zpp_event_record(work->done, nccl->stream, err);
    if (status != ZPP_OK) return status;
    work->launched = true;
    zpp_nccl_append(&nccl->running, work);
    pthread_cond_signal(&nccl->changed);
    return ZPP_OK;
}

zpp_status zpp_nccl_flush(struct zpp_nccl *nccl, struct zpp_err *err) {
    if (!nccl->gathered.first) return ZPP_OK;
    zpp_status status = zpp_nccl_launch(nccl, NULL, 0, nccl->gathered.first, nccl->gathered.first->what, NULL, err);
    while (status == ZPP_OK && nccl->gathered.first) {
        struct zpp_nccl_work *work = take_first(&nccl->gathered);
        status = zpp_nccl_run(nccl, work, ZPP_OK, err);
        if (status != ZPP_OK && zpp_nccl_work_drop(work)) nccl->holders--;
    }
    return status;
}

/* --- the watching thread ------------------------------------------------------------------------------------------ */

/* The communicator's own timeout names the absent ranks, so it is checked first. */
static const uint64_t AFTER_CONTROL_NS = 3000000000u, AFTER_DEATH_NS = 2000000000u;

/* Every rank made the call, and one died or left before its GPU had finished. A rank that merely left had finished its
 * part, and this GPU will finish soon. */
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
