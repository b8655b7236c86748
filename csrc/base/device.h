/* SPDX-License-Identifier: Apache-2.0
 *
 * The interface to devices: memory, streams, events, ordered operations. csrc/zero and csrc/comm use it only, and do
 * not know which of the implementations runs below (docs/design/0037-device-interface.md):
 *
 *   cpu   device_cpu.c    a stream is the calling thread, a queue that callers drive, or a thread of its own
 *   cuda  device_cuda.c   the CUDA driver API, found with dlopen; streams and events are the driver's
 *   sim   device_sim.c    for tests: every stream is a thread, each operation starts late, after a seeded random delay,
 *                         in any order that streams and events allow; fresh and freed memory is poisoned
 *
 * Operations of one stream run in order. Operations of two streams are ordered by events only.
 * Threads: a stream may be used by one thread at a time; an event may be waited for by any thread.
 */
#ifndef ZPP_BASE_DEVICE_H
#define ZPP_BASE_DEVICE_H

#include <stdbool.h>
#include "status.h"
#include "wait.h"

typedef struct zpp_device zpp_device;
typedef struct zpp_stream zpp_stream;
typedef struct zpp_event zpp_event;

enum zpp_stream_kind {
    /* Computation. cpu: the calling thread itself, so launch runs at once and waits block the caller.
     * cuda: a stream that this device does not own (torch's current stream), set by zpp_stream_adopt. */
    ZPP_STREAM_HOST,
    /* Work beside the computation that may wait for peers. A queue without a thread; whatever can run without waiting
     * runs inside the calls that append to it and inside zpp_stream_poll, the rest inside zpp_event_sync. This costs no
     * hand-over and no core. cuda: the queue stands before a native stream, and running an operation enqueues it there;
     * an event recorded on the queue is at first one that is not enqueued. */
    ZPP_STREAM_QUEUE,
    /* Work beside the computation that waits for events and counters only. cpu: a thread of its own. cuda: a native
     * stream, and its operations are enqueued by the caller at once. */
    ZPP_STREAM_THREAD,
};
enum zpp_stream_priority { ZPP_PRIORITY_NORMAL, ZPP_PRIORITY_HIGH }; /* of kernels that are ready; nothing on cpu */

/* One operation. `native` is the driver's stream on cuda, NULL elsewhere. wait == NULL: try, and return ZPP_AGAIN if it
 * cannot be done now (it will be called again); otherwise finish or fail. On cuda it enqueues work and returns at
 * once. */
typedef zpp_status (*zpp_op_fn)(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err);

/* --- devices: new; free with zpp_device_destroy, after all its streams, events and memory ----------------------- */
zpp_status zpp_device_cpu_create(zpp_device **out, struct zpp_err *err);
zpp_status zpp_device_cuda_create(int ordinal, zpp_device **out, struct zpp_err *err); /* NOT_BUILT without a driver */

struct zpp_sim_options {
    uint64_t seed;
    uint32_t max_delay_us; /* each operation waits 0..max_delay_us before it runs; 0 = only yields, still any order */
};
zpp_status zpp_device_sim_create(const struct zpp_sim_options *options, zpp_device **out, struct zpp_err *err);
/* sim only: return the bytes of freed memory that were written after the free, among the last 64 blocks (16 MiB) at
 * least. */
size_t zpp_device_sim_late_bytes(zpp_device *device);
void zpp_device_destroy(zpp_device *device); /* NULL is fine */
const char *zpp_device_name(const zpp_device *device); /* "cpu", "cuda", "sim" */
/* Where the memory of a device lies, and so what may read it: this process by pointers, or kernels of CUDA alone. */
enum zpp_device_kind { ZPP_DEVICE_HOST, ZPP_DEVICE_CUDA };
enum zpp_device_kind zpp_device_kind(const zpp_device *device);

/* --- memory: at least 4096-byte aligned. sim fills it with a NaN pattern on alloc, and poisons it on free --------- */
zpp_status zpp_device_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err);
void zpp_device_free(zpp_device *device, void *memory, size_t bytes);
/* Let streams of the device copy from, write and wait for host memory that exists already, such as a region of all
 * ranks: page-locked on cuda, nothing on cpu. Each process does so for its own mapping. Unpin before it is unmapped. */
zpp_status zpp_device_pin(zpp_device *device, void *memory, size_t bytes, struct zpp_err *err);
void zpp_device_unpin(zpp_device *device, void *memory);

