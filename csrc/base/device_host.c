/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events on the CPU: device_host.h. A stream is a queue of items. The thread that set `busy` runs its head,
 * outside of the lock. A mark is reference counted: the event, the item that will finish it, and every waiter.
 */
#include "device_host.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TICK_NS = 100000000, SPIN_NS = 20000 };

struct zpp_mark {
    struct zpp_mark *next_free;
    struct zpp_host_stream *stream; /* borrowed; valid until done */
    unsigned references;
    _Atomic bool done;
    struct zpp_err error; /* the reason why it is never reached, or ZPP_OK; read it once done */
};

enum item_kind { ITEM_OP, ITEM_RECORD, ITEM_WAIT, ITEM_AWAIT }; /* WAIT: for a mark; AWAIT: in `fn` */

struct zpp_item {
    struct zpp_item *next;
    enum item_kind kind;
    struct zpp_mark *mark; /* RECORD, WAIT: a reference */
    zpp_op_fn fn;
    void (*ended)(const void *arg); /* called when the item goes, whether it ran or not; NULL: nothing to do */
    _Alignas(16) unsigned char arg[ZPP_HOST_ARG_BYTES];
};

/* What launch() makes an item of. */
struct host_op {
    enum item_kind kind;
    zpp_op_fn fn;
    void (*ended)(const void *arg);
    const void *arg;
    size_t arg_bytes;
};

struct host_event {
    zpp_event base;
    struct zpp_mark *mark; /* a reference; NULL: complete */
};

static const struct zpp_wait for_ever = {0, NULL, NULL};

static struct zpp_host_device *device_of(const zpp_stream *stream) { return (struct zpp_host_device *)stream->device; }

/* --- free lists (lock held) --------------------------------------------------------------------------------------- */
static struct zpp_item *new_item(struct zpp_host_device *device, enum item_kind kind) {
    struct zpp_item *item = device->free_items;
    if (item) device->free_items = item->next;
    else item = malloc(sizeof *item);
    if (!item) return NULL;
    item->next = NULL;
    item->kind = kind;
    item->mark = NULL;
    item->ended = NULL;
    return item;
}

static struct zpp_mark *new_mark(struct zpp_host_device *device, struct zpp_host_stream *stream) {
    struct zpp_mark *mark = device->free_marks;
    if (mark) device->free_marks = mark->next_free;
    else mark = malloc(sizeof *mark);
    if (!mark) return NULL;
    mark->stream = stream;
    mark->references = 1;
    atomic_init(&mark->done, false);
    mark->error.status = ZPP_OK;
    return mark;
}

static void drop_mark(struct zpp_host_device *device, struct zpp_mark *mark) {
    if (!mark || --mark->references) return;
    mark->next_free = device->free_marks;
    device->free_marks = mark;
}

static void drop_item(struct zpp_host_device *device, struct zpp_item *item) {
    if (item->ended) item->ended(item->arg);
    drop_mark(device, item->mark);
    item->next = device->free_items;
    device->free_items = item;
}

/* --- running ------------------------------------------------------------------------------------------------------ */
static void finish_mark(struct zpp_mark *mark, const struct zpp_err *error) {
    if (error) mark->error = *error;
    atomic_store(&mark->done, true);
}

static void append(struct zpp_host_stream *stream, struct zpp_item *item) {
    *stream->tail = item;
    stream->tail = &item->next;
}

static void pop(struct zpp_host_device *device, struct zpp_host_stream *stream) {
    struct zpp_item *item = stream->head;
    stream->head = item->next;
    if (!stream->head) stream->tail = &stream->head;
    drop_item(device, item);
}

/* End the stream with an error: nothing more runs on it, and waiters for its marks get the error. */
static void kill_stream(struct zpp_host_device *device, struct zpp_host_stream *stream, const struct zpp_err *error) {
    stream->error = *error;
    while (stream->head) {
        if (stream->head->kind == ITEM_RECORD) finish_mark(stream->head->mark, error);
        pop(device, stream);
    }
}

static zpp_status stream_error(const struct zpp_host_stream *stream, struct zpp_err *err) {
    if (stream->error.status != ZPP_OK && err) *err = stream->error;
    return stream->error.status;
}

static uint64_t deadline_of(const struct zpp_wait *wait) {
    return wait && wait->timeout_ns ? zpp_now_ns() + wait->timeout_ns : 0;
}

