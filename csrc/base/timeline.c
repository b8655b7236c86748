/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of spans: timeline.h. Writers claim slots by an atomic counter and write without a lock. Stop refuses new
 * writers and waits until the present ones have finished.
 */
#include "timeline.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

atomic_bool zpp_timeline_is_on;

static struct zpp_span *table;
static size_t table_capacity;
static atomic_size_t claimed;
static atomic_int inside;

zpp_status zpp_timeline_start(size_t capacity, struct zpp_err *err) {
    if (table) return zpp_fail(err, ZPP_STATE, "trace: one is being taken already in this process; end it first");
    table = calloc(capacity ? capacity : 1, sizeof *table);
    if (!table) return zpp_fail(err, ZPP_NOMEM, "trace: no memory for %zu spans", capacity);
    table_capacity = capacity;
    atomic_store(&claimed, 0);
    atomic_store(&zpp_timeline_is_on, true);
    return ZPP_OK;
}

zpp_status zpp_timeline_stop(struct zpp_span **spans, size_t *count, size_t *dropped, struct zpp_err *err) {
    if (!table) return zpp_fail(err, ZPP_STATE, "trace: none is being taken in this process");
    atomic_store(&zpp_timeline_is_on, false);
    while (atomic_load(&inside)) sched_yield();
    const size_t wanted = atomic_load(&claimed);
    *spans = table;
    *count = wanted < table_capacity ? wanted : table_capacity;
    *dropped = wanted - *count;
    table = NULL;
    return ZPP_OK;
}

void zpp_timeline_add(uint64_t began_ns, enum zpp_span_kind kind, const char *name, uint64_t bytes) {
    static _Thread_local int thread;
    if (!thread) thread = (int)syscall(SYS_gettid);
    atomic_fetch_add(&inside, 1);
    if (atomic_load(&zpp_timeline_is_on)) {
        const size_t slot = atomic_fetch_add(&claimed, 1);
        if (slot < table_capacity) {
            struct zpp_span *span = &table[slot];
            *span = (struct zpp_span){ .began_ns = began_ns, .ended_ns = zpp_now_ns(), .bytes = bytes,
                                       .thread = thread, .kind = kind };
            for (size_t i = 0; i + 1 < sizeof span->name && name[i]; ++i) span->name[i] = name[i];
        }
    }
    atomic_fetch_sub(&inside, 1);
}
