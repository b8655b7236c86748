/* SPDX-License-Identifier: Apache-2.0
 *
 * The recorded order of units: which unit followed which, the last time each phase ran (the overlap-centric design of
 * ZeRO-Infinity 6.2). A wrong guess costs a gather that nobody waits for, never a wrong result.
 */
#ifndef ZPP_ZERO_TRACE_H
#define ZPP_ZERO_TRACE_H

#include "zero.h"

struct zpp_trace {
    int *next[ZPP_PHASES]; /* [units]; -1: unknown */
    int last[ZPP_PHASES];  /* unit seen last in this phase; -1: none */
    int units;
};

zpp_status zpp_trace_init(struct zpp_trace *trace, int units, struct zpp_err *err);
void zpp_trace_fini(struct zpp_trace *trace);
/* `unit` is needed now. */
void zpp_trace_record(struct zpp_trace *trace, enum zpp_phase phase, int unit);
/* The unit that followed `unit`, or -1. */
int zpp_trace_next(const struct zpp_trace *trace, enum zpp_phase phase, int unit);
/* A pass ended: what comes next follows nothing. */
void zpp_trace_restart(struct zpp_trace *trace);

#endif
