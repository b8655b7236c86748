/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of whole units on an accelerator, for the placements that have it there. Units that move have memory that
 * wraps (base/wrap.h): to take and to release it costs the host nothing, and a stream that takes it is ordered after
 * all that used it. Units that stay are resident: one block of memory, made at seal.
 *
 * A unit whose memory a whole unit has is not taken. A prefetch is then put off. A unit that is needed drops what is
 * only read ahead there; if the memory is in use, it gets memory of its own, and its address changes. No tensor that
 * autograd saved may refer to the old address then.
 */
#include <stdlib.h>

#include "../../base/wrap.h"
#include "../internal.h"
#include "../placement.h"

/* --- units that move ---------------------------------------------------------------------------------------------- */

/* Without prefetch nothing overlaps, and gathers are a part of the computation. */
zpp_status zpp_wrapped_open(zpp_zero *zero, struct zpp_err *err) {
    if (!zero->options.prefetch_bytes) return ZPP_OK;
    return zpp_stream_create_priority(zero->options.device, ZPP_STREAM_THREAD, ZPP_PRIORITY_HIGH, "gather",
                                      &zero->gather, err);
}

/* Two of the largest unit, and what is read ahead. A unit of several modules has memory of its own: from the backward
 * of the last of them until that of the first it is whole, and would be in the way of units between them. */
zpp_status zpp_wrapped_seal(zpp_zero *zero, struct zpp_err *err) {
    const int count = zero->moving_count;
    size_t largest_bytes = 0;
    if (!count) return ZPP_OK;
    struct zpp_wrap_unit *units = calloc((size_t)count, sizeof *units);
    if (!units) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for a list of %d units", count);
    for (int i = 0; i < count; i++) {
        const struct zpp_unit *unit = zero->moving[i];
        const size_t bytes = zpp_unit_bytes(unit);
        zero->moving[i]->wrap_at = i;
        units[i] = (struct zpp_wrap_unit){unit->name, bytes, unit->shared};
        if (!unit->shared && bytes > largest_bytes) largest_bytes = bytes;
    }
    const struct zpp_wrap_options options = {zero->options.device, units, count,
                                             2 * largest_bytes + zero->options.prefetch_bytes};
    const zpp_status status = zpp_wrap_create(&options, &zero->wrap, err);
    free(units);
    return status;
}

void zpp_wrapped_locate(zpp_zero *zero, struct zpp_unit *unit) {
    unit->whole = zpp_wrap_address(zero->wrap, unit->wrap_at);
}

zpp_status zpp_wrapped_acquire(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    int blocker;
    return zpp_wrap_take(zero->wrap, unit->wrap_at, zero->gather, &blocker, err);
}

zpp_status zpp_wrapped_release(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    unit->mapped = false;
    return zpp_wrap_release(zero->wrap, unit->wrap_at, zero->compute, err);
}

/* A unit that is only read ahead, where this one would lie. */
static bool is_in_the_way(const zpp_zero *zero, const struct zpp_unit *unit, const struct zpp_unit *other) {
    return other->state == ZPP_UNIT_GATHERING && zpp_wrap_meet(zero->wrap, unit->wrap_at, other->wrap_at);
}

static zpp_status need_own(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    char words[ZPP_UNIT_WORDS];
    if (!zero->in_backward && !zpp_zero_uses(zero, unit->index)) return zpp_wrapped_give_own(zero, unit, err);
    return zpp_fail(err, ZPP_STATE,
                    "zero: %s is needed while other units are whole in its memory, and a graph refers to it there; "
                    "%zu bytes hold the gathered units; raise Config(prefetch=)",
                    zpp_unit_words(unit, words, sizeof words), zpp_wrap_memory_bytes(zero->wrap));
}

zpp_status zpp_wrapped_give_own(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const zpp_status status = zpp_wrap_own(zero->wrap, unit->wrap_at, err);
    if (status != ZPP_OK) return status;
    unit->whole = zpp_wrap_address(zero->wrap, unit->wrap_at);
    zpp_zero_sort_by_address(zero);
    return ZPP_OK;
}

zpp_status zpp_wrapped_evict(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    int blocker;
    for (int i = 0; i < zero->moving_count; i++) {
        struct zpp_unit *other = zero->moving[i];
        if (!is_in_the_way(zero, unit, other)) continue;
        const zpp_status status = zpp_unit_drop_ahead(zero, other, err);
        if (status != ZPP_OK) return status;
    }
    const zpp_status status = zpp_wrap_take(zero->wrap, unit->wrap_at, zero->gather, &blocker, err);
    return status == ZPP_AGAIN ? need_own(zero, unit, err) : status;
}

void zpp_wrapped_count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    if (zero->wrap) out->gathered_bytes += zpp_wrap_memory_bytes(zero->wrap) + zpp_wrap_own_bytes(zero->wrap);
    out->gathered_peak_bytes += zero->full_peak_bytes;
}

/* --- units that stay ---------------------------------------------------------------------------------------------- */

void zpp_resident_lay_out(zpp_zero *zero, struct zpp_unit *unit) {
    unit->range_offset_bytes = zpp_unit_next_offset(&zero->resident_bytes, zpp_unit_bytes(unit));
}

zpp_status zpp_resident_make(zpp_zero *zero, struct zpp_err *err) {
    void *memory = NULL;
    if (!zero->resident_bytes) return ZPP_OK;
    const zpp_status status = zpp_device_alloc(zero->options.device, zero->resident_bytes, &memory, err);
    zero->resident = memory;
    return status;
}

void zpp_resident_locate(zpp_zero *zero, struct zpp_unit *unit) {
    unit->whole = zero->resident + unit->range_offset_bytes;
}

void zpp_wrapped_fini(zpp_zero *zero) {
    zpp_wrap_destroy(zero->wrap);
    if (zero->resident) zpp_device_free(zero->options.device, zero->resident, zero->resident_bytes);
    zero->wrap = NULL;
    zero->resident = NULL;
}
