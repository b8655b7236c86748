/* SPDX-License-Identifier: Apache-2.0
 *
 * Stray reads: of memory that was given back. A tensor that somebody kept of a unit (a hook's `weight.detach()`) still
 * has the address, and nothing is mapped there, so the processor faults. The handler of SIGSEGV and SIGBUS puts pages of
 * NaN there (bytes 0xff: NaN in every kind of float), notes the address, and lets the instruction run again; what is
 * written there is lost with those pages. Who calls next hears of it: zpp_stray_is_seen, zpp_stray_take.
 *
 * Every other fault is passed on to the handler that was there before. docs/design/0037.
 *
 * Signal handlers belong to the process, so areas and what was seen are kept once a process: static, without locks.
 */
#ifndef ZPP_BASE_STRAY_H
#define ZPP_BASE_STRAY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

/* Addresses of which some have memory, and others, the holes, have none. */
struct zpp_stray_spec {
    void *base; /* whole pages */
    size_t bytes;
    const void *ctx;
    /* Does `offset_bytes` lie in a hole? [*begin, *end), whole pages, is all around it that is alike. Called in the
     * signal handler, and never while the area is locked by another. */
    bool (*is_hole)(const void *ctx, size_t offset_bytes, size_t *begin_bytes, size_t *end_bytes);
    /* Take the pages of NaN out of a hole: reads of it fault again. Called with the area locked. */
    void (*close_hole)(const void *ctx, size_t begin_bytes, size_t end_bytes);
};

typedef struct zpp_stray_area zpp_stray_area;

/* From now on reads of its holes are caught. Installs the handler. Free with zpp_stray_unwatch. */
zpp_status zpp_stray_watch(const struct zpp_stray_spec *spec, zpp_stray_area **out, struct zpp_err *err);
/* Before its addresses are given back; NULL is fine. */
void zpp_stray_unwatch(zpp_stray_area *area);

/* Around every change of what is a hole: one thread at a time, and no handler looks meanwhile (a thread that faults then
 * runs its instruction again). Not nested; the thread that has it must not touch holes. */
void zpp_stray_lock(zpp_stray_area *area);
void zpp_stray_unlock(zpp_stray_area *area);
/* With the area locked: pages of NaN may lie in holes. */
bool zpp_stray_has_pages(const zpp_stray_area *area);
/* Somebody may have put a handler over ours: be the first again, and pass on to theirs. One system call. */
void zpp_stray_keep_handler(void);

/* Were there stray reads since the last take? One load. */
extern _Atomic int zpp_stray_seen;
static inline bool zpp_stray_is_seen(void) {
    return atomic_load_explicit(&zpp_stray_seen, memory_order_relaxed) != 0;
}

enum { ZPP_STRAY_ADDRESSES = 32 };
/* Addresses of the first ones, at most ZPP_STRAY_ADDRESSES; returns how many. Closes all holes. Any thread. */
size_t zpp_stray_take(uintptr_t *addresses);

#endif
