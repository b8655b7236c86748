/* SPDX-License-Identifier: Apache-2.0
 *
 * Which units are gathered, and when: on need, ahead of need in the recorded order, and which stay between two passes.
 * How a unit moves is in unit.c.
 *
 * The recorded order is the sequence in which each phase needed the units the last time, and how far along it this pass
 * is (the overlap-centric design of ZeRO-Infinity 6.2). A wrong guess costs a gather that no computation waits for,
 * never a wrong result. Sequences are whole, not one successor per unit: a tied embedding is first and last in a
 * forward, and a block that contains other units comes back between them in backward. With successors such a unit leads
 * to the wrong place, the bound fills with units that are not needed, and nothing useful is fetched any more. Where
 * ranks or passes differ, the cursor jumps to the next place where the unit occurs; a unit that does not occur any more
 * moves nothing. So one deviation costs one guess.
 *
 * Units that a pass leaves out on purpose (layer dropping) are *masked* in it. Nothing gathers them, and the order that
 * is recorded takes them over from the last one, because the next pass may have them again.
 *
 * A backward begins with what the forward ends with. Where a forward has nothing left to read ahead, what the backward
 * reads first is *kept*: read, or not given back when it is released, which makes it GATHERING with nothing to fetch.
 * So is what a forward reads first, where a step inside the backward has just left it in memory.
 */
#include <stdlib.h>

#include "internal.h"
#include "placement.h"

/* --- the recorded order ------------------------------------------------------------------------------------------- */

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

static void append(struct zpp_trace *trace, struct zpp_sequence *sequence, int unit) {
    if (sequence->now_count && sequence->now[sequence->now_count - 1] == unit) return;
    if (sequence->now_count < trace->capacity) sequence->now[sequence->now_count++] = unit;
}

/* The masked units of before[cursor .. end) keep their places. */
static void take_over_masked(zpp_zero *zero, struct zpp_sequence *sequence, size_t end) {
    for (size_t at = sequence->cursor; at < end && zero->is_masked; at++)
        if (zero->units[sequence->before[at]]->masked) append(&zero->trace, sequence, sequence->before[at]);
}

static void move_cursor(zpp_zero *zero, struct zpp_sequence *sequence, int unit) {
    for (size_t at = sequence->cursor; at < sequence->before_count; at++) {
        if (sequence->before[at] != unit) continue;
        take_over_masked(zero, sequence, at);
        sequence->cursor = at + 1;
        return;
    }
}

static void record(zpp_zero *zero, enum zpp_phase phase, int unit) {
    struct zpp_sequence *sequence = &zero->trace.phases[phase];
    if (sequence->now_count && sequence->now[sequence->now_count - 1] == unit) return;
    move_cursor(zero, sequence, unit);
    append(&zero->trace, sequence, unit);
}

/* Return the unit that is needed `steps` after the next one, if this pass goes as the last one; -1: unknown, or the
 * pass ends. */
static int unit_ahead(const struct zpp_trace *trace, enum zpp_phase phase, size_t steps) {
    const struct zpp_sequence *sequence = &trace->phases[phase];
    const size_t at = sequence->cursor + steps;
    return at < sequence->before_count ? sequence->before[at] : -1;
}

/* A pass ended: follow what was recorded in it. Phases that did not run keep what they have. */
static void restart(zpp_zero *zero) {
    for (int phase = 0; phase < ZPP_PHASES; phase++) {
        struct zpp_sequence *sequence = &zero->trace.phases[phase];
        if (sequence->now_count) take_over_masked(zero, sequence, sequence->before_count);
        sequence->cursor = 0;
        if (!sequence->now_count) continue;
        int *const recorded = sequence->now;
        sequence->now = sequence->before;
        sequence->before = recorded;
        sequence->before_count = sequence->now_count;
        sequence->now_count = 0;
    }
}

void zpp_zero_mask(zpp_zero *zero, const uint8_t *masked) {
    zero->is_masked = true;
    for (int i = 0; i < zero->units_count; i++) zero->units[i]->masked = masked && masked[i];
}

bool zpp_zero_is_masked(const zpp_zero *zero) {
    return zero->is_masked;
}

/* --- gathers ------------------------------------------------------------------------------------------------------ */

/* Release units that were kept for a backward that never ran; `all`: also those for a forward that began with other
 * units. Return true if that freed prefetch budget. */
static bool drop_kept(zpp_zero *zero, bool all) {
    const size_t before_bytes = zero->ahead_bytes;
    for (int i = 0; i < zero->units_count && zero->kept_units; i++) {
        struct zpp_unit *unit = zero->units[i];
        struct zpp_err ignored = ZPP_ERR_INIT;
        if (!unit->kept || (unit->kept_over_step && !all)) continue;
        zpp_unit_set_kept(zero, unit, false);
        if (unit->state == ZPP_UNIT_GATHERING && zpp_unit_gather_end(zero, unit, NULL, &ignored) == ZPP_OK)
            (void)zpp_unit_release(zero, unit, &ignored);
    }
    return zero->ahead_bytes < before_bytes;
}

bool zpp_zero_reads_forward(const zpp_zero *zero) {
    if (!zero->placement->reads || !zero->options.prefetch_bytes) return false;
    return !zero->forward_read || zero->placement->reads(zero);
}

