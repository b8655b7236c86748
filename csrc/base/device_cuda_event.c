/* SPDX-License-Identifier: Apache-2.0
 *
 * Events of the device cuda. An event of a stream without a queue is a native event. One that is recorded on a queue is
 * at first "not enqueued": an event of the host queue stands for the moment at which the queue has recorded the native
 * one. A wait is for both events: a queue waits by operations of its own, and the caller of a stream without a queue
 * drives the queue of the event.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device_cuda_internal.h"

enum { SPIN_NS = 30000, SLEEP_NS = 50000, TICK_NS = 100000000 };

struct cuda_event {
    zpp_event base;
    struct zpp_cuda_mark *mark; /* NULL: never recorded, so complete */
    zpp_event *enqueued;        /* of the host queue where it was recorded */
    bool queued;                /* it was recorded on a queue: `enqueued` counts */
    char stream_name[ZPP_STREAM_NAME_BYTES]; /* where it was recorded, for messages */
    struct zpp_err error; /* of that stream, when it was recorded; a queue's own error comes by `enqueued` */
}; /* All but `enqueued` is guarded by the device's lock. */

/* What an event stands for at one moment: the next record changes the event, not this. */
struct view {
    struct zpp_cuda_mark *mark; /* a reference; NULL: complete */
    bool queued;
    char stream_name[ZPP_STREAM_NAME_BYTES];
};

struct mark_arg {
    struct zpp_cuda_stream *stream;
    struct zpp_cuda_mark *mark; /* a reference */
};

/* --- marks -------------------------------------------------------------------------------------------------------- */
static void drop_mark(struct zpp_cuda_device *cuda, struct zpp_cuda_mark *mark) {
    if (!mark) return;
    pthread_mutex_lock(&cuda->lock);
    if (--mark->references == 0) {
        mark->next_free = cuda->free_marks;
        cuda->free_marks = mark;
    }
    pthread_mutex_unlock(&cuda->lock);
}

static struct view look_at(struct zpp_cuda_device *cuda, const struct cuda_event *event) {
    pthread_mutex_lock(&cuda->lock);
    struct view view = {event->mark, event->queued, ""};
    memcpy(view.stream_name, event->stream_name, sizeof view.stream_name);
    if (view.mark) view.mark->references += 1;
    pthread_mutex_unlock(&cuda->lock);
    return view;
}

static zpp_status error_of(struct zpp_cuda_device *cuda, const struct cuda_event *event, struct zpp_err *out) {
    pthread_mutex_lock(&cuda->lock);
    const struct zpp_err error = event->error;
    pthread_mutex_unlock(&cuda->lock);
    if (error.status && out) *out = error;
    return error.status;
}

static zpp_status make_mark(struct zpp_cuda_device *cuda, struct zpp_cuda_mark **out, struct zpp_err *err) {
    struct zpp_cuda_mark *mark = calloc(1, sizeof *mark);
    if (!mark) return zpp_fail(err, ZPP_NOMEM, "event: no memory for its record");
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (!status) {
        const CUresult result = cuda->api->cuEventCreate(&mark->native, ZPP_CU_EVENT_DISABLE_TIMING);
        if (result) status = zpp_cuda_fail(cuda->api, result, err, "device cuda: creating an event");
        zpp_cuda_leave(cuda, pushed);
    }
    if (status) {
        free(mark);
        return status;
    }
    pthread_mutex_lock(&cuda->lock);
    mark->next = cuda->marks;
    cuda->marks = mark;
    pthread_mutex_unlock(&cuda->lock);
    *out = mark;
    return ZPP_OK;
}

/* Give the event a mark that nothing else refers to, and return one more reference to it. */
static zpp_status renew_mark(struct zpp_cuda_device *cuda, struct cuda_event *event, bool queued,
                             struct zpp_cuda_mark **out, struct zpp_err *err) {
    pthread_mutex_lock(&cuda->lock);
    const bool alone = event->mark && event->mark->references == 1;
    struct zpp_cuda_mark *fresh = alone ? event->mark : cuda->free_marks;
    if (fresh && !alone) cuda->free_marks = fresh->next_free;
    if (alone) fresh->references = 2;
    if (alone) event->queued = queued;
    pthread_mutex_unlock(&cuda->lock);
    const zpp_status status = fresh ? ZPP_OK : make_mark(cuda, &fresh, err);
    *out = fresh;
    if (status || alone) return status;
    pthread_mutex_lock(&cuda->lock);
    struct zpp_cuda_mark *old = event->mark;
    fresh->references = 2;
    event->mark = fresh;
    event->queued = queued;
    pthread_mutex_unlock(&cuda->lock);
    drop_mark(cuda, old);
    return ZPP_OK;
}

void zpp_cuda_forget_marks(struct zpp_cuda_device *cuda) {
    while (cuda->marks) {
        struct zpp_cuda_mark *mark = cuda->marks;
        cuda->marks = mark->next;
        cuda->api->cuEventDestroy(mark->native);
        free(mark);
    }
}

