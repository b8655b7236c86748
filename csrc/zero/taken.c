/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients that a delayed step took (step_delayed.h): a shard of stages 2 and 3 changes places with a second one, so that
 * the next backward fills that; the shard of stage 1 is a part of its bucket, and is copied out. In a file each shard
 * has two places, which change places.
 */
#include <string.h>

#include "internal.h"

static void exchange_addresses(struct zpp_unit_grad *grad) {
    unsigned char *filled = grad->shard;
    grad->shard = grad->taken;
    grad->taken = filled;
}

static zpp_status take_unit_file(zpp_zero *zero, struct zpp_unit_grad *grad, const void **taken, struct zpp_err *err) {
    if (!zero->delays_steps)
        return zpp_fail(err, ZPP_STATE, "zero: the gradient of unit %s has one place in its file, and cannot be taken",
                        grad->unit->name);
    const zpp_status status = zpp_grad_file_settle(zero, grad, err);
    if (status != ZPP_OK) return status;
    const int unit_file = grad->file_index;
    const size_t offset_bytes = grad->unit_file_offset_bytes;
    grad->file_index = grad->unit_file_taken;
    grad->unit_file_offset_bytes = grad->unit_file_taken_offset_bytes;
    grad->unit_file_taken = unit_file;
    grad->unit_file_taken_offset_bytes = offset_bytes;
    exchange_addresses(grad);
    *taken = grad->taken;
    return ZPP_OK;
}

zpp_status zpp_zero_grad_take(zpp_zero *zero, int index, const void **taken, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    *taken = NULL;
    if (!grad || !grad->has) return ZPP_OK;
    if (zero->options.stage == 0)
        return zpp_fail(err, ZPP_STATE, "zero: the gradient of unit %s is every rank's whole one, and cannot be taken",
                        grad->unit->name);
    if (zero->grad_file.unit_file) return take_unit_file(zero, grad, taken, err);
    const size_t bytes = zpp_grad_shard_bytes(grad);
    if (!grad->taken) {
        void *memory = NULL;
        const zpp_status status = zpp_device_alloc(zero->options.device, bytes, &memory, err);
        if (status != ZPP_OK) return status;
        grad->taken = memory;
        zero->taken_bytes += bytes;
    }
    if (zero->options.stage == 1) {
        memcpy(grad->taken, grad->shard, bytes);
    } else {
        exchange_addresses(grad);
    }
    *taken = grad->taken;
    return ZPP_OK;
}

void zpp_zero_delay_steps(zpp_zero *zero) {
    zero->delays_steps = true;
}

size_t zpp_zero_taken_bytes(const zpp_zero *zero) {
    return zero->taken_bytes;
}

void zpp_taken_drop(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (grad->taken && !zero->grad_file.unit_file)
        zpp_device_free(zero->options.device, grad->taken, zpp_grad_shard_bytes(grad));
    grad->taken = NULL;
}
