/* SPDX-License-Identifier: Apache-2.0
 *
 * Units that are frozen at first, and those that are frozen for a while (docs/design/0034). What sleeps has addresses
 * for its gradients from zpp_zero_seal on; here it gets a place in the order of reductions, and memory.
 */
#include "internal.h"

/* Backward meets the last unit first. */
void zpp_reduce_list_order(zpp_zero *zero, bool sleeping) {
    zero->order_count = 0;
    for (int i = zero->units_count - 1; i >= 0; i--)
        if (zero->units[i]->trainable
            || (sleeping && zero->units[i]->frozen_reserved)) zero->order[zero->order_count++] = i;
}

static zpp_status join_order(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const zpp_status status = zpp_reduce_make_shard(zero, unit->grad, err);
    if (status != ZPP_OK) return status;
    if (zero->options.stage <= 1) zero->kept_bucket_bytes += unit->grad->bucket_bytes;
    int at = zero->order_count++;
    for (; at > 0 && zero->order[at - 1] < unit->index; at--) zero->order[at] = zero->order[at - 1];
    zero->order[at] = unit->index;
    return ZPP_OK;
}

zpp_status zpp_zero_unfreeze(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    char words[ZPP_UNIT_WORDS];
    if (unit->trainable) return ZPP_OK;
    if (!unit->frozen_reserved || !zero->sealed || zero->in_backward)
        return zpp_fail(err, ZPP_STATE, "zero: %s cannot be unfrozen: %s", zpp_unit_words(unit, words, sizeof words),
                        unit->frozen_reserved ? "a backward runs, or nothing is sealed"
                        : "it has no room for gradients");
    const zpp_status status = unit->grad ? join_order(zero, unit, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    unit->trainable = true;
    unit->frozen_reserved = false;
    return ZPP_OK;
}

void zpp_zero_skip(zpp_zero *zero, int unit, size_t param) {
    struct zpp_unit_grad *grad = zero->units[unit]->grad;
    if (!grad || grad->seen[param]) return;
    grad->seen[param] = 1;
    grad->missing--;
}
