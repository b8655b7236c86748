/* SPDX-License-Identifier: Apache-2.0
 *
 * The interface to devices: memory, streams, events, ordered operations. csrc/zero and csrc/comm use it only, and do
 * not know which of the implementations runs below:
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
    /* Work beside the computation. cpu: a queue without a thread; whatever can run without waiting runs inside
     * zpp_stream_launch and zpp_stream_poll, the rest inside zpp_event_sync. This costs no hand-over and no core. */
    ZPP_STREAM_QUEUE,
    /* Work beside the computation, in a thread of its own on cpu. */
    ZPP_STREAM_THREAD,
};

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

/* --- memory: at least 4096-byte aligned. sim fills it with a NaN pattern on alloc, and poisons it on free --------- */
zpp_status zpp_device_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err);
void zpp_device_free(zpp_device *device, void *memory, size_t bytes);

/* --- streams ----------------------------------------------------------------------------------------------------- */
zpp_status zpp_stream_create(zpp_device *device, enum zpp_stream_kind kind, const char *name, zpp_stream **out,
                             struct zpp_err *err);
void zpp_stream_destroy(zpp_stream *stream); /* waits for its operations; NULL is fine */
/* Use the driver's stream `native` from now on; for HOST streams of cuda. */
void zpp_stream_adopt(zpp_stream *stream, void *native);

/* `arg` is copied (at most ZPP_OP_ARG_BYTES). An operation that fails leaves its error in the stream: every later
 * launch, poll and sync on it returns that error, and nothing more runs. */
enum { ZPP_OP_ARG_BYTES = 128 };
zpp_status zpp_stream_launch(zpp_stream *stream, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err);
zpp_status zpp_stream_copy(zpp_stream *stream, void *dst, const void *src, size_t bytes, struct zpp_err *err);
/* Run what can run without waiting (cpu QUEUE streams; a no-op elsewhere). Return OK if nothing is left, else AGAIN. */
zpp_status zpp_stream_poll(zpp_stream *stream, struct zpp_err *err);

/* --- events ------------------------------------------------------------------------------------------------------ */
zpp_status zpp_event_create(zpp_device *device, zpp_event **out, struct zpp_err *err);
void zpp_event_destroy(zpp_event *event); /* NULL is fine; no thread may be waiting */
/* Make the event stand for everything launched on `stream` so far. Recording again moves it. An event that was never
 * recorded is complete. */
zpp_status zpp_event_record(zpp_event *event, zpp_stream *stream, struct zpp_err *err);
/* Make later operations of `stream` run after `event`. HOST streams of cpu have no later operations: there the caller
 * waits, as in zpp_event_sync. `wait` is used in that case only. */
zpp_status zpp_stream_wait(zpp_stream *stream, zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);
/* Wait on the host. Return OK when complete, AGAIN when wait is NULL and it is not, or the error of its stream. */
zpp_status zpp_event_sync(zpp_event *event, const struct zpp_wait *wait, struct zpp_err *err);

#endif
