/* SPDX-License-Identifier: Apache-2.0
 *
 * The record of a CUDA device and what the files of it share, private to device_cuda*.c, wrap_cuda.c and peer_cuda.c.
 *
 *   device_cuda_context.c the context, counts of bytes, what the driver can do
 *   device_cuda.c         memory, the device
 *   device_cuda_stream.c  streams, with or without a host queue, and their operations
 *   device_cuda_event.c   events
 *   device_cuda_kernel.c  kernels of the embedded images
 *
 * Locks: `lock` guards the lists of the device, its counts of bytes, and what an event stands for. It is innermost, and
 * no function of the driver is called under it. `kernels_lock` guards what device_cuda_kernel.c has loaded.
 */
#ifndef ZPP_BASE_DEVICE_CUDA_INTERNAL_H
#define ZPP_BASE_DEVICE_CUDA_INTERNAL_H

#include <pthread.h>

#include "device_cuda.h"
#include "device_host.h"

/* What device memory of this process is for; a message for memory that ran out names them. */
enum zpp_cuda_use { ZPP_CUDA_BLOCKS, ZPP_CUDA_WRAPPED, ZPP_CUDA_SHARED, ZPP_CUDA_USES };

struct zpp_cuda_block; /* device_cuda.c */
struct zpp_cuda_kernel; /* device_cuda_kernel.c */

/* A native event and who refers to it: the event of device.h that was recorded last, and operations of queues that have
 * not run. So recording again never moves what an operation in a queue waits for. */
struct zpp_cuda_mark {
    struct zpp_cuda_mark *next, *next_free;
    CUevent native;
    unsigned references;
};

struct zpp_cuda_device {
    zpp_device base;
    const struct zpp_cuda_api *api;
    CUdevice device;
    CUcontext context;
    int ordinal;
    struct zpp_host_device queues; /* the host queues before native streams */
    pthread_mutex_t lock, kernels_lock;
    struct zpp_cuda_block *blocks;
    struct zpp_cuda_kernel *kernels;
    struct zpp_cuda_mark *marks, *free_marks; /* all; those without references */
    CUmodule *modules; /* one an image; NULL until the first kernel is loaded */
    size_t held_bytes[ZPP_CUDA_USES];
};

struct zpp_cuda_stream {
    zpp_stream base;
    CUstream native;
    bool owned, adopted; /* adopted: `native` is a stream of the caller's, not the default one for want of any */
    zpp_stream *queue; /* of `queues`; NULL: operations are enqueued at once */
    char name[ZPP_STREAM_NAME_BYTES];
    struct zpp_err error; /* of what ran without a queue; the queue keeps that of what it ran */
};

static inline struct zpp_cuda_device *zpp_cuda_of(const zpp_device *device) {
    return (struct zpp_cuda_device *)device;
}

/* --- device_cuda_context.c ---------------------------------------------------------------------------------------- */
/* Make the context current for the caller, if it is not; `*pushed` says whether to undo that. */
zpp_status zpp_cuda_enter(const struct zpp_cuda_device *cuda, bool *pushed, struct zpp_err *err);
void zpp_cuda_leave(const struct zpp_cuda_device *cuda, bool pushed);
/* Count memory that was made (or given back: negative). */
void zpp_cuda_count(struct zpp_cuda_device *cuda, enum zpp_cuda_use use, ptrdiff_t bytes);
/* Return NOMEM, with who holds what, if `result` says that memory ran out; else what zpp_cuda_fail returns. `what` is
 * the object that wanted `bytes`, such as "memory of gathered units". */
zpp_status zpp_cuda_fail_alloc(struct zpp_cuda_device *cuda, CUresult result, const char *what, size_t bytes,
                               struct zpp_err *err);

/* The properties of memory of this device; `exported`: which other processes may map. */
CUmemAllocationProp zpp_cuda_properties(const struct zpp_cuda_device *cuda, bool exported);
CUmemAccessDesc zpp_cuda_access(const struct zpp_cuda_device *cuda);
/* NOT_BUILT with "the driver `lacks`" if the device does not have the attribute. */
zpp_status zpp_cuda_check_attribute(const struct zpp_cuda_device *cuda, CUdevice_attribute attribute, const char *lacks,
                                    struct zpp_err *err);
zpp_status zpp_cuda_grain(zpp_device *device, bool exported, size_t *bytes, struct zpp_err *err);

/* --- wrap_cuda.c -------------------------------------------------------------------------------------------------- */
zpp_status zpp_cuda_map_grain(zpp_device *device, size_t *bytes, struct zpp_err *err);
zpp_status zpp_cuda_map_wrapped(zpp_device *device, size_t address_bytes, size_t memory_bytes, struct zpp_mapping *out,
                                struct zpp_err *err);
void zpp_cuda_unmap_wrapped(zpp_device *device, struct zpp_mapping *mapping);

/* --- device_cuda_stream.c ----------------------------------------------------------------------------------------- */
zpp_status zpp_cuda_stream_create(zpp_device *device, enum zpp_stream_kind kind, enum zpp_stream_priority priority,
                                  const char *name, zpp_stream **out, struct zpp_err *err);
void zpp_cuda_stream_destroy(zpp_stream *stream);
void zpp_cuda_stream_adopt(zpp_stream *stream, void *native);
zpp_status zpp_cuda_op(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err);
zpp_status zpp_cuda_copy(zpp_stream *stream, void *dst, const void *src, size_t bytes, struct zpp_err *err);
zpp_status zpp_cuda_fill(zpp_stream *stream, void *dst, unsigned char byte, size_t bytes, struct zpp_err *err);
zpp_status zpp_cuda_signal(zpp_stream *stream, uint64_t *counter, uint64_t value, struct zpp_err *err);
zpp_status zpp_cuda_await_all(zpp_stream *stream, const uint64_t *const *counters, size_t count, uint64_t value,
                              struct zpp_err *err);
zpp_status zpp_cuda_await(zpp_stream *stream, const uint64_t *counter, uint64_t value, const struct zpp_wait *wait,
                          struct zpp_err *err);
zpp_status zpp_cuda_poll(zpp_stream *stream, struct zpp_err *err);
/* Run `fn` on the stream: now, or when its queue gets there. `arg` begins with a pointer to the zpp_cuda_stream, and
 * `fn` enters the context itself. An error of `fn` ends the stream. */
zpp_status zpp_cuda_enqueue(struct zpp_cuda_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes,
                            struct zpp_err *err);
/* Fill `err` for the failure of a call of the driver on this stream, if `result` is one. */
zpp_status zpp_cuda_stream_result(const struct zpp_cuda_stream *stream, CUresult result, const char *what,
                                  struct zpp_err *err);

/* --- device_cuda_event.c ------------------------------------------------------------------------------------------ */
zpp_status zpp_cuda_event_create(zpp_device *device, zpp_event **out, struct zpp_err *err);
void zpp_cuda_event_destroy(zpp_event *event);
zpp_status zpp_cuda_record(zpp_event *event, zpp_stream *stream, struct zpp_err *err);
zpp_status zpp_cuda_wait(zpp_stream *stream, zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);
zpp_status zpp_cuda_sync(zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);
zpp_status zpp_cuda_stream_follow(zpp_stream *stream, void *native, struct zpp_err *err);
void zpp_cuda_forget_marks(struct zpp_cuda_device *cuda); /* in the context */

/* --- device_cuda_kernel.c ----------------------------------------------------------------------------------------- */
void zpp_cuda_forget_kernels(struct zpp_cuda_device *cuda); /* in the context */

#endif
