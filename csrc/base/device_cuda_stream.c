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

/* One call of the driver. */
enum driver_call { COPY, FILL, SIGNAL, AWAIT };
struct driver_arg {
    struct zpp_cuda_stream *stream;
    enum driver_call call;
    CUdeviceptr dst, src; /* SIGNAL, AWAIT: dst is the counter */
    size_t bytes;
    uint64_t value; /* FILL: the byte */
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

static CUresult call_driver(const struct zpp_cuda_api *api, const struct driver_arg *arg) {
    const CUstream native = arg->stream->native;
    switch (arg->call) {
    case COPY: return api->cuMemcpyAsync(arg->dst, arg->src, arg->bytes, native);
    case FILL: return api->cuMemsetD8Async(arg->dst, (unsigned char)arg->value, arg->bytes, native);
    case SIGNAL: return api->cuStreamWriteValue64(native, arg->dst, arg->value, ZPP_CU_STREAM_WRITE_VALUE_DEFAULT);
    default: return api->cuStreamWaitValue64(native, arg->dst, arg->value, ZPP_CU_STREAM_WAIT_VALUE_GEQ);
    }
}

static zpp_status driver_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    static const char *const names[] = {"copy", "fill", "write a counter", "wait for a counter"};
    (void)native, (void)wait;
    const struct driver_arg *call = arg;
    const struct zpp_cuda_device *cuda = zpp_cuda_of(call->stream->base.device);
    bool pushed;
    const zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = call_driver(cuda->api, call);
    zpp_cuda_leave(cuda, pushed);
    return zpp_cuda_stream_result(call->stream, result, names[call->call], err);
}

static zpp_status enqueue_call(const struct driver_arg *arg, struct zpp_err *err) {
    return zpp_cuda_enqueue(arg->stream, driver_op, arg, sizeof *arg, err);
}

static CUdeviceptr address_of(const void *memory) { return (CUdeviceptr)(uintptr_t)memory; }

zpp_status zpp_cuda_copy(zpp_stream *base, void *dst, const void *src, size_t bytes, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    if (!bytes && !stream->queue) return stream_error(stream, err);
    return enqueue_call(&(struct driver_arg){stream, COPY, address_of(dst), address_of(src), bytes, 0}, err);
}

zpp_status zpp_cuda_fill(zpp_stream *base, void *dst, unsigned char byte, size_t bytes, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    if (!bytes && !stream->queue) return stream_error(stream, err);
    return enqueue_call(&(struct driver_arg){stream, FILL, address_of(dst), 0, bytes, byte}, err);
}

zpp_status zpp_cuda_signal(zpp_stream *base, uint64_t *counter, uint64_t value, struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    return enqueue_call(&(struct driver_arg){stream, SIGNAL, address_of(counter), 0, 0, value}, err);
}

/* The native stream waits, so the queue and the caller go on. */
zpp_status zpp_cuda_await(zpp_stream *base, const uint64_t *counter, uint64_t value, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    (void)wait;
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    return enqueue_call(&(struct driver_arg){stream, AWAIT, address_of(counter), 0, 0, value}, err);
}

/* The driver takes fewer than 256 operations in a batch. */
enum { BATCH = 64 };
struct batch_arg {
    struct zpp_cuda_stream *stream;
    CUstreamBatchMemOpParams *operations;
    unsigned int count;
};

static zpp_status batch_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait;
    const struct batch_arg *batch = arg;
    const struct zpp_cuda_device *cuda = zpp_cuda_of(batch->stream->base.device);
    bool pushed;
    const zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuStreamBatchMemOp(batch->stream->native, batch->count, batch->operations, 0);
    zpp_cuda_leave(cuda, pushed);
    return zpp_cuda_stream_result(batch->stream, result, "wait for counters", err);
}

/* A queue keeps its operations, and has no place for so many counters: there they are operations of their own. */
zpp_status zpp_cuda_await_all(zpp_stream *base, const uint64_t *const *counters, size_t count, uint64_t value,
                              struct zpp_err *err) {
    struct zpp_cuda_stream *stream = (struct zpp_cuda_stream *)base;
    CUstreamBatchMemOpParams operations[BATCH] = {0};
    zpp_status status = ZPP_OK;
    for (size_t done = 0, taken; done < count && status == ZPP_OK; done += taken) {
        taken = stream->queue || count - done < 2 ? 1 : count - done < BATCH ? count - done : BATCH;
        for (size_t i = 0; i < taken; i++) {
            operations[i].waitValue.operation = ZPP_CU_STREAM_MEM_OP_WAIT_VALUE_64;
            operations[i].waitValue.address = address_of(counters[done + i]);
            operations[i].waitValue.value64 = value;
            operations[i].waitValue.flags = ZPP_CU_STREAM_WAIT_VALUE_GEQ;
        }
        const struct batch_arg batch = {stream, operations, (unsigned int)taken};
        status = taken == 1 ? zpp_cuda_await(base, counters[done], value, NULL, err)
                            : zpp_cuda_enqueue(stream, batch_op, &batch, sizeof batch, err);
    }
    return status;
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
