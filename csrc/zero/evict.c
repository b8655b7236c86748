/* SPDX-License-Identifier: Apache-2.0
 *
 * Units that several graphs of one backward use, or one graph at several places: two forwards and one loss, or layers
 * that share their weights. The last of their gradients comes from the place that the backward reaches last. Until then
 * such a unit would stay whole, and so the whole model be in memory. Before a unit is needed, those that were read the
 * longest time ago are therefore released. Whole units then take no more than two of the largest. The hooks gather a
 * unit again for the other graph.
 *
 * The same holds for units whose gradients come in parts, from nested backwards. On a GPU whole units have fixed
 * memory. There any unit goes that lies where another is needed, even if it is used once: parameters without gradients
 * would keep it until the end.
 *
 * A unit stays while a node of autograd may still read it. That is the node that runs, or one of an outer backward that
 * waits for a nested one. Tasks of autograd are numbered as they begin, so an outer one has the lower number.
 */
#include "../base/wrap.h"
#include "internal.h"
#include "placement.h"
#include "reduce.h"

void zpp_zero_note_read(zpp_zero *zero, int index, const struct zpp_reader *reader) {
    struct zpp_unit *unit = zero->units[index];
    const bool outer_may_read = unit->reader.task >= reader->outermost && unit->reader.task < reader->task;
    if (!outer_may_read) unit->reader = *reader;
    unit->read_number = ++zero->reads;
}

static bool may_be_read(const struct zpp_unit *unit, const struct zpp_reader *now) {
    if (unit->reader.task == now->task) return unit->reader.node == now->node;
    return unit->reader.task < now->task;
}

static bool may_go(const struct zpp_unit *unit, const struct zpp_reader *now) {
    if (unit->state != ZPP_UNIT_GATHERED || unit->pins || unit->sticky || unit->shared) return false;
    return !may_be_read(unit, now);
}

/* True if the units that compute now, with `needed`, take more than two of the largest. Units of several modules have
 * memory of their own in every plan. */
static bool is_over(const zpp_zero *zero, const struct zpp_unit *needed) {
    size_t bytes = zpp_unit_bytes(needed);
    if (!zero->used_again) return false;
    for (int i = 0; i < zero->moving_count; i++) {
        const struct zpp_unit *unit = zero->moving[i];
        if (unit != needed && unit->state == ZPP_UNIT_GATHERED && !unit->shared) bytes += zpp_unit_bytes(unit);
    }
    return bytes > 2 * zero->largest_bytes;
}

/* True where `unit` is to go before `needed` is taken. `over`: whole units take too much memory. */
static bool is_to_go(const zpp_zero *zero, const struct zpp_unit *unit, const struct zpp_unit *needed, bool over) {
    if (unit == needed) return false;
    if (zero->wrap && zpp_wrap_meet(zero->wrap, needed->wrap_at, unit->wrap_at)) return true;
    return over && !zpp_zero_used_once(zero, unit->index);
}

int zpp_zero_next_to_evict(const zpp_zero *zero, int index, const struct zpp_reader *now) {
    const struct zpp_unit *needed = zero->units[index], *oldest = NULL;
    if (needed->state == ZPP_UNIT_GATHERED || needed->shared || zero->pass_is_open) return -1;
    if (!zero->used_again && !zero->wrap) return -1;
    const bool over = is_over(zero, needed);
    for (int i = 0; i < zero->moving_count; i++) {
        const struct zpp_unit *unit = zero->moving[i];
        if (oldest && unit->read_number >= oldest->read_number) continue;
        if (may_go(unit, now) && is_to_go(zero, unit, needed, over)) oldest = unit;
    }
    return oldest ? oldest->index : -1;
}

zpp_status zpp_zero_make_sticky(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    const bool is_free = unit->state != ZPP_UNIT_GATHERED && !zpp_zero_uses(zero, index);
    zpp_status status = ZPP_OK;
    if (zero->wrap && zpp_unit_moves(unit) && is_free) {
        if (unit->state == ZPP_UNIT_GATHERING) status = zpp_unit_drop_ahead(zero, unit, err);
        if (status == ZPP_OK) status = zpp_wrapped_give_own(zero, unit, err);
    }
    unit->sticky = status == ZPP_OK;
    return status;
}