static zpp_status await_mark(struct zpp_host_device *device, struct zpp_mark *mark, const struct zpp_wait *wait,
                             struct zpp_err *err);

/* Called with the lock held, which is released while the item runs. */
static zpp_status run_item(struct zpp_host_device *device, struct zpp_item *item, const struct zpp_wait *wait,
                           struct zpp_err *err) {
    switch (item->kind) {
    case ITEM_RECORD:
        finish_mark(item->mark, NULL);
        return ZPP_OK;
    case ITEM_WAIT:
        return await_mark(device, item->mark, wait, err);
    default:
        break;
    }
    pthread_mutex_unlock(&device->lock);
    const zpp_status status = item->fn(item->arg, NULL, wait, err);
    pthread_mutex_lock(&device->lock);
    return status;
}

/* True if the item is a wait that ended early (timeout, Ctrl-C): it did nothing and can be repeated, so the stream goes
 * on. An event that will never come ends the stream, and so does an operation that stopped half-way. */
static bool gave_up_waiting(const struct zpp_item *item) {
    return item->kind == ITEM_AWAIT || (item->kind == ITEM_WAIT && !atomic_load(&item->mark->done));
}

/* Return `wait` with the time that is left until the deadline (0: none). */
static struct zpp_wait remaining(const struct zpp_wait *wait, uint64_t deadline_ns) {
    struct zpp_wait left = *wait;
    if (!deadline_ns) return left;
    const uint64_t now_ns = zpp_now_ns();
    left.timeout_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 1;
    return left;
}

/* Run items of a stream that no thread runs, until `until` is done (NULL: until nothing is left), one cannot run now
 * (wait == NULL), or one fails. Called with the lock held, which is released in between. */
