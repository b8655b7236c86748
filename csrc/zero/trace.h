/* SPDX-License-Identifier: Apache-2.0
 *
 * The recorded order of units: the sequence in which each phase needed them the last time, and how far along it this
 * pass is (the overlap-centric design of ZeRO-Infinity 6.2). A wrong guess costs a gather that nobody waits for, never
 * a wrong result.
 */
#ifndef ZPP_ZERO_TRACE_H
#define ZPP_ZERO_TRACE_H

#include "zero.h"

/* One phase: `before` is what we follow, `now` is being recorded. The same unit twice in a row counts once. */
struct zpp_sequence {
    int *before, *now; /* unit indices */
    size_t before_count, now_count;
    size_t cursor;     /* what is needed next is before[cursor] */
};

struct zpp_trace {
    struct zpp_sequence phases[ZPP_PHASES];
    size_t capacity; /* of each array; what comes after it in a pass is not recorded */
};

zpp_status zpp_trace_init(struct zpp_trace *trace, int units, struct zpp_err *err);
void zpp_trace_fini(struct zpp_trace *trace);
/* `unit` is needed now. */
void zpp_trace_record(struct zpp_trace *trace, enum zpp_phase phase, int unit);
/* The unit that is needed `steps` after the next one, if this pass goes as the last one; -1: unknown, or the pass ends.
 */
int zpp_trace_ahead(const struct zpp_trace *trace, enum zpp_phase phase, size_t steps);
/* A pass ended: follow what was recorded in it. Phases that did not run keep what they have. */
void zpp_trace_restart(struct zpp_trace *trace);

#endif
