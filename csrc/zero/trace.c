/* SPDX-License-Identifier: Apache-2.0
 *
 * Whole sequences, not one successor per unit: a tied embedding is first and last in a forward, and a block that
 * contains other units comes back between them in backward. With successors such a unit leads to the wrong place, the
 * bound fills with units that are not needed, and nothing useful is fetched any more.
 *
 * Where ranks or passes differ, the cursor jumps to the next place where the unit occurs; a unit that does not occur
 * any more moves nothing. So one deviation costs one guess.
 */
#include "trace.h"

#include <stdlib.h>

enum { ENTRIES_PER_UNIT = 16, LEAST_ENTRIES = 256 };

zpp_status zpp_trace_init(struct zpp_trace *trace, int units, struct zpp_err *err) {
    *trace = (struct zpp_trace){ .capacity = (size_t)units * ENTRIES_PER_UNIT + LEAST_ENTRIES };
    for (int phase = 0; phase < ZPP_PHASES; phase++) {
        struct zpp_sequence *sequence = &trace->phases[phase];
        sequence->before = malloc(trace->capacity * sizeof(int));
        sequence->now = malloc(trace->capacity * sizeof(int));
        if (sequence->before && sequence->now) continue;
        zpp_trace_fini(trace);
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the recorded order of %d units", units);
    }
    return ZPP_OK;
}

void zpp_trace_fini(struct zpp_trace *trace) {
    for (int phase = 0; phase < ZPP_PHASES; phase++) {
        free(trace->phases[phase].before);
        free(trace->phases[phase].now);
        trace->phases[phase] = (struct zpp_sequence){ 0 };
    }
}

static void move_cursor(struct zpp_sequence *sequence, int unit) {
    for (size_t at = sequence->cursor; at < sequence->before_count; at++) {
        if (sequence->before[at] != unit) continue;
        sequence->cursor = at + 1;
        return;
    }
}

void zpp_trace_record(struct zpp_trace *trace, enum zpp_phase phase, int unit) {
    struct zpp_sequence *sequence = &trace->phases[phase];
    if (sequence->now_count && sequence->now[sequence->now_count - 1] == unit) return;
    move_cursor(sequence, unit);
    if (sequence->now_count < trace->capacity) sequence->now[sequence->now_count++] = unit;
}

int zpp_trace_ahead(const struct zpp_trace *trace, enum zpp_phase phase, size_t steps) {
    const struct zpp_sequence *sequence = &trace->phases[phase];
    const size_t at = sequence->cursor + steps;
    return at < sequence->before_count ? sequence->before[at] : -1;
}

void zpp_trace_restart(struct zpp_trace *trace) {
    for (int phase = 0; phase < ZPP_PHASES; phase++) {
        struct zpp_sequence *sequence = &trace->phases[phase];
        sequence->cursor = 0;
        if (!sequence->now_count) continue;
        int *const recorded = sequence->now;
        sequence->now = sequence->before;
        sequence->before = recorded;
        sequence->before_count = sequence->now_count;
        sequence->now_count = 0;
    }
}
