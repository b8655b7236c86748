/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups on GPUs, and their works: nccl.h.
 */
#include "nccl_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* --- collectives -------------------------------------------------------------------------------------------------- */

/* The stream of the group that stands for the driver's. */
static zpp_stream *caller_of(struct zpp_nccl *nccl, void *native) {
    zpp_stream_adopt(nccl->caller, native);
    return nccl->caller;
}

/* Make the group's stream wait for what the caller's stream holds now. */
static zpp_status follow(struct zpp_nccl *nccl, zpp_stream *caller, struct zpp_err *err) {
    zpp_status status = zpp_event_record(nccl->before, caller, err);
    return status == ZPP_OK ? zpp_stream_wait(nccl->stream, nccl->before, NULL, err) : status;
}

static zpp_status stands(const struct zpp_nccl *nccl, struct zpp_err *err) {
    if (nccl->error.status != ZPP_OK) return zpp_fail_again(err, &nccl->error);
    return zpp_comm_health(nccl->control, err);
}

/* Submit the call to the communicator, without its bytes; it is compared on the progress thread. */
static zpp_status enter_identity(struct zpp_nccl *nccl, const struct zpp_call *call, struct zpp_err *err) {
    struct zpp_call beside = *call;
    zpp_work *work = NULL;
    beside.beside = true;
    const zpp_status status = zpp_comm_submit(nccl->control, &beside, NULL, NULL, &work, err);
    if (status == ZPP_OK) zpp_work_free(work);
    return status;
}

static zpp_status check_all(const struct zpp_nccl *nccl, const struct zpp_call *calls, size_t count,
                            struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (size_t i = 0; i < count && status == ZPP_OK; i++) status = zpp_nccl_check(nccl, &calls[i], err);
    return status;
}

/* With the lock. */
static zpp_status submit(zpp_nccl *nccl, const struct zpp_call *calls, size_t count, zpp_stream *caller,
                         const struct zpp_wait *wait, zpp_nccl_work **out, struct zpp_err *err) {
    struct zpp_nccl_work *work = NULL;
    zpp_status status = stands(nccl, err);
    if (status == ZPP_OK) status = zpp_nccl_flush(nccl, err);
    if (status == ZPP_OK && !(work = zpp_nccl_work_new(nccl, err))) status = ZPP_NOMEM;
    for (size_t i = 0; i < count && status == ZPP_OK; i++) status = enter_identity(nccl, &calls[i], err);
    if (status == ZPP_OK) status = follow(nccl, caller, err);
    if (status == ZPP_OK) {
        struct zpp_call first = calls[0];
        first.beside = true;
        zpp_call_describe(nccl->control, &first, work->what, sizeof work->what);
        status = zpp_nccl_launch(nccl, calls, count, NULL, work->what, wait, err);
        status = zpp_nccl_run(nccl, work, status, err);
    }
    if (status == ZPP_OK)
        *out = work;
    else if (work)
        zpp_nccl_work_undo(work);
    return status;
}

zpp_status zpp_nccl_submit(zpp_nccl *nccl, const struct zpp_call *calls, size_t count, void *native,
                           const struct zpp_wait *wait, zpp_nccl_work **out, struct zpp_err *err) {
    zpp_status status = check_all(nccl, calls, count, err);
    if (status != ZPP_OK) return status;
    pthread_mutex_lock(&nccl->lock);
    status = submit(nccl, calls, count, caller_of(nccl, native), wait, out, err);
    pthread_mutex_unlock(&nccl->lock);
    return status;
}

zpp_status zpp_nccl_order(zpp_nccl *nccl, const struct zpp_call *calls, size_t count, zpp_stream *stream,
                          struct zpp_err *err) {
    struct zpp_nccl_work *work = NULL;
    zpp_status status = check_all(nccl, calls, count, err);
    if (status != ZPP_OK) return status;
    pthread_mutex_lock(&nccl->lock);
    status = submit(nccl, calls, count, stream, NULL, &work, err);
    if (status == ZPP_OK) status = zpp_stream_wait(stream, work->done, NULL, err);
    pthread_mutex_unlock(&nccl->lock);
    zpp_nccl_work_free(work);
    return status;
}