static zpp_status drive(struct zpp_host_device *device, struct zpp_host_stream *stream, const struct zpp_mark *until,
                        const struct zpp_wait *wait, struct zpp_err *err) {
    const uint64_t deadline_ns = deadline_of(wait);
    struct zpp_err failure = ZPP_ERR_INIT;
    zpp_status status = ZPP_OK;
    stream->busy = true;
    while (stream->head && !(until && atomic_load(&until->done))) {
        struct zpp_wait left;
        if (wait) left = remaining(wait, deadline_ns);
        status = run_item(device, stream->head, wait ? &left : NULL, &failure);
        if (status == ZPP_AGAIN) break;
        if (status != ZPP_OK) {
            if (!gave_up_waiting(stream->head)) kill_stream(device, stream, &failure);
            if (err) *err = failure;
            break;
        }
        pop(device, stream);
    }
    stream->busy = false;
    pthread_cond_broadcast(&device->changed);
    return status;
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */
static void sleep_on(struct zpp_host_device *device, uint64_t until_ns) {
    const struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    pthread_cond_timedwait(&device->changed, &device->lock, &until);
}

static bool spin_for(struct zpp_host_device *device, struct zpp_mark *mark) {
    pthread_mutex_unlock(&device->lock);
    const uint64_t start_ns = zpp_now_ns();
    while (!atomic_load(&mark->done) && zpp_now_ns() - start_ns < SPIN_NS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    pthread_mutex_lock(&device->lock);
    return atomic_load(&mark->done);
}

/* Sleep until the mark is done, its stream needs a driver, the time is over, or a tick fails. */
static zpp_status sleep_for(struct zpp_host_device *device, struct zpp_mark *mark, const struct zpp_wait *wait,
                            uint64_t deadline_ns, uint64_t *tick_ns, struct zpp_err *err) {
    const uint64_t until_ns = deadline_ns && deadline_ns < *tick_ns ? deadline_ns : *tick_ns;
    sleep_on(device, until_ns);
    if (atomic_load(&mark->done)) return ZPP_OK;
    const uint64_t now_ns = zpp_now_ns();
    if (deadline_ns && now_ns >= deadline_ns) {
        return zpp_fail(err, ZPP_TIMEOUT, "stream \"%s\": an event was not reached within %.3f s", mark->stream->name,
                        (double)wait->timeout_ns * 1e-9);
    }
    if (now_ns < *tick_ns) return ZPP_OK;
    *tick_ns = now_ns + TICK_NS;
    if (!wait->tick) return ZPP_OK;
    pthread_mutex_unlock(&device->lock);
    const zpp_status status = wait->tick(wait->ctx, err);
    pthread_mutex_lock(&device->lock);
    return status;
}

/* Called with the lock held, which is released in between. The caller holds a reference. */
static zpp_status await_mark(struct zpp_host_device *device, struct zpp_mark *mark, const struct zpp_wait *wait,
                             struct zpp_err *err) {
    const uint64_t deadline_ns = deadline_of(wait);
    uint64_t tick_ns = wait ? zpp_now_ns() + TICK_NS : 0;
    bool spun = false;
    while (!atomic_load(&mark->done)) {
        struct zpp_host_stream *stream = mark->stream;
        zpp_status status = ZPP_OK;
        if (stream->mode == ZPP_HOST_DRIVEN && !stream->busy) {
            status = drive(device, stream, mark, wait, err);
        } else if (!wait) {
            return ZPP_AGAIN;
        } else if (!spun) {
            spun = true;
            spin_for(device, mark);
        } else {
            status = sleep_for(device, mark, wait, deadline_ns, &tick_ns, err);
        }
        if (status != ZPP_OK) return status;
    }
    if (mark->error.status != ZPP_OK && err) *err = mark->error;
    return mark->error.status;
}

/* --- a stream's own thread ---------------------------------------------------------------------------------------- */
static void *thread_main(void *arg) {
    struct zpp_host_stream *stream = arg;
    struct zpp_host_device *device = device_of(&stream->base);
    pthread_mutex_lock(&device->lock);
    for (;;) {
        while (!stream->head && !stream->stop) pthread_cond_wait(&device->changed, &device->lock);
        if (!stream->head) break;
        struct zpp_item *item = stream->head;
        struct zpp_err failure = ZPP_ERR_INIT;
        stream->busy = true;
        if (device->before) {
            pthread_mutex_unlock(&device->lock);
            device->before(device, &stream->random_state);
            pthread_mutex_lock(&device->lock);
        }
        const zpp_status status = run_item(device, item, &for_ever, &failure);
        if (status == ZPP_OK) pop(device, stream);
        else kill_stream(device, stream, &failure);
        stream->busy = false;
        pthread_cond_broadcast(&device->changed);
    }
    pthread_mutex_unlock(&device->lock);
    return NULL;
}

/* --- exported ----------------------------------------------------------------------------------------------------- */
void zpp_host_device_init(struct zpp_host_device *device, const struct zpp_device_fill *fill) {
    device->base.fill = fill;
    pthread_mutex_init(&device->lock, NULL);
    zpp_cond_init(&device->changed);
}

void zpp_host_device_fini(struct zpp_host_device *device) {
    while (device->free_items) {
        struct zpp_item *item = device->free_items;
        device->free_items = item->next;
        free(item);
    }
    while (device->free_marks) {
        struct zpp_mark *mark = device->free_marks;
        device->free_marks = mark->next_free;
        free(mark);
    }
    pthread_cond_destroy(&device->changed);
    pthread_mutex_destroy(&device->lock);
}

zpp_status zpp_host_stream_create(zpp_device *base, enum zpp_stream_kind kind, enum zpp_stream_priority priority,
                                  const char *name, zpp_stream **out, struct zpp_err *err) {
    (void)priority; /* threads of one program have none */
    struct zpp_host_device *device = (struct zpp_host_device *)base;
    struct zpp_host_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return zpp_fail(err, ZPP_NOMEM, "stream \"%s\": no memory for its record", name);
    stream->base.device = base;
    stream->mode = device->modes[kind];
    strncpy(stream->name, name, sizeof stream->name - 1);
    stream->tail = &stream->head;
    pthread_mutex_lock(&device->lock);
    const unsigned index = device->streams++;
    pthread_mutex_unlock(&device->lock);
    stream->random_state = (device->seed + index) * 0x9e3779b97f4a7c15u + 1;
    if (stream->mode == ZPP_HOST_THREAD) {
        const int failed = pthread_create(&stream->thread, NULL, thread_main, stream);
        if (failed) {
            free(stream);
            return zpp_fail_os(err, failed, "stream \"%s\": could not start its thread", name);
        }
    }
    *out = &stream->base;
    return ZPP_OK;
}

void zpp_host_stream_destroy(zpp_stream *base) {
    struct zpp_host_stream *stream = (struct zpp_host_stream *)base;
    struct zpp_host_device *device = device_of(base);
    pthread_mutex_lock(&device->lock);
    stream->stop = true;
    pthread_cond_broadcast(&device->changed);
    if (stream->mode == ZPP_HOST_DRIVEN) {
        while (stream->busy) pthread_cond_wait(&device->changed, &device->lock);
        struct zpp_err ignored = ZPP_ERR_INIT; /* waiters for its events get an error */
        drive(device, stream, NULL, &for_ever, &ignored);
    }
    pthread_mutex_unlock(&device->lock);
    if (stream->mode == ZPP_HOST_THREAD) pthread_join(stream->thread, NULL);
    free(stream);
}

void zpp_host_stream_adopt(zpp_stream *stream, void *native) {
    (void)stream, (void)native; /* there is no driver's stream here */
}

zpp_status zpp_host_stream_follow(zpp_stream *stream, void *native, struct zpp_err *err) {
    (void)stream, (void)native, (void)err;
    return ZPP_OK;
}

static zpp_status run_inline(struct zpp_host_stream *stream, const struct host_op *op, const struct zpp_wait *wait,
                             struct zpp_err *err) {
    _Alignas(16) unsigned char copy[ZPP_HOST_ARG_BYTES];
    struct zpp_err failure = ZPP_ERR_INIT;
    if (op->arg_bytes) memcpy(copy, op->arg, op->arg_bytes);
    const zpp_status status = op->fn(copy, NULL, wait, &failure);
    if (status == ZPP_OK || status == ZPP_AGAIN) return status;
    if (op->kind == ITEM_OP) stream->error = failure;
    if (err) *err = failure;
    return status;
}

/* Append, and run what can run now. Called with the lock held. */
static zpp_status push(struct zpp_host_device *device, struct zpp_host_stream *stream, struct zpp_item *item,
                       struct zpp_err *err) {
    append(stream, item);
    if (stream->mode == ZPP_HOST_THREAD) pthread_cond_broadcast(&device->changed);
    else if (!stream->busy) drive(device, stream, NULL, NULL, err);
    return stream_error(stream, err);
}

static zpp_status push_op(struct zpp_host_device *device, struct zpp_host_stream *stream, const struct host_op *op,
                          struct zpp_err *err) {
    struct zpp_item *item = stream->error.status ? NULL : new_item(device, op->kind);
    if (!item) {
        if (op->ended) op->ended(op->arg);
        if (stream->error.status) return stream_error(stream, err);
        return zpp_fail(err, ZPP_NOMEM, "stream \"%s\": no memory for an operation", stream->name);
    }
    item->fn = op->fn;
    item->ended = op->ended;
    if (op->arg_bytes) memcpy(item->arg, op->arg, op->arg_bytes);
    return push(device, stream, item, err);
}

static zpp_status launch(zpp_stream *base, const struct host_op *op, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_host_stream *stream = (struct zpp_host_stream *)base;
    struct zpp_host_device *device = device_of(base);
    assert(op->arg_bytes <= ZPP_HOST_ARG_BYTES);
    if (stream->mode == ZPP_HOST_INLINE) {
        if (stream->error.status) return stream_error(stream, err);
        return run_inline(stream, op, wait, err);
    }
    pthread_mutex_lock(&device->lock);
    const zpp_status status = push_op(device, stream, op, err);
    pthread_mutex_unlock(&device->lock);
    return status;
}

zpp_status zpp_host_launch(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err) {
    return launch(stream, &(struct host_op){ITEM_OP, fn, NULL, arg, arg_bytes}, &for_ever, err);
}

zpp_status zpp_host_launch_ended(zpp_stream *stream, zpp_op_fn fn, void (*ended)(const void *arg), const void *arg,
                                 size_t arg_bytes, struct zpp_err *err) {
    return launch(stream, &(struct host_op){ITEM_OP, fn, ended, arg, arg_bytes}, &for_ever, err);
}

zpp_status zpp_host_launch_wait(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes,
                                const struct zpp_wait *wait, struct zpp_err *err) {
    return launch(stream, &(struct host_op){ITEM_AWAIT, fn, NULL, arg, arg_bytes}, wait, err);
}

zpp_status zpp_host_poll(zpp_stream *base, struct zpp_err *err) {
    struct zpp_host_stream *stream = (struct zpp_host_stream *)base;
    struct zpp_host_device *device = device_of(base);
    if (stream->mode == ZPP_HOST_INLINE) return stream_error(stream, err);
    pthread_mutex_lock(&device->lock);
    if (stream->mode == ZPP_HOST_DRIVEN && !stream->busy && stream->head) drive(device, stream, NULL, NULL, err);
    zpp_status status = stream_error(stream, err);
    if (!status && (stream->head || stream->busy)) status = ZPP_AGAIN;
    pthread_mutex_unlock(&device->lock);
    return status;
}

zpp_status zpp_host_event_create(zpp_device *device, zpp_event **out, struct zpp_err *err) {
    struct host_event *event = calloc(1, sizeof *event);
    if (!event) return zpp_fail(err, ZPP_NOMEM, "event: no memory for its record");
    event->base.device = device;
    *out = &event->base;
    return ZPP_OK;
}

void zpp_host_event_destroy(zpp_event *base) {
    struct host_event *event = (struct host_event *)base;
    struct zpp_host_device *device = (struct zpp_host_device *)base->device;
    pthread_mutex_lock(&device->lock);
    drop_mark(device, event->mark);
    pthread_mutex_unlock(&device->lock);
    free(event);
}

/* Give the event a new mark, also for a stream that has ended: its event then holds the error. */
static zpp_status move_event(struct zpp_host_device *device, struct host_event *event, struct zpp_host_stream *stream,
                             struct zpp_err *err) {
    struct zpp_mark *mark = new_mark(device, stream);
    struct zpp_item *item = mark && !stream->error.status ? new_item(device, ITEM_RECORD) : NULL;
    if (!mark || (!item && !stream->error.status)) {
        drop_mark(device, mark);
        return zpp_fail(err, ZPP_NOMEM, "stream \"%s\": no memory to record an event", stream->name);
    }
    drop_mark(device, event->mark);
    event->mark = mark;
    if (!item) {
        finish_mark(mark, &stream->error);
        return stream_error(stream, err);
    }
    mark->references += 1;
    item->mark = mark;
    return push(device, stream, item, err);
}

zpp_status zpp_host_record(zpp_event *base, zpp_stream *base_stream, struct zpp_err *err) {
    struct host_event *event = (struct host_event *)base;
    struct zpp_host_stream *stream = (struct zpp_host_stream *)base_stream;
    struct zpp_host_device *device = device_of(base_stream);
    zpp_status status = ZPP_OK;
    pthread_mutex_lock(&device->lock);
    if (stream->mode == ZPP_HOST_INLINE && !stream->error.status) { /* all of it has run */
        drop_mark(device, event->mark);
        event->mark = NULL;
    } else {
        status = move_event(device, event, stream, err);
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

/* Called with the lock held. */
static zpp_status await_event(struct zpp_host_device *device, struct host_event *event, const struct zpp_wait *wait,
                              struct zpp_err *err) {
    struct zpp_mark *mark = event->mark;
    if (!mark) return ZPP_OK;
    mark->references += 1;
    const zpp_status status = await_mark(device, mark, wait, err);
    drop_mark(device, mark);
    return status;
}

static zpp_status push_wait(struct zpp_host_device *device, struct zpp_host_stream *stream, struct zpp_mark *mark,
                            struct zpp_err *err) {
    struct zpp_item *item = new_item(device, ITEM_WAIT);
    if (!item) return zpp_fail(err, ZPP_NOMEM, "stream \"%s\": no memory to wait for an event", stream->name);
    mark->references += 1;
    item->mark = mark;
    return push(device, stream, item, err);
}

zpp_status zpp_host_wait(zpp_stream *base_stream, zpp_event *base, const struct zpp_wait *wait, struct zpp_err *err) {
    struct host_event *event = (struct host_event *)base;
    struct zpp_host_stream *stream = (struct zpp_host_stream *)base_stream;
    struct zpp_host_device *device = device_of(base_stream);
    pthread_mutex_lock(&device->lock);
    zpp_status status = stream_error(stream, err);
    if (!status && event->mark) {
        if (stream->mode == ZPP_HOST_INLINE) status = await_event(device, event, wait, err);
        else status = push_wait(device, stream, event->mark, err);
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

zpp_status zpp_host_sync(zpp_event *base, const struct zpp_wait *wait, struct zpp_err *err) {
    struct host_event *event = (struct host_event *)base;
    struct zpp_host_device *device = (struct zpp_host_device *)base->device;
    pthread_mutex_lock(&device->lock);
    const zpp_status status = await_event(device, event, wait, err);
    pthread_mutex_unlock(&device->lock);
    return status;
}
