/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of functions that each device fills in, private to device*.c. device.h documents them as zpp_device_*,
 * zpp_stream_* and zpp_event_*; device.c only forwards. The records of an implementation begin with these.
 */
#ifndef ZPP_BASE_DEVICE_FILL_H
#define ZPP_BASE_DEVICE_FILL_H

#include "device.h"

/* Memory that is mapped again and again. */
struct zpp_mapping {
    void *base;
    size_t address_bytes, memory_bytes, grain_bytes;
    uint64_t *handles; /* of the device, one a grain of memory; NULL on cpu */
};

struct zpp_device_fill {
    const char *name;
    enum zpp_device_kind kind;
    void (*destroy)(zpp_device *device);
    zpp_status (*alloc)(zpp_device *device, size_t bytes, void **out, struct zpp_err *err);
    void (*free)(zpp_device *device, void *memory, size_t bytes);

    zpp_status (*pin)(zpp_device *device, void *memory, size_t bytes, struct zpp_err *err);
    void (*unpin)(zpp_device *device, void *memory);

    /* Map `memory_bytes` of new memory end to end over `address_bytes` of new addresses; wrap.h. Both are multiples of
     * map_grain, and memory_bytes <= address_bytes. */
    zpp_status (*map_grain)(zpp_device *device, size_t *bytes, struct zpp_err *err);
    zpp_status (*map_wrapped)(zpp_device *device, size_t address_bytes, size_t memory_bytes, struct zpp_mapping *out,
                              struct zpp_err *err);
    void (*unmap_wrapped)(zpp_device *device, struct zpp_mapping *mapping);

    zpp_status (*stream_create)(zpp_device *device, enum zpp_stream_kind kind, enum zpp_stream_priority priority,
                                const char *name, zpp_stream **out, struct zpp_err *err);
    void (*stream_destroy)(zpp_stream *stream);
    void (*stream_adopt)(zpp_stream *stream, void *native);
    zpp_status (*stream_follow)(zpp_stream *stream, void *native, struct zpp_err *err);
    zpp_status (*launch)(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err);
    zpp_status (*copy)(zpp_stream *stream, void *dst, const void *src, size_t bytes, struct zpp_err *err);
    zpp_status (*fill)(zpp_stream *stream, void *dst, unsigned char byte, size_t bytes, struct zpp_err *err);
    zpp_status (*signal)(zpp_stream *stream, uint64_t *counter, uint64_t value, struct zpp_err *err);
    zpp_status (*await)(zpp_stream *stream, const uint64_t *counter, uint64_t value, const struct zpp_wait *wait,
                        struct zpp_err *err);
    /* NULL: awaits one by one. */
    zpp_status (*await_all)(zpp_stream *stream, const uint64_t *const *counters, size_t count, uint64_t value,
                            struct zpp_err *err);
    zpp_status (*poll)(zpp_stream *stream, struct zpp_err *err);

    zpp_status (*event_create)(zpp_device *device, zpp_event **out, struct zpp_err *err);
    void (*event_destroy)(zpp_event *event);
    zpp_status (*record)(zpp_event *event, zpp_stream *stream, struct zpp_err *err);
    zpp_status (*wait)(zpp_stream *stream, zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);
    zpp_status (*sync)(zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);
};

struct zpp_device {
    const struct zpp_device_fill *fill;
};
struct zpp_stream {
    zpp_device *device; /* borrowed */
};
struct zpp_event {
    zpp_device *device; /* borrowed */
};

#endif