void zpp_nccl_set_halt(zpp_nccl *nccl, uint64_t *halt) {
    pthread_mutex_lock(&nccl->lock);
    nccl->halt = halt;
    pthread_mutex_unlock(&nccl->lock);
}

/* --- sends and receives ------------------------------------------------------------------------------------------- */

static zpp_status gather_one(zpp_nccl *nccl, bool sends, const struct zpp_call *transfer, void *native,
                             zpp_nccl_work **out, struct zpp_err *err) {
    if (transfer->root < 0 || transfer->root >= nccl->control->ranks || transfer->root == nccl->control->rank)
        return zpp_fail(err, ZPP_INVALID, "comm: rank %d of group \"%s\" cannot %s rank %d on CUDA memory%s",
                        nccl->control->rank, nccl->control->name, sends ? "send to" : "receive from", transfer->root,
                        transfer->root < 0 ? ": NCCL receives from one rank that is named, not from any" : "");
    pthread_mutex_lock(&nccl->lock);
    struct zpp_nccl_work *work = NULL;
    zpp_status status = stands(nccl, err);
    if (status == ZPP_OK && !(work = zpp_nccl_work_new(nccl, err))) status = ZPP_NOMEM;
    if (status == ZPP_OK) status = follow(nccl, caller_of(nccl, native), err);
    if (status == ZPP_OK) {
        work->transfer = *transfer;
        work->sends = sends;
        snprintf(work->what, sizeof work->what, "%s(%zu bytes, rank %d)", sends ? "send" : "recv", transfer->elems,
                 transfer->root);
        zpp_nccl_append(&nccl->gathered, work);
        pthread_cond_signal(&nccl->changed);
        *out = work;
    } else if (work) {
        zpp_nccl_work_undo(work);
    }
    pthread_mutex_unlock(&nccl->lock);
    return status;
}

zpp_status zpp_nccl_send(zpp_nccl *nccl, const void *data, size_t bytes, int to, void *native, zpp_nccl_work **out,
                         struct zpp_err *err) {
    const struct zpp_call transfer = {.src = data, .elems = bytes, .root = to};
    return gather_one(nccl, true, &transfer, native, out, err);
}

zpp_status zpp_nccl_recv(zpp_nccl *nccl, void *data, size_t bytes, int from, void *native, zpp_nccl_work **out,
                         struct zpp_err *err) {
    const struct zpp_call transfer = {.dst = data, .elems = bytes, .root = from};
    return gather_one(nccl, false, &transfer, native, out, err);
}

/* --- waiting for works -------------------------------------------------------------------------------------------- */

/* Launch the work, if it is not. A finished work is OK, whatever happened to the group afterwards. */
static zpp_status ready(zpp_nccl_work *work, struct zpp_err *err) {
    struct zpp_nccl *nccl = work->nccl;
    if (work->finished) return ZPP_OK;
    zpp_status status = stands(nccl, err);
    if (status == ZPP_OK && !work->launched) status = zpp_nccl_flush(nccl, err);
    return status;
}

zpp_status zpp_nccl_work_order(zpp_nccl_work *work, void *native, struct zpp_err *err) {
    struct zpp_nccl *nccl = work->nccl;
    pthread_mutex_lock(&nccl->lock);
    zpp_status status = ready(work, err);
    if (status == ZPP_OK && !work->finished) {
        zpp_stream_adopt(nccl->caller, native);
        status = zpp_stream_wait(nccl->caller, work->done, NULL, err);
    }
    pthread_mutex_unlock(&nccl->lock);
    return status;
}

static zpp_status ask(zpp_nccl_work *work, struct zpp_err *err) {
    pthread_mutex_lock(&work->nccl->lock);
    zpp_status status = ready(work, err);
    if (status == ZPP_OK && !work->finished) {
        status = zpp_event_sync(work->done, NULL, err);
        work->finished = status == ZPP_OK;
    }
    pthread_mutex_unlock(&work->nccl->lock);
    return status;
}

