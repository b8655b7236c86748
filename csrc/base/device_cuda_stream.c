/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams of the device cuda. Every operation is a function of its argument that calls the driver. A stream without a
 * queue runs it in the caller. A QUEUE stream gives it to a host queue (device_host.h), which runs it at once unless an
 * operation before it waits for a peer. Then the caller goes on, and the operation is enqueued when the queue is
 * driven.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_cuda_internal.h"

static const struct zpp_wait for_ever = {0, NULL, NULL};

struct user_arg {
    struct zpp_cuda_stream *stream;
    zpp_op_fn fn;
    _Alignas(16) unsigned char arg[ZPP_OP_ARG_BYTES];
};
_Static_assert(sizeof(struct user_arg) <= ZPP_HOST_ARG_BYTES, "an operation of the caller fits an item of a queue");

struct memory_arg {
    struct zpp_cuda_stream *stream;
    CUdeviceptr dst, src;
    size_t bytes;
    unsigned char byte;
};
struct counter_arg {
    struct zpp_cuda_stream *stream;
    CUdeviceptr counter;
    uint64_t value;
};

/* --- running ------------------------------------------------------------------------------------------------------ */
static zpp_status stream_error(const struct zpp_cuda_stream *stream, struct zpp_err *err) {
    if (stream->error.status != ZPP_OK && err) *err = stream->error;
    return stream->error.status;
}

zpp_status zpp_cuda_stream_result(const struct zpp_cuda_stream *stream, CUresult result, const char *what,
                                  struct zpp_err *err) {
    if (!result) return ZPP_OK;
    char text[64 + ZPP_STREAM_NAME_BYTES];
    snprintf(text, sizeof text, "stream \"%s\": %s", stream->name, what);
    return zpp_cuda_fail(zpp_cuda_of(stream->base.device)->api, result, err, text);
}

zpp_status zpp_cuda_enqueue(struct zpp_cuda_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes,
                            struct zpp_err *err) {
    if (stream->error.status) return stream_error(stream, err);
    if (stream->queue) return zpp_host_launch(stream->queue, fn, arg, arg_bytes, err);
    _Alignas(16) unsigned char copy[ZPP_HOST_ARG_BYTES];
    struct zpp_err failure = ZPP_ERR_INIT;
    memcpy(copy, arg, arg_bytes);
    if (fn(copy, NULL, &for_ever, &failure) == ZPP_OK) return ZPP_OK;
    stream->error = failure;
    return stream_error(stream, err);
}

/* --- operations --------------------------------------------------------------------------------------------------- */
static zpp_status user_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    struct user_arg *user = arg;
    const struct zpp_cuda_device *cuda = zpp_cuda_of(user->stream->base.device);
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    status = user->fn(user->arg, user->stream->native, wait, err);
    zpp_cuda_leave(cuda, pushed);
    return status;
}

zpp_status zpp_cuda_op(zpp_stream *base, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    struct user_arg user = {.stream = stream, .fn = fn};
    if (arg_bytes) memcpy(user.arg, arg, arg_bytes);
    return zpp_cuda_enqueue(stream, user_op, &user, sizeof user, err);
}

static zpp_status copy_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait;
    const struct memory_arg *copy = arg;
    const struct zpp_cuda_device *cuda = zpp_cuda_of(copy->stream->base.device);
    bool pushed;
    const zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuMemcpyAsync(copy->dst, copy->src, copy->bytes, copy->stream->native);
    zpp_cuda_leave(cuda, pushed);
    return zpp_cuda_stream_result(copy->stream, result, "copy", err);
}

zpp_status zpp_cuda_copy(zpp_stream *base, void *dst, const void *src, size_t bytes, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    const struct memory_arg copy = {stream, (CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, bytes, 0};
    if (!bytes && !stream->queue) return stream_error(stream, err);
    return zpp_cuda_enqueue(stream, copy_op, &copy, sizeof copy, err);
}

static zpp_status fill_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait;
    const struct memory_arg *fill = arg;
    const struct zpp_cuda_device *cuda = zpp_cuda_of(fill->stream->base.device);
    bool pushed;
    const zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuMemsetD8Async(fill->dst, fill->byte, fill->bytes, fill->stream->native);
    zpp_cuda_leave(cuda, pushed);
    return zpp_cuda_stream_result(fill->stream, result, "fill", err);
}

zpp_status zpp_cuda_fill(zpp_stream *base, void *dst, unsigned char byte, size_t bytes, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    const struct memory_arg fill = {stream, (CUdeviceptr)(uintptr_t)dst, 0, bytes, byte};
    if (!bytes && !stream->queue) return stream_error(stream, err);
    return zpp_cuda_enqueue(stream, fill_op, &fill, sizeof fill, err);
}