/* Keep what the backward begins with, as much of it as fits into the prefetch budget. */
static zpp_status keep_for_backward(zpp_zero *zero, struct zpp_err *err) {
    zero->forward_read = true;
    for (size_t steps = 0;; steps++) {
        const int next = unit_ahead(&zero->trace, ZPP_PHASE_BACKWARD, steps);
        if (next < 0) return ZPP_OK;
        struct zpp_unit *candidate = zero->units[next];
        if (!candidate->placement->keeps || candidate->kept || candidate->masked) continue;
        if (!zpp_unit_fits_ahead(zero, candidate)) return ZPP_OK;
        if (candidate->state == ZPP_UNIT_SHARDED) {
            const zpp_status status = zpp_unit_gather_begin(zero, candidate, err);
            if (status != ZPP_OK) return status == ZPP_AGAIN ? ZPP_OK : status; /* AGAIN: a whole unit has its memory */
        }
        zpp_unit_set_kept(zero, candidate, true);
    }
}

void zpp_zero_keep_for_forward(zpp_zero *zero) {
    for (size_t steps = 0;; steps++) {
        const int next = unit_ahead(&zero->trace, ZPP_PHASE_FORWARD, steps);
        struct zpp_unit *candidate = next < 0 ? NULL : zero->units[next];
        if (candidate && candidate->masked) continue;
        if (!candidate || !candidate->placement->steps_whole || !zpp_unit_is_gathered(candidate)) return;
        if (!zpp_unit_fits_ahead(zero, candidate)) return;
        zpp_unit_set_kept(zero, candidate, true);
        candidate->kept_over_step = true;
    }
}

/* Follow the recorded order while the bound allows. */
static zpp_status prefetch_ahead(zpp_zero *zero, enum zpp_phase phase, struct zpp_err *err) {
    for (size_t steps = 0;; steps++) {
        const int next = unit_ahead(&zero->trace, phase, steps);
        if (next < 0) return phase == ZPP_PHASE_FORWARD ? keep_for_backward(zero, err) : ZPP_OK;
        struct zpp_unit *candidate = zero->units[next];
        if (candidate->state != ZPP_UNIT_SHARDED || candidate->masked) continue;
        while (!zpp_unit_fits_ahead(zero, candidate))
            if (phase == ZPP_PHASE_BACKWARD || !drop_kept(zero, steps == 0)) return ZPP_OK;
        const zpp_status status = zpp_unit_gather_begin(zero, candidate, err);
        if (status != ZPP_OK) return status == ZPP_AGAIN ? ZPP_OK : status; /* AGAIN: a whole unit has its memory */
    }
}

static zpp_status gather_now(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const zpp_status status = zpp_unit_gather_begin(zero, unit, err);
    if (status != ZPP_AGAIN || !unit->placement->evict) return status;
    const zpp_status made = unit->placement->evict(zero, unit, err);
    return made == ZPP_OK ? zpp_unit_gather_begin(zero, unit, err) : made;
}

static zpp_status need(zpp_zero *zero, int index, enum zpp_phase phase, const struct zpp_wait *wait,
                       struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    unit->masked = false;
    if (!zpp_unit_moves(unit)) return ZPP_OK;
    const uint64_t began_ns = unit->state == ZPP_UNIT_GATHERED ? 0 : zpp_now_ns();
    if (unit->state == ZPP_UNIT_SHARDED) {
        const zpp_status status = gather_now(zero, unit, err);
        if (status != ZPP_OK) return status;
    }
    if (unit->state == ZPP_UNIT_GATHERING) {
        const zpp_status status = zpp_unit_gather_end(zero, unit, wait, err);
        if (status != ZPP_OK) return status;
    }
    if (began_ns) zero->gather_ns += zpp_now_ns() - began_ns;
    if (phase == ZPP_PHASE_BACKWARD || unit->kept_over_step) zpp_unit_set_kept(zero, unit, false);
    if (!zero->options.prefetch_bytes) return ZPP_OK;
    record(zero, phase, index);
    return prefetch_ahead(zero, phase, err);
}

zpp_status zpp_zero_need(zpp_zero *zero, int index, enum zpp_phase phase, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    static const char *const names[ZPP_PHASES] = { "the forward", "the backward", "an evaluation" };
    return zpp_unit_noticed(zero->units[index], names[phase], need(zero, index, phase, wait, err), err);
}

zpp_status zpp_zero_end_pass(zpp_zero *zero, struct zpp_err *err) {
    restart(zero);
    zero->forward_read = false;
    /* Long enough for any memcpy; a prefetch waits for no peer. */
    const struct zpp_wait patience = { .timeout_ns = UINT64_C(600000000000), .tick = NULL, .ctx = NULL };
    for (int i = 0; i < zero->units_count; i++) {
        struct zpp_unit *unit = zero->units[i];
        zpp_unit_set_kept(zero, unit, false);
        if (unit->state == ZPP_UNIT_GATHERING) {
            const zpp_status status = zpp_unit_gather_end(zero, unit, &patience, err);
            if (status != ZPP_OK && unit->state == ZPP_UNIT_GATHERING) return status; /* else no call waits for it */
        }
        const zpp_status status = zpp_unit_release(zero, unit, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

zpp_status zpp_zero_release_all(zpp_zero *zero, struct zpp_err *err) {
    for (int i = 0; i < zero->units_count; i++) zero->units[i]->sticky = false;
    return zpp_zero_end_pass(zero, err);
}
