/* SPDX-License-Identifier: Apache-2.0
 *
 * Stray reads: reads of a released unit's memory. A tensor that a hook kept (`weight.detach()`) has the unit's
 * address; nothing is mapped there after the release, and the access faults. A handler for SIGSEGV and SIGBUS maps
 * pages of NaN at the address (bytes 0xff, which are NaN in every float type), records the address, and returns, so
 * that the instruction runs again. Writes go to the same private pages and are lost with them. The binding layer checks
 * zpp_stray_is_seen at the next call and raises an error for the addresses of zpp_stray_take.
 *
 * The handler passes every other fault to the handler that was installed before it. Design: docs/design/0007.
 *
 * A signal handler belongs to the process. The list of areas and the recorded addresses are therefore static, and the
 * handler reads them without locks.
 */
#ifndef ZPP_BASE_STRAY_H
#define ZPP_BASE_STRAY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

/* A range of addresses. Parts of it have memory; the other parts are its holes. */
struct zpp_stray_spec {
    void *base; /* whole pages */
    size_t bytes;
    const void *ctx;
    /* True if `offset_bytes` lies in a hole. [*begin, *end), whole pages, is the hole or the mapped part around it.
     * Runs in the signal handler, never while another thread has locked the area. */
    bool (*is_hole)(const void *ctx, size_t offset_bytes, size_t *begin_bytes, size_t *end_bytes);
    /* Remove the pages of NaN from a hole, so that reads of it fault again. Runs with the area locked. */
    void (*close_hole)(const void *ctx, size_t begin_bytes, size_t end_bytes);
};

typedef struct zpp_stray_area zpp_stray_area;

/* Catch reads of the holes from now on. The first call installs the handler. Free with zpp_stray_unwatch. */
zpp_status zpp_stray_watch(const struct zpp_stray_spec *spec, zpp_stray_area **out, struct zpp_err *err);
/* Call it before the addresses are unmapped. NULL is fine. */
void zpp_stray_unwatch(zpp_stray_area *area);

/* Lock the area around every change of its holes. One thread holds the lock at a time, and no handler reads the holes
 * meanwhile: a thread that faults then runs its instruction again until the lock is free. Not recursive. The holder
 * must not access holes. */
void zpp_stray_lock(zpp_stray_area *area);
void zpp_stray_unlock(zpp_stray_area *area);
/* True if a hole may contain pages of NaN. Call it with the area locked. */
bool zpp_stray_has_pages(const zpp_stray_area *area);
/* Install our handler again if another one was installed over it; that one then comes second. Costs one system call. */
void zpp_stray_keep_handler(void);

/* True if there was a stray read since the last take. Costs one load. */
extern _Atomic int zpp_stray_seen;
static inline bool zpp_stray_is_seen(void) {
    return atomic_load_explicit(&zpp_stray_seen, memory_order_relaxed) != 0;
}

enum { ZPP_STRAY_ADDRESSES = 32 };
/* Write the addresses of the first stray reads, at most ZPP_STRAY_ADDRESSES, and return their number. Removes all pages
 * of NaN. Any thread. */
size_t zpp_stray_take(uintptr_t *addresses);

#endif
