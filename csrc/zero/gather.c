/* SPDX-License-Identifier: Apache-2.0
 *
 * Which units are gathered, and when: on need, ahead of need in the recorded order (trace.h), and which stay between
 * two passes. How a unit moves is in unit.c.
 *
 * A backward begins with what the forward ends with. Where a forward has nothing left to read ahead, what the backward
 * reads first is *kept*: read, or not given back when it is released, which makes it GATHERING with nothing to fetch.
 * So is what a forward reads first, where a step inside the backward has just left it in memory.
 */
#include "internal.h"
#include "placement.h"

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
        const int next = zpp_trace_ahead(&zero->trace, ZPP_PHASE_BACKWARD, steps);
        if (next < 0) return ZPP_OK;
        struct zpp_unit *candidate = zero->units[next];
        if (!candidate->placement->keeps || candidate->kept) continue;
        if (!zpp_unit_fits_ahead(zero, candidate)) return ZPP_OK;
        if (candidate->state == ZPP_UNIT_SHARDED) {
            const zpp_status status = zpp_unit_gather_begin(zero, candidate, err);
            if (status != ZPP_OK) return status;
        }
        zpp_unit_set_kept(zero, candidate, true);
    }
}

void zpp_zero_keep_for_forward(zpp_zero *zero) {
    for (size_t steps = 0;; steps++) {
        const int next = zpp_trace_ahead(&zero->trace, ZPP_PHASE_FORWARD, steps);
        struct zpp_unit *candidate = next < 0 ? NULL : zero->units[next];
        if (!candidate || !candidate->placement->keeps || !zpp_unit_is_gathered(candidate)) return;
        if (!zpp_unit_fits_ahead(zero, candidate)) return;
        zpp_unit_set_kept(zero, candidate, true);
        candidate->kept_over_step = true;
    }
}

/* Follow the recorded order while the bound allows. */
static zpp_status prefetch_ahead(zpp_zero *zero, enum zpp_phase phase, struct zpp_err *err) {
    for (size_t steps = 0;; steps++) {
        const int next = zpp_trace_ahead(&zero->trace, phase, steps);
        if (next < 0) return phase == ZPP_PHASE_FORWARD ? keep_for_backward(zero, err) : ZPP_OK;
        struct zpp_unit *candidate = zero->units[next];
        if (candidate->state != ZPP_UNIT_SHARDED) continue;
        while (!zpp_unit_fits_ahead(zero, candidate))
            if (phase == ZPP_PHASE_BACKWARD || !drop_kept(zero, steps == 0)) return ZPP_OK;
        const zpp_status status = zpp_unit_gather_begin(zero, candidate, err);
        if (status != ZPP_OK) return status;
    }
}

zpp_status zpp_zero_need(zpp_zero *zero, int index, enum zpp_phase phase, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    if (!zpp_unit_moves(unit)) return ZPP_OK;
    const uint64_t began_ns = unit->state == ZPP_UNIT_GATHERED ? 0 : zpp_now_ns();
    if (unit->state == ZPP_UNIT_SHARDED) {
        const zpp_status status = zpp_unit_gather_begin(zero, unit, err);
        if (status != ZPP_OK) return status;
    }
    if (unit->state == ZPP_UNIT_GATHERING) {
        const zpp_status status = zpp_unit_gather_end(zero, unit, wait, err);
        if (status != ZPP_OK) return status;
    }
    if (began_ns) zero->gather_ns += zpp_now_ns() - began_ns;
    if (phase == ZPP_PHASE_BACKWARD || unit->kept_over_step) zpp_unit_set_kept(zero, unit, false);
    if (!zero->options.prefetch_bytes) return ZPP_OK;
    zpp_trace_record(&zero->trace, phase, index);
    return prefetch_ahead(zero, phase, err);
}

zpp_status zpp_zero_end_pass(zpp_zero *zero, struct zpp_err *err) {
    zpp_trace_restart(&zero->trace);
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
