/* SPDX-License-Identifier: Apache-2.0
 *
 * The step: the only time when shards are written. Between step_begin and step_end each rank writes its own shards and
 * nobody reads; everywhere else everybody reads and nobody writes. That is why gathers need no synchronisation at all.
 */
#include <stdlib.h>

#include "internal.h"
#include "placement.h"

zpp_status zpp_zero_step_begin(zpp_zero *zero, uint64_t vote, uint64_t *votes, const struct zpp_wait *wait,
                               struct zpp_err *err) {
    zpp_status status = zpp_zero_release_all(zero, err);
    if (status != ZPP_OK) return status;
    const uint64_t began_ns = zpp_span_begin();
    uint64_t *all = votes ? votes : calloc((size_t)zero->ranks, sizeof *all);
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the votes of %d ranks", zero->ranks);
    status = zpp_zero_exchange(zero, ZPP_DESC_STEP, &vote, sizeof vote, all, wait, err);
    if (!votes) free(all);
    if (status == ZPP_OK) zpp_span_end(began_ns, ZPP_SPAN_WAIT, "until all ranks step", 0);
    zero->step_ns = zpp_span_begin();
    zero->stepping = status == ZPP_OK;
    return status;
}

zpp_status zpp_zero_gather_norms(zpp_zero *zero, const void *mine, size_t bytes, void *all, const struct zpp_wait *wait,
                                 struct zpp_err *err) {
    return zpp_zero_exchange(zero, ZPP_DESC_NORM, mine, bytes, all, wait, err);
}

zpp_status zpp_zero_step_end(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_span_end(zero->step_ns, ZPP_SPAN_STEP, "step", 0);
    zero->step_ns = 0;
    zero->stepping = false;
    if (zero->ranks == 1) return ZPP_OK;
    zpp_zero_publish(zero);
    const uint64_t began_ns = zpp_span_begin();
    zpp_status status = zpp_barrier(zero->options.comm, wait, err);
    if (status == ZPP_OK) zpp_span_end(began_ns, ZPP_SPAN_WAIT, "until all ranks have stepped", 0);
    if (status != ZPP_OK || zero->options.stage == 0) return status;
    for (int i = 0; i < zero->units_count; i++) {
        struct zpp_unit *unit = zero->units[i];
        if (!unit->placement->collect || !unit->trainable) continue;
        status = unit->placement->collect(zero, unit, wait, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}