static zpp_status signal_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait;
    const struct counter_arg *signal = arg;
    const struct zpp_cuda_device *cuda = zpp_cuda_of(signal->stream->base.device);
    bool pushed;
    const zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuStreamWriteValue64(signal->stream->native, signal->counter, signal->value,
                                                            ZPP_CU_STREAM_WRITE_VALUE_DEFAULT);
    zpp_cuda_leave(cuda, pushed);
    return zpp_cuda_stream_result(signal->stream, result, "write a counter", err);
}

zpp_status zpp_cuda_signal(zpp_stream *base, uint64_t *counter, uint64_t value, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    const struct counter_arg signal = {stream, (CUdeviceptr)(uintptr_t)counter, value};
    return zpp_cuda_enqueue(stream, signal_op, &signal, sizeof signal, err);
}

/* The native stream waits, so the queue and the caller go on. */
static zpp_status await_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait;
    const struct counter_arg *await = arg;
    const struct zpp_cuda_device *cuda = zpp_cuda_of(await->stream->base.device);
    bool pushed;
    const zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuStreamWaitValue64(await->stream->native, await->counter, await->value,
                                                           ZPP_CU_STREAM_WAIT_VALUE_GEQ);
    zpp_cuda_leave(cuda, pushed);
    return zpp_cuda_stream_result(await->stream, result, "wait for a counter", err);
}

zpp_status zpp_cuda_await(zpp_stream *base, const uint64_t *counter, uint64_t value, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    (void)wait; /* the GPU waits, never the caller */
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    const struct counter_arg await = {stream, (CUdeviceptr)(uintptr_t)counter, value};
    return zpp_cuda_enqueue(stream, await_op, &await, sizeof await, err);
}

zpp_status zpp_cuda_poll(zpp_stream *base, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    const struct zpp_cuda_device *cuda = zpp_cuda_of(base->device);
    zpp_status status = stream_error(stream, err);
    if (!status && stream->queue) status = zpp_host_poll(stream->queue, err);
    bool pushed;
    if (status || (status = zpp_cuda_enter(cuda, &pushed, err))) return status;
    const CUresult result = cuda->api->cuStreamQuery(stream->native);
    zpp_cuda_leave(cuda, pushed);
    if (result == ZPP_CU_NOT_READY) return ZPP_AGAIN;
    zpp_cuda_stream_result(stream, result, "poll", &stream->error);
    return stream_error(stream, err);
}

/* --- streams ------------------------------------------------------------------------------------------------------ */
static CUresult create_native(const struct zpp_cuda_device *cuda, enum zpp_stream_priority priority, CUstream *out) {
    int least = 0, greatest = 0; /* greater priorities are smaller numbers */
    const CUresult result = cuda->api->cuCtxGetStreamPriorityRange(&least, &greatest);
    if (result) return result;
    return cuda->api->cuStreamCreateWithPriority(out, ZPP_CU_STREAM_NON_BLOCKING,
                                                 priority == ZPP_PRIORITY_HIGH ? greatest : least);
}

static zpp_status open_stream(struct zpp_cuda_stream *stream, enum zpp_stream_kind kind,
                              enum zpp_stream_priority priority, struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(stream->base.device);
    if (!stream->owned) return ZPP_OK;
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    status = zpp_cuda_stream_result(stream, create_native(cuda, priority, &stream->native), "create", err);
    if (!status && kind == ZPP_STREAM_QUEUE) {
        status = zpp_host_stream_create(&cuda->queues.base, kind, priority, stream->name, &stream->queue, err);
        if (status) cuda->api->cuStreamDestroy(stream->native);
    }
    zpp_cuda_leave(cuda, pushed);
    return status;
}

zpp_status zpp_cuda_stream_create(zpp_device *device, enum zpp_stream_kind kind, enum zpp_stream_priority priority,
                                  const char *name, zpp_stream **out, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return zpp_fail(err, ZPP_NOMEM, "stream \"%s\": no memory for its record", name);
    stream->base.device = device;
    strncpy(stream->name, name, sizeof stream->name - 1);
    stream->owned = kind != ZPP_STREAM_HOST; /* HOST: the default stream until one is adopted */
    const zpp_status status = open_stream(stream, kind, priority, err);
    if (status) {
        free(stream);
        return status;
    }
    *out = &stream->base;
    return ZPP_OK;
}

void zpp_cuda_stream_destroy(zpp_stream *base) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    struct zpp_cuda_device *cuda = zpp_cuda_of(base->device);
    bool pushed;
    if (stream->queue) zpp_host_stream_destroy(stream->queue);
    if (!zpp_cuda_enter(cuda, &pushed, NULL)) {
        cuda->api->cuStreamSynchronize(stream->native);
        if (stream->owned) cuda->api->cuStreamDestroy(stream->native);
        zpp_cuda_leave(cuda, pushed);
    }
    free(stream);
}

void zpp_cuda_stream_adopt(zpp_stream *base, void *native) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    if (stream->owned) return;
    stream->native = native;
    stream->adopted = true;
}

zpp_status zpp_cuda_stream_follow(zpp_stream *base, void *native, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
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