/* --- record and wait, as operations ------------------------------------------------------------------------------- */
static zpp_status record_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait;
    const struct mark_arg *record = arg;
    struct zpp_cuda_device *cuda = zpp_cuda_of(record->stream->base.device);
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (!status) {
        const CUresult result = cuda->api->cuEventRecord(record->mark->native, record->stream->native);
        zpp_cuda_leave(cuda, pushed);
        status = zpp_cuda_stream_result(record->stream, result, "record an event", err);
    }
    return status;
}

static zpp_status wait_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait;
    const struct mark_arg *event = arg;
    struct zpp_cuda_device *cuda = zpp_cuda_of(event->stream->base.device);
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (!status) {
        const CUresult result = cuda->api->cuStreamWaitEvent(event->stream->native, event->mark->native, 0);
        zpp_cuda_leave(cuda, pushed);
        status = zpp_cuda_stream_result(event->stream, result, "wait for an event", err);
    }
    return status;
}

static void end_marked(const void *arg) {
    const struct mark_arg *ended = arg;
    drop_mark(zpp_cuda_of(ended->stream->base.device), ended->mark);
}

/* Run record_op or wait_op, and drop the reference to the mark once it ran, or if it never will: the stream ended. */
static zpp_status enqueue_marked(zpp_op_fn fn, const struct mark_arg *arg, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = arg->stream;
    if (stream->queue && !stream->error.status)
        return zpp_host_launch_ended(stream->queue, fn, end_marked, arg, sizeof *arg, err);
    const zpp_status status = zpp_cuda_enqueue(stream, fn, arg, sizeof *arg, err);
    end_marked(arg);
    return status;
}

/* --- events ------------------------------------------------------------------------------------------------------- */
zpp_status zpp_cuda_event_create(zpp_device *device, zpp_event **out, struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    struct cuda_event *event = calloc(1, sizeof *event);
    if (!event) return zpp_fail(err, ZPP_NOMEM, "event: no memory for its record");
    event->base.device = device;
    const zpp_status status = zpp_host_event_create(&cuda->queues.base, &event->enqueued, err);
    if (status) {
        free(event);
        return status;
    }
    *out = &event->base;
    return ZPP_OK;
}

void zpp_cuda_event_destroy(zpp_event *base) {
    struct cuda_event *event = (struct cuda_event *)base;
    zpp_host_event_destroy(event->enqueued);
    drop_mark(zpp_cuda_of(base->device), event->mark);
    free(event);
}

zpp_status zpp_cuda_record(zpp_event *base, zpp_stream *base_stream, struct zpp_err *err) {
    struct cuda_event *event = (struct cuda_event *)base;
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base_stream;
    struct zpp_cuda_device *cuda = zpp_cuda_of(base->device);
    const bool queued = stream->queue && !stream->error.status;
    struct mark_arg record = {stream, NULL};
    zpp_status status = renew_mark(cuda, event, queued, &record.mark, err);
    if (status) return status;
    status = enqueue_marked(record_op, &record, err);
    pthread_mutex_lock(&cuda->lock);
    memcpy(event->stream_name, stream->name, sizeof event->stream_name);
    event->error = stream->error;
    pthread_mutex_unlock(&cuda->lock);
    return queued ? zpp_host_record(event->enqueued, stream->queue, err) : status;
}

/* Wait in the caller until the event is enqueued. An event that will never be, since its queue has ended, ends the
 * stream that waits for it; a wait that gave up leaves it as it was. */
static zpp_status await_enqueued(struct zpp_cuda_stream *stream, struct cuda_event *event, const struct zpp_wait *wait,
                                 struct zpp_err *err) {
    struct zpp_err failure = ZPP_ERR_INIT;
    const zpp_status status = zpp_host_sync(event->enqueued, wait, &failure);
    if (status == ZPP_OK || status == ZPP_AGAIN) return status;
    if (zpp_host_sync(event->enqueued, NULL, NULL) != ZPP_AGAIN) stream->error = failure;
    if (err) *err = failure;
    return status;
}

/* Order the stream after work of which the host part is done, or in its queue. */
static zpp_status wait_for_mark(struct zpp_cuda_stream *stream, struct cuda_event *event, const struct view *view,
                                const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (view->queued && stream->queue) status = zpp_host_wait(stream->queue, event->enqueued, wait, err);
    else if (view->queued) status = await_enqueued(stream, event, wait, err);
    if (status != ZPP_OK) {
        drop_mark(zpp_cuda_of(event->base.device), view->mark);
        return status;
    }
    const struct mark_arg arg = {stream, view->mark};
    return enqueue_marked(wait_op, &arg, err);
}

