/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients that a delayed step took (delayed.h): a slice of stages 2 and 3 changes places with a second one, so that
 * the next backward fills that; the slice of stage 1 is a part of its bucket, and is copied out.
 */
#include <string.h>

#include "internal.h"

zpp_status zpp_zero_grad_take(zpp_zero *zero, int index, const void **taken, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    *taken = NULL;
    if (!grad || !grad->has) return ZPP_OK;
    if (zero->slices.filed || zero->options.stage == 0)
        return zpp_fail(err, ZPP_STATE, "zero: the gradient of unit %s is %s, so a step cannot take it",
                        grad->unit->name, zero->slices.filed ? "in a file" : "every rank's whole one");
    const size_t bytes = zpp_grad_slice_bytes(grad);
    if (!grad->taken) {
        void *memory = NULL;
        const zpp_status status = zpp_device_alloc(zero->options.device, bytes, &memory, err);
        if (status != ZPP_OK) return status;
        grad->taken = memory;
        zero->taken_bytes += bytes;
    }
    if (zero->options.stage == 1) {
        memcpy(grad->taken, grad->slice, bytes);
    } else {
        unsigned char *filled = grad->slice;
        grad->slice = grad->taken;
        grad->taken = filled;
    }
    *taken = grad->taken;
    return ZPP_OK;
}

size_t zpp_zero_taken_bytes(const zpp_zero *zero) {
    return zero->taken_bytes;
}

void zpp_taken_drop(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (grad->taken) zpp_device_free(zero->options.device, grad->taken, zpp_grad_slice_bytes(grad));
    grad->taken = NULL;
}
