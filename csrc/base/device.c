/* SPDX-License-Identifier: Apache-2.0
 *
 * Forwards each call of device.h to the implementation of its device.
 */
#include "device.h"

#include <assert.h>

#include "device_fill.h"

void zpp_device_destroy(zpp_device *device) {
    if (device) device->fill->destroy(device);
}

const char *zpp_device_name(const zpp_device *device) { return device->fill->name; }

enum zpp_device_kind zpp_device_kind(const zpp_device *device) { return device->fill->kind; }

zpp_status zpp_device_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err) {
    return device->fill->alloc(device, bytes, out, err);
}

void zpp_device_free(zpp_device *device, void *memory, size_t bytes) {
    if (memory) device->fill->free(device, memory, bytes);
}

zpp_status zpp_device_pin(zpp_device *device, void *memory, size_t bytes, struct zpp_err *err) {
    return device->fill->pin(device, memory, bytes, err);
}

void zpp_device_unpin(zpp_device *device, void *memory) {
    if (memory) device->fill->unpin(device, memory);
}

zpp_status zpp_stream_create(zpp_device *device, enum zpp_stream_kind kind, const char *name, zpp_stream **out,
                             struct zpp_err *err) {
    return device->fill->stream_create(device, kind, ZPP_PRIORITY_NORMAL, name, out, err);
}

zpp_status zpp_stream_create_priority(zpp_device *device, enum zpp_stream_kind kind, enum zpp_stream_priority priority,
                                      const char *name, zpp_stream **out, struct zpp_err *err) {
    return device->fill->stream_create(device, kind, priority, name, out, err);
}

void zpp_stream_destroy(zpp_stream *stream) {
    if (stream) stream->device->fill->stream_destroy(stream);
}

zpp_device *zpp_stream_device(const zpp_stream *stream) { return stream->device; }

void zpp_stream_adopt(zpp_stream *stream, void *native) { stream->device->fill->stream_adopt(stream, native); }

zpp_status zpp_stream_follow(zpp_stream *stream, void *native, struct zpp_err *err) {
    return stream->device->fill->stream_follow(stream, native, err);
}

zpp_status zpp_stream_launch(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err) {
    assert(arg_bytes <= ZPP_OP_ARG_BYTES);
    return stream->device->fill->launch(stream, fn, arg, arg_bytes, err);
}

zpp_status zpp_stream_copy(zpp_stream *stream, void *dst, const void *src, size_t bytes, struct zpp_err *err) {
    return stream->device->fill->copy(stream, dst, src, bytes, err);
}

zpp_status zpp_stream_fill(zpp_stream *stream, void *dst, unsigned char byte, size_t bytes, struct zpp_err *err) {
    return stream->device->fill->fill(stream, dst, byte, bytes, err);
}

zpp_status zpp_stream_signal(zpp_stream *stream, uint64_t *counter, uint64_t value, struct zpp_err *err) {
    assert((uintptr_t)counter % sizeof *counter == 0);
    return stream->device->fill->signal(stream, counter, value, err);
}

zpp_status zpp_stream_await(zpp_stream *stream, const uint64_t *counter, uint64_t value, const struct zpp_wait *wait,
                            struct zpp_err *err) {
    assert((uintptr_t)counter % sizeof *counter == 0);
    return stream->device->fill->await(stream, counter, value, wait, err);
}

zpp_status zpp_stream_await_all(zpp_stream *stream, const uint64_t *const *counters, size_t count, uint64_t value,
                                const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_device_fill *fill = stream->device->fill;
    if (fill->await_all) return fill->await_all(stream, counters, count, value, err);
    zpp_status status = ZPP_OK;
    for (size_t i = 0; i < count && status == ZPP_OK; i++) status = fill->await(stream, counters[i], value, wait, err);
    return status;
}

zpp_status zpp_stream_poll(zpp_stream *stream, struct zpp_err *err) { return stream->device->fill->poll(stream, err); }

zpp_status zpp_event_create(zpp_device *device, zpp_event **out, struct zpp_err *err) {
    return device->fill->event_create(device, out, err);
}

void zpp_event_destroy(zpp_event *event) {
    if (event) event->device->fill->event_destroy(event);
}

zpp_status zpp_event_record(zpp_event *event, zpp_stream *stream, struct zpp_err *err) {
    assert(event->device == stream->device);
    return stream->device->fill->record(event, stream, err);
}

zpp_status zpp_stream_wait(zpp_stream *stream, zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err) {
    assert(event->device == stream->device);
    return stream->device->fill->wait(stream, event, wait, err);
}

zpp_status zpp_event_sync(zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err) {
    return event->device->fill->sync(event, wait, err);
}