zpp_status zpp_nccl_work_wait(zpp_nccl_work *work, const struct zpp_wait *wait, struct zpp_err *err) {
    const uint64_t start_ns = zpp_now_ns();
    uint64_t tick_ns = start_ns + 100000000;
    for (;;) {
        const zpp_status status = ask(work, err);
        if (status != ZPP_AGAIN || !wait) return status;
        const uint64_t now_ns = zpp_now_ns();
        if (wait->timeout_ns && now_ns - start_ns >= wait->timeout_ns)
            return zpp_fail(err, ZPP_TIMEOUT,
                            "comm: %s on a GPU is not finished after %.3g s. Timed out waiting %.0fms", work->what,
                            (double)wait->timeout_ns / 1e9, (double)wait->timeout_ns / 1e6);
        if (now_ns >= tick_ns && wait->tick) {
            tick_ns = now_ns + 100000000;
            const zpp_status ticked = wait->tick(wait->ctx, err);
            if (ticked != ZPP_OK) return ticked;
        }
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
}

void zpp_nccl_work_free(zpp_nccl_work *work) {
    if (!work) return;
    struct zpp_nccl *nccl = work->nccl;
    pthread_mutex_lock(&nccl->lock);
    const bool gone = zpp_nccl_work_drop(work);
    pthread_mutex_unlock(&nccl->lock);
    if (gone) zpp_nccl_drop(nccl);
}

/* --- life --------------------------------------------------------------------------------------------------------- */

struct join {
    struct zpp_nccl *nccl;
    const ncclUniqueId *id;
    ncclResult_t *result;
};

/* Run as a device operation, because NCCL uses the current device of the calling thread. */
static zpp_status join(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    const struct join *what = arg;
    struct zpp_nccl *nccl = what->nccl;
    ncclConfig_t config = ZPP_NCCL_CONFIG_NOT_BLOCKING;
    nccl->native = native;
    *what->result = nccl->api->ncclCommInitRankConfig(&nccl->comm, nccl->control->ranks, *what->id, nccl->control->rank,
                                                      &config);
    return ZPP_OK;
}

static zpp_status prepare(struct zpp_nccl *nccl, ncclUniqueId *id, struct zpp_err *err) {
    zpp_status status = zpp_nccl_api(&nccl->api, err);
    if (status == ZPP_OK && !nccl->borrows_stream)
        status = zpp_stream_create(nccl->device, ZPP_STREAM_THREAD, "nccl", &nccl->stream, err);
    if (status == ZPP_OK) status = zpp_stream_create(nccl->device, ZPP_STREAM_HOST, "caller", &nccl->caller, err);
    if (status == ZPP_OK) status = zpp_event_create(nccl->device, &nccl->before, err);
    if (status != ZPP_OK || nccl->control->rank != 0) return status;
    const ncclResult_t result = nccl->api->ncclGetUniqueId(id);
    if (result == ZPP_NCCL_SUCCESS) return ZPP_OK;
    return zpp_fail(err, ZPP_DEVICE, "comm: rank 0 of group \"%s\" gets no id from NCCL: %s", nccl->control->name,
                    nccl->api->ncclGetErrorString(result));
}

/* Every rank reports whether it can take part, rank 0 also the id; otherwise a rank that cannot would block the
 * others. */
struct said {
    ncclUniqueId id;
    int32_t status;
    char why[256];
};

static zpp_status join_ranks(struct zpp_nccl *nccl, const struct zpp_wait *wait, struct zpp_err *err) {
    struct said all[ZPP_RANKS_MAX], mine = {0};
    struct zpp_err failure = ZPP_ERR_INIT;
    mine.status = prepare(nccl, &mine.id, &failure);
    snprintf(mine.why, sizeof mine.why, "%.255s", failure.text);
    zpp_status status = zpp_all_gather(nccl->control, all, &mine, sizeof mine, wait, err);
    if (status != ZPP_OK) return status;
    if (mine.status != ZPP_OK) return zpp_fail_again(err, &failure);
    for (int r = 0; r < nccl->control->ranks; r++) {
        if (all[r].status == ZPP_OK) continue;
        all[r].why[sizeof all[r].why - 1] = 0;
        return zpp_fail_rank(err, (zpp_status)all[r].status, r, "comm: rank %d of group \"%s\" cannot use its GPU: %s",
                             r, nccl->control->name, all[r].why);
    }
    ncclResult_t result = ZPP_NCCL_SUCCESS;
    const struct join arg = {nccl, &all[0].id, &result};
    status = zpp_stream_launch(nccl->stream, join, &arg, sizeof arg, err);
    if (status != ZPP_OK) return status;
    pthread_mutex_lock(&nccl->lock);
    status = zpp_nccl_settle(nccl, result, "the rendezvous of its GPUs", wait, err);
    pthread_mutex_unlock(&nccl->lock);
    return status;
}

/* `stream`: borrowed; NULL: the group makes its own. */
static zpp_status create(zpp_comm *control, zpp_device *device, zpp_stream *stream, const struct zpp_wait *wait,
                         zpp_nccl **out, struct zpp_err *err) {
    struct zpp_nccl *nccl = calloc(1, sizeof *nccl);
    if (!nccl) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for a group on GPUs");
    zpp_cond_init(&nccl->changed);
    pthread_mutex_init(&nccl->lock, NULL);
    nccl->control = control;
    nccl->device = device;
    nccl->stream = stream;
    nccl->borrows_stream = stream != NULL;
    nccl->holders = 1;
    nccl->running.last = &nccl->running.first;
    nccl->gathered.last = &nccl->gathered.first;
    zpp_status status = join_ranks(nccl, wait, err);
    if (status == ZPP_OK) status = zpp_nccl_watch_start(nccl, err);
    if (status == ZPP_OK)
        *out = nccl;
    else
        zpp_nccl_destroy(nccl);
    return status;
}

zpp_status zpp_nccl_create(zpp_comm *control, zpp_device *device, const struct zpp_wait *wait, zpp_nccl **out,
                           struct zpp_err *err) {
    return create(control, device, NULL, wait, out, err);
}

zpp_status zpp_nccl_create_behind(zpp_nccl *first, zpp_comm *control, const struct zpp_wait *wait, zpp_nccl **out,
                                  struct zpp_err *err) {
    return create(control, first->device, first->stream, wait, out, err);
}

/* Flush while the group has no error; remaining works end with it. */
static void drain(struct zpp_nccl *nccl) {
    (void)zpp_nccl_flush(nccl, NULL);
    while (nccl->running.first) {
        zpp_nccl_check_health(nccl);
        if (!nccl->running.first) break;
        pthread_mutex_unlock(&nccl->lock);
        nanosleep(&(struct timespec){0, 100000}, NULL);
        pthread_mutex_lock(&nccl->lock);
    }
    while (nccl->gathered.first) zpp_nccl_retire(&nccl->gathered);
}

static void end_comm(struct zpp_nccl *nccl) {
    static const struct zpp_wait patience = {10000000000u, NULL, NULL};
    struct zpp_err seen = ZPP_ERR_INIT;
    if (!nccl->comm) return;
    if (zpp_comm_health(nccl->control, &seen) != ZPP_OK) {
        (void)zpp_nccl_break(nccl, &seen, NULL);
        return;
    }
    const ncclResult_t result = nccl->api->ncclCommFinalize(nccl->comm);
    if (zpp_nccl_settle(nccl, result, "the end of the group", &patience, NULL) != ZPP_OK) return; /* aborted */
    nccl->api->ncclCommDestroy(nccl->comm);
    nccl->comm = NULL;
}

void zpp_nccl_destroy(zpp_nccl *nccl) {
    if (!nccl) return;
    zpp_nccl_watch_end(nccl);
    const struct zpp_wait patience = {nccl->control->timeout_ns, NULL, NULL};
    (void)zpp_async_drain(nccl->control, &patience, NULL); /* calls that the progress thread has not compared yet */
    pthread_mutex_lock(&nccl->lock);
    drain(nccl);
    end_comm(nccl);
    if (nccl->error.status == ZPP_OK)
        zpp_fail(&nccl->error, ZPP_STATE, "comm: group \"%s\" on GPUs is closed; make a new one", nccl->control->name);
    pthread_mutex_unlock(&nccl->lock);
    if (nccl->caller) zpp_stream_adopt(nccl->caller, NULL); /* the caller's stream may be destroyed */
    zpp_event_destroy(nccl->before);
    if (!nccl->borrows_stream) zpp_stream_destroy(nccl->stream);
    zpp_stream_destroy(nccl->caller);
    zpp_nccl_drop(nccl);
}

void *zpp_nccl_stream(const zpp_nccl *nccl) { return nccl->native; }

