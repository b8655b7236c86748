/* SPDX-License-Identifier: Apache-2.0
 *
 * One successor per unit and phase. A unit that runs twice in a pass (shared blocks) keeps its last successor; a whole
 * sequence would predict that case too, at the price of states to invalidate, which is where the peers lose time.
 */
#include "trace.h"

#include <stdlib.h>

zpp_status zpp_trace_init(struct zpp_trace *trace, int units, struct zpp_err *err) {
    *trace = (struct zpp_trace){ .units = units };
    for (int phase = 0; phase < ZPP_PHASES; phase++) {
        trace->next[phase] = malloc((size_t)(units ? units : 1) * sizeof(int));
        if (!trace->next[phase]) {
            zpp_trace_fini(trace);
            return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the recorded order of %d units", units);
        }
        for (int unit = 0; unit < units; unit++) trace->next[phase][unit] = -1;
    }
    zpp_trace_restart(trace);
    return ZPP_OK;
}

void zpp_trace_fini(struct zpp_trace *trace) {
    for (int phase = 0; phase < ZPP_PHASES; phase++) {
        free(trace->next[phase]);
        trace->next[phase] = NULL;
    }
}

void zpp_trace_record(struct zpp_trace *trace, enum zpp_phase phase, int unit) {
    const int last = trace->last[phase];
    if (last >= 0 && last != unit) trace->next[phase][last] = unit;
    trace->last[phase] = unit;
}

int zpp_trace_next(const struct zpp_trace *trace, enum zpp_phase phase, int unit) {
    return trace->next[phase][unit];
}

void zpp_trace_restart(struct zpp_trace *trace) {
    for (int phase = 0; phase < ZPP_PHASES; phase++) trace->last[phase] = -1;
}
