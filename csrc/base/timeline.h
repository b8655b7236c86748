/* SPDX-License-Identifier: Apache-2.0
 *
 * Spans of time for zeropp.trace(path), of all threads of this process.
 *
 *     const uint64_t began_ns = zpp_span_begin();
 *     ... work ...
 *     zpp_span_end(began_ns, ZPP_SPAN_GATHER, unit->name, bytes);
 *
 * Off, which is the normal state, a pair costs one load and two branches that are never taken. On, it costs two reads
 * of the clock and one slot of a table that is made beforehand. Spans that find the table full are counted, not kept.
 *
 * Threads: spans from any; start and stop from one at a time.
 */
#ifndef ZPP_BASE_TIMELINE_H
#define ZPP_BASE_TIMELINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include "status.h"
#include "wait.h"

enum zpp_span_kind {
    ZPP_SPAN_FORWARD,  /* a module that needs units runs */
    ZPP_SPAN_BACKWARD, /* from its first gradient until all reductions are done */
    ZPP_SPAN_STEP,     /* shards are written */
    ZPP_SPAN_GATHER,   /* shards are gathered */
    ZPP_SPAN_REDUCE,   /* gradients are summed */
    ZPP_SPAN_WAIT,     /* this thread waits: for a peer, a gather, a reduction, a file */
    ZPP_SPAN_READ,     /* a request to a file, from its submission to its end; these overlap */
    ZPP_SPAN_WRITE,
    ZPP_SPAN_KINDS
};

enum { ZPP_SPAN_NAME_BYTES = 48 };

struct zpp_span {
    uint64_t began_ns, ended_ns; /* zpp_now_ns */
    uint64_t bytes;
    int thread; /* the system's thread id */
    enum zpp_span_kind kind;
    char name[ZPP_SPAN_NAME_BYTES]; /* truncated */
};

/* Begin to keep spans, `capacity` at most. Return STATE if the timeline is on already. */
zpp_status zpp_timeline_start(size_t capacity, struct zpp_err *err);
/* End the timeline. `*spans` has the spans in the order of their end, and the caller frees it; `*dropped` spans had no
 * room. Return STATE if the timeline is off. */
zpp_status zpp_timeline_stop(struct zpp_span **spans, size_t *count, size_t *dropped, struct zpp_err *err);

extern atomic_bool zpp_timeline_is_on;
void zpp_timeline_add(uint64_t began_ns, enum zpp_span_kind kind, const char *name, uint64_t bytes);

static inline uint64_t zpp_span_begin(void) {
    return atomic_load_explicit(&zpp_timeline_is_on, memory_order_relaxed) ? zpp_now_ns() : 0;
}
/* Keep a span; `name` is copied. Does nothing where began_ns is 0. */
static inline void zpp_span_end(uint64_t began_ns, enum zpp_span_kind kind, const char *name, uint64_t bytes) {
    if (began_ns) zpp_timeline_add(began_ns, kind, name, bytes);
}

#endif
