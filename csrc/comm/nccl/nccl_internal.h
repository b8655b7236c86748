/* SPDX-License-Identifier: Apache-2.0
 *
 * What nccl.c (groups), nccl_work.c (works, and the thread that watches them) and nccl_calls.c (from a call to NCCL's
 * functions) share.
 *
 * Locks: `lock` guards all of a group's state except what create wrote. It is held during calls of NCCL, which does
 * not block; settle() ends by itself. The communicator's own locks nest inside.
 */
#ifndef ZPP_COMM_NCCL_INTERNAL_H
#define ZPP_COMM_NCCL_INTERNAL_H

#include <pthread.h>

#include "../internal.h"
#include "nccl.h"
#include "nccl_api.h"

/* How often the watching thread and waits check the group. */
static const uint64_t ZPP_NCCL_CHECK_NS = 100000000u;

struct zpp_nccl_work {
    struct zpp_nccl_work *next;
    zpp_nccl *nccl;
    zpp_event *done;        /* recorded behind it, once it is launched */
    bool launched, finished;
    int holders; /* held by the group's lists, and by the caller */
    uint64_t since_ns;
    char what[160];         /* for messages */
    struct zpp_call transfer; /* send or receive: `elems` bytes from src, or to dst if not `sends`; root is the peer */
    bool sends;
};

struct zpp_nccl_list {
    struct zpp_nccl_work *first, **last;
};

struct zpp_nccl {
    zpp_comm *control;
    zpp_device *device;
    const struct zpp_nccl_api *api;
    zpp_stream *stream, *caller; /* the group's own, whatever stream the caller has */
    bool borrows_stream;         /* of the group that it was made behind */
    zpp_event *before;           /* recorded on the caller's stream when a call comes */
    void *native;                /* of `stream` */
    uint64_t *halt;              /* NULL, or zpp_nccl_set_halt */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t watch;
    bool watching, ending;
    ncclComm_t comm;             /* NULL once it is broken or ended */
    struct zpp_err error;        /* what broke it */
    struct zpp_nccl_list running, gathered; /* launched; sends and receives that are not */
    int holders;                            /* held by the caller of create, and by works that were not freed */
};

/* --- nccl_calls.c ------------------------------------------------------------------------------------------------- */
/* Refuse operations that NCCL lacks, before anything is enqueued. */
zpp_status zpp_nccl_check(const struct zpp_nccl *nccl, const struct zpp_call *call, struct zpp_err *err);
/* Enqueue all of `calls`, then all of `transfers` (may be NULL), as one NCCL group on `native`. Return NCCL's
 * result. */
ncclResult_t zpp_nccl_enqueue(const struct zpp_nccl *nccl, const struct zpp_call *calls, size_t count,
                              const struct zpp_nccl_work *transfers, void *native);

/* --- nccl_work.c; the lock is held -------------------------------------------------------------------------------- */
void zpp_nccl_drop(struct zpp_nccl *nccl); /* one holder less; without the lock */
/* New, held by the group's lists and by the caller. NULL with NOMEM or DEVICE. */
struct zpp_nccl_work *zpp_nccl_work_new(struct zpp_nccl *nccl, struct zpp_err *err);
void zpp_nccl_work_undo(struct zpp_nccl_work *work); /* of a work that is in no list */
/* Drop one holder. Return true if it was the last; then drop one of the group's, too. */
bool zpp_nccl_work_drop(struct zpp_nccl_work *work);
void zpp_nccl_append(struct zpp_nccl_list *list, struct zpp_nccl_work *work);
void zpp_nccl_retire(struct zpp_nccl_list *list); /* remove its first work, which is finished or never will be */
/* Enqueue as zpp_nccl_enqueue on the group's stream, and settle. */
zpp_status zpp_nccl_launch(struct zpp_nccl *nccl, const struct zpp_call *calls, size_t count,
                           const struct zpp_nccl_work *transfers, const char *what, const struct zpp_wait *wait,
                           struct zpp_err *err);
/* Add a work to the running ones, after a launch that returned `status`. */
zpp_status zpp_nccl_run(struct zpp_nccl *nccl, struct zpp_nccl_work *work, zpp_status status, struct zpp_err *err);
zpp_status zpp_nccl_flush(struct zpp_nccl *nccl, struct zpp_err *err); /* launch what was gathered */
/* Wait until NCCL has finished `result`, a call that may be in progress; break the group if it fails, if the
 * communicator ends, or if the timeout of `wait` (NULL: the communicator's) expires. */
zpp_status zpp_nccl_settle(struct zpp_nccl *nccl, ncclResult_t result, const char *doing, const struct zpp_wait *wait,
                           struct zpp_err *err);
/* End the group: `cause` becomes the comm error of the communicator, unless it has one. Return that comm error. The
 * next two do so for a failure of NCCL in `doing`, and for a call that took too long. */
zpp_status zpp_nccl_break(struct zpp_nccl *nccl, const struct zpp_err *cause, struct zpp_err *err);
zpp_status zpp_nccl_break_by_nccl(struct zpp_nccl *nccl, ncclResult_t result, const char *doing, struct zpp_err *err);
zpp_status zpp_nccl_break_by_time(struct zpp_nccl *nccl, const char *doing, uint64_t waited_ns, struct zpp_err *err);

/* Retire finished works; end the group after a failure. Called with the lock held. */
void zpp_nccl_check_health(struct zpp_nccl *nccl);
zpp_status zpp_nccl_watch_start(struct zpp_nccl *nccl, struct zpp_err *err);
void zpp_nccl_watch_end(struct zpp_nccl *nccl); /* without the lock */

#endif
