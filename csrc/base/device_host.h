/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events whose operations run on the CPU, private to device*.c: the devices cpu and sim share them.
 *
 * A stream runs its operations in one of three ways: at once in the caller (INLINE), whenever a caller drives it
 * (DRIVEN), or in a thread of its own (THREAD). An event points at a *mark*: one place in one stream. Recording again
 * makes a new mark, and waiters for the old one go on waiting for the old one.
 *
 * Locks: one per device, which guards every queue, mark and event of it. It is never held while an operation runs.
 */
#ifndef ZPP_BASE_DEVICE_HOST_H
#define ZPP_BASE_DEVICE_HOST_H

#include <pthread.h>
#include <stdatomic.h>

#include "device_fill.h"

enum zpp_host_mode { ZPP_HOST_INLINE, ZPP_HOST_DRIVEN, ZPP_HOST_THREAD };
enum { ZPP_STREAM_NAME_BYTES = 32 };
/* Room for the argument of an operation of a host stream: one of device.h, and what a device puts before it. */
enum { ZPP_HOST_ARG_BYTES = ZPP_OP_ARG_BYTES + 32 };

struct zpp_mark; /* device_host.c */
struct zpp_item;

struct zpp_host_device {
    zpp_device base;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* something finished, was queued, or stopped being driven */
    struct zpp_item *free_items;
    struct zpp_mark *free_marks;
    unsigned streams; /* made so far */
    /* How this device runs its streams; and what a THREAD does before each operation (sim's delay), or NULL. */
    enum zpp_host_mode modes[3]; /* by zpp_stream_kind */
    void (*before)(struct zpp_host_device *device, uint64_t *random_state);
    uint64_t seed;
};

struct zpp_host_stream {
    zpp_stream base;
    enum zpp_host_mode mode;
    char name[ZPP_STREAM_NAME_BYTES];
    struct zpp_item *head, **tail;
    bool busy;          /* a thread runs its head now */
    bool stop;          /* THREAD: end when nothing is left */
    pthread_t thread;   /* THREAD */
    uint64_t random_state;
    struct zpp_err error; /* the error that ended it, or ZPP_OK */
};

/* Initialise a zeroed device record of the caller, and destroy it (after all its streams and events). */
void zpp_host_device_init(struct zpp_host_device *device, const struct zpp_device_fill *fill);
void zpp_host_device_fini(struct zpp_host_device *device);

/* Functions for the table of the device. */
zpp_status zpp_host_pin(zpp_device *device, void *memory, size_t bytes, struct zpp_err *err);
void zpp_host_unpin(zpp_device *device, void *memory);
zpp_status zpp_host_map_grain(zpp_device *device, size_t *bytes, struct zpp_err *err);
zpp_status zpp_host_map_wrapped(zpp_device *device, size_t address_bytes, size_t memory_bytes, struct zpp_mapping *out,
                                struct zpp_err *err);
void zpp_host_unmap_wrapped(zpp_device *device, struct zpp_mapping *mapping);
zpp_status zpp_host_stream_create(zpp_device *device, enum zpp_stream_kind kind, enum zpp_stream_priority priority,
                                  const char *name, zpp_stream **out, struct zpp_err *err);
void zpp_host_stream_destroy(zpp_stream *stream);
void zpp_host_stream_adopt(zpp_stream *stream, void *native);
zpp_status zpp_host_stream_follow(zpp_stream *stream, void *native, struct zpp_err *err);
zpp_status zpp_host_launch(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err);
zpp_status zpp_host_copy(zpp_stream *stream, void *dst, const void *src, size_t bytes, struct zpp_err *err);
zpp_status zpp_host_fill(zpp_stream *stream, void *dst, unsigned char byte, size_t bytes, struct zpp_err *err);
zpp_status zpp_host_signal(zpp_stream *stream, uint64_t *counter, uint64_t value, struct zpp_err *err);
zpp_status zpp_host_await(zpp_stream *stream, const uint64_t *counter, uint64_t value, const struct zpp_wait *wait,
                          struct zpp_err *err);
zpp_status zpp_host_poll(zpp_stream *stream, struct zpp_err *err);
zpp_status zpp_host_event_create(zpp_device *device, zpp_event **out, struct zpp_err *err);
void zpp_host_event_destroy(zpp_event *event);
zpp_status zpp_host_record(zpp_event *event, zpp_stream *stream, struct zpp_err *err);
zpp_status zpp_host_wait(zpp_stream *stream, zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);
zpp_status zpp_host_sync(zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);

/* The rows of a device's table that all host devices share; name, memory and stream_create are the device's own. */
#define ZPP_HOST_DEVICE_FUNCTIONS \
    .pin = zpp_host_pin, \
    .unpin = zpp_host_unpin, \
    .map_grain = zpp_host_map_grain, \
    .map_wrapped = zpp_host_map_wrapped, \
    .unmap_wrapped = zpp_host_unmap_wrapped, \
    .stream_destroy = zpp_host_stream_destroy, \
    .stream_adopt = zpp_host_stream_adopt, \
    .stream_follow = zpp_host_stream_follow, \
    .launch = zpp_host_launch, \
    .copy = zpp_host_copy, \
    .fill = zpp_host_fill, \
    .signal = zpp_host_signal, \
    .await = zpp_host_await, \
    .poll = zpp_host_poll, \
    .event_create = zpp_host_event_create, \
    .event_destroy = zpp_host_event_destroy, \
    .record = zpp_host_record, \
    .wait = zpp_host_wait, \
    .sync = zpp_host_sync

/* zpp_host_launch on a stream that is not INLINE; ended(arg) is called once: after the operation ran, or when it is
 * clear that it never will. It may not call the device, whose lock is held. */
zpp_status zpp_host_launch_ended(zpp_stream *stream, zpp_op_fn fn, void (*ended)(const void *arg), const void *arg,
                                 size_t arg_bytes, struct zpp_err *err);
/* Launch an operation that only waits. A wait for it that ends early (timeout, Ctrl-C) leaves the stream as it was. The
 * caller of an INLINE stream runs it with `wait`. */
zpp_status zpp_host_launch_wait(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes,
                                const struct zpp_wait *wait, struct zpp_err *err);

#endif
