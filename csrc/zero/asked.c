/* SPDX-License-Identifier: Apache-2.0
 *
 * What is asked of a backward and of its gradients: small answers beside reduce.c, which makes them.
 */
#include "internal.h"

void zpp_zero_share_backward(zpp_zero *zero) {
    zero->shares_backward = true;
}

void zpp_zero_count_use(zpp_zero *zero, int unit) {
    if (zero->units[unit]->grad) zero->units[unit]->grad->uses++;
    else zero->units[unit]->uses++;
}

void zpp_zero_reset_uses(zpp_zero *zero) {
    for (int i = 0; i < zero->units_count; i++) {
        if (zero->units[i]->grad) zero->units[i]->grad->uses = 0;
        zero->units[i]->uses = 0;
    }
}

int zpp_zero_uses(const zpp_zero *zero, int unit) {
    return zero->units[unit]->grad ? zero->units[unit]->grad->uses : zero->units[unit]->uses;
}

bool zpp_zero_used_once(const zpp_zero *zero, int unit) {
    const struct zpp_unit_grad *grad = zero->units[unit]->grad;
    return grad ? grad->uses <= 1 && !grad->partial : zero->units[unit]->uses <= 1;
}

const void *zpp_zero_grad_shard(const zpp_zero *zero, int unit, const uint8_t **present) {
    const struct zpp_unit_grad *grad = zero->units[unit]->grad;
    if (!grad || !grad->has) return NULL;
    if (present) *present = grad->present;
    return grad->shard;
}

unsigned char *zpp_zero_whole_gradient(const zpp_zero *zero, int unit) {
    return zero->units[unit]->grad ? zero->units[unit]->grad->shard : NULL;
}

zpp_dtype zpp_zero_grad_dtype(const zpp_zero *zero, int unit) {
    return zero->units[unit]->grad_dtype;
}

bool zpp_zero_has_grad(const zpp_zero *zero) {
    for (int at = 0; at < zero->order_count; at++)
        if (zero->units[zero->order[at]]->grad->has) return true;
    return false;
}

void zpp_zero_set_grad_scale(zpp_zero *zero, double scale) {
    zero->grad_scale = scale;
}