zpp_status zpp_cuda_wait(zpp_stream *base_stream, zpp_event *base, const struct zpp_wait *wait, struct zpp_err *err) {
    struct cuda_event *event = (struct cuda_event *)base;
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base_stream;
    struct zpp_cuda_device *cuda = zpp_cuda_of(base->device);
    if (!stream->error.status) (void)error_of(cuda, event, &stream->error); /* what is before it failed */
    if (stream->error.status) {
        if (err) *err = stream->error;
        return stream->error.status;
    }
    const struct view view = look_at(cuda, event);
    return view.mark ? wait_for_mark(stream, event, &view, wait, err) : ZPP_OK;
}

/* Query, spin for a short time, then query between short sleeps, so that ticks and timeouts work: with
 * cuEventSynchronize neither would. The wait began at start_ns: its timeout covers the host part before, too. */
static zpp_status await_native(struct zpp_cuda_device *cuda, const struct view *event, const struct zpp_wait *wait,
                               uint64_t start_ns, struct zpp_err *err) {
    uint64_t tick_ns = start_ns + TICK_NS;
    for (;;) {
        const CUresult result = cuda->api->cuEventQuery(event->mark->native);
        if (result == ZPP_CU_SUCCESS) return ZPP_OK;
        if (result != ZPP_CU_NOT_READY) {
            return zpp_cuda_fail(cuda->api, result, err, "device cuda: waiting for an event");
        }
        if (!wait) return ZPP_AGAIN;
        const uint64_t now_ns = zpp_now_ns();
        if (wait->timeout_ns && now_ns - start_ns >= wait->timeout_ns) {
            return zpp_fail(err, ZPP_TIMEOUT, "stream \"%s\": an event was not reached within %.3f s",
                            event->stream_name, (double)wait->timeout_ns * 1e-9);
        }
        if (now_ns >= tick_ns) {
            tick_ns = now_ns + TICK_NS;
            const zpp_status status = wait->tick ? wait->tick(wait->ctx, err) : ZPP_OK;
            if (status) return status;
        }
        if (now_ns - start_ns > SPIN_NS) nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
    }
}

zpp_status zpp_cuda_sync(zpp_event *base, const struct zpp_wait *wait, struct zpp_err *err) {
    struct cuda_event *event = (struct cuda_event *)base;
    struct zpp_cuda_device *cuda = zpp_cuda_of(base->device);
    zpp_status status = error_of(cuda, event, err);
    if (status) return status;
    const struct view view = look_at(cuda, event);
    if (!view.mark) return ZPP_OK;
    bool pushed;
    const uint64_t start_ns = zpp_now_ns();
    if (view.queued) status = zpp_host_sync(event->enqueued, wait, err);
    if (!status) status = zpp_cuda_enter(cuda, &pushed, err);
    if (!status) {
        status = await_native(cuda, &view, wait, start_ns, err);
        zpp_cuda_leave(cuda, pushed);
    }
    drop_mark(cuda, view.mark);
    return status;
}

/* --- a change of stream, ordered by an event --------------------------------------------------------------------- */
/* The host decides what is gathered, waits for events and enqueues on other streams: none of that is in a graph. */
static zpp_status refuse_capture(const struct zpp_cuda_stream *stream, void *native, struct zpp_err *err) {
    const struct zpp_cuda_device *cuda = zpp_cuda_of(stream->base.device);
    CUstreamCaptureStatus capture = ZPP_CU_CAPTURE_NONE;
    bool pushed;
    const zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuStreamIsCapturing(native, &capture);
    zpp_cuda_leave(cuda, pushed);
    if (result != ZPP_CU_STREAM_CAPTURE_IMPLICIT && capture == ZPP_CU_CAPTURE_NONE)
        return zpp_cuda_stream_result(stream, result, "ask whether it is captured", err);
    return zpp_fail(err, ZPP_STATE,
                    "torch.cuda.graph captures this stream, and a forward, backward or step of a prepared model is not "
                    "supported in a CUDA graph yet; run it outside of the capture, or leave the model unprepared");
}

zpp_status zpp_cuda_stream_follow(zpp_stream *base, void *native, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    const zpp_status capture = stream->owned ? ZPP_OK : refuse_capture(stream, native, err);
    if (capture != ZPP_OK) return capture;
    if (stream->owned || (stream->adopted && stream->native == native)) return ZPP_OK;
    zpp_event *moved = NULL;
    zpp_status status = ZPP_OK;
    if (stream->adopted) {
        status = zpp_cuda_event_create(base->device, &moved, err);
        if (status == ZPP_OK) status = zpp_cuda_record(moved, base, err);
    }
    if (status == ZPP_OK) zpp_cuda_stream_adopt(base, native);
    if (status == ZPP_OK && moved) status = zpp_cuda_wait(base, moved, NULL, err);
    if (moved) zpp_cuda_event_destroy(moved); /* the driver keeps a native event until its waits are done */
    return status;
}