/* --- streams ----------------------------------------------------------------------------------------------------- */
zpp_status zpp_stream_create(zpp_device *device, enum zpp_stream_kind kind, const char *name, zpp_stream **out,
                             struct zpp_err *err);
zpp_status zpp_stream_create_priority(zpp_device *device, enum zpp_stream_kind kind, enum zpp_stream_priority priority,
                                      const char *name, zpp_stream **out, struct zpp_err *err);
void zpp_stream_destroy(zpp_stream *stream); /* waits for its operations; NULL is fine */
zpp_device *zpp_stream_device(const zpp_stream *stream);
/* Use the driver's stream `native` from now on; for HOST streams of cuda. */
void zpp_stream_adopt(zpp_stream *stream, void *native);
/* Adopt a stream, and order later operations after those of the stream that was adopted before. That stream must still
 * be there; one that was never used costs nothing. */
zpp_status zpp_stream_follow(zpp_stream *stream, void *native, struct zpp_err *err);

/* `arg` is copied (at most ZPP_OP_ARG_BYTES). An operation that fails leaves its error in the stream: every later
 * launch, poll and sync on it returns that error, and nothing more runs. */
enum { ZPP_OP_ARG_BYTES = 128 };
zpp_status zpp_stream_launch(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err);
zpp_status zpp_stream_copy(zpp_stream *stream, void *dst, const void *src, size_t bytes, struct zpp_err *err);
zpp_status zpp_stream_fill(zpp_stream *stream, void *dst, unsigned char byte, size_t bytes, struct zpp_err *err);

/* --- counters: order between ranks without a host that waits ------------------------------------------------------
 * A counter is an aligned uint64_t in host memory that is pinned on the device, often in a region of all ranks. One
 * stream writes it. Any stream of any rank waits for it. The comparison is cyclic: `value` is reached when
 * (int64_t)(counter - value) >= 0. So a wait is released by ZPP_STREAM_COUNTER_RELEASED more than any value in use, and
 * not by the largest number.
 *
 * Streams of one GPU may share a hardware queue. A rank therefore enqueues its own signals before the awaits of peers'
 * signals that answer them; in the other order one queue waits for itself. */
#define ZPP_STREAM_COUNTER_RELEASED (UINT64_C(1) << 62)
static inline bool zpp_stream_counter_reached(const uint64_t *counter, uint64_t value) {
    return (int64_t)(__atomic_load_n(counter, __ATOMIC_ACQUIRE) - value) >= 0;
}
/* Write the counter after the stream's operations so far; a reader that sees the value sees what they wrote. */
zpp_status zpp_stream_signal(zpp_stream *stream, uint64_t *counter, uint64_t value, struct zpp_err *err);
/* Make later operations of `stream` run after the counter reached `value`. The caller waits in `wait` for HOST streams
 * of cpu only, as in zpp_stream_wait. */
zpp_status zpp_stream_await(zpp_stream *stream, const uint64_t *counter, uint64_t value, const struct zpp_wait *wait,
                            struct zpp_err *err);
/* The same for `count` counters, in any order. On cuda it is one call of the driver, unless the stream has a queue. */
zpp_status zpp_stream_await_all(zpp_stream *stream, const uint64_t *const *counters, size_t count, uint64_t value,
                                const struct zpp_wait *wait, struct zpp_err *err);
/* Run what can run without waiting (QUEUE streams; a no-op elsewhere). Return OK if nothing is left, else AGAIN. */
zpp_status zpp_stream_poll(zpp_stream *stream, struct zpp_err *err);

/* --- events ------------------------------------------------------------------------------------------------------ */
zpp_status zpp_event_create(zpp_device *device, zpp_event **out, struct zpp_err *err);
void zpp_event_destroy(zpp_event *event); /* NULL is fine; no thread may be waiting */
/* Make the event stand for everything launched on `stream` so far. Recording again moves it. An event that was never
 * recorded is complete. */
zpp_status zpp_event_record(zpp_event *event, zpp_stream *stream, struct zpp_err *err);
/* Make later operations of `stream` run after `event`. `wait` is used in two cases only. HOST streams of cpu have no
 * later operations: there the caller waits, as in zpp_event_sync. HOST and THREAD streams of cuda have no queue: there
 * the caller runs the QUEUE stream of the event until the event is enqueued. */
zpp_status zpp_stream_wait(zpp_stream *stream, zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);
/* Wait on the host. Return OK when complete, AGAIN when wait is NULL and it is not, or the error of its stream. */
zpp_status zpp_event_sync(zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);

#endif
