/* SPDX-License-Identifier: Apache-2.0
 *
 * Slices of gradients that live from a unit's reduction until its step (docs/design/0032): what one gives back the next
 * one takes, so a backward holds the slices of a unit or two, and allocates nothing once it has begun to repeat itself.
 */
#include <string.h>

#include "internal.h"

/* NULL: none fits. */
static void *borrow(zpp_zero *zero, size_t bytes) {
    void *memory = NULL;
    pthread_mutex_lock(&zero->lent_lock);
    for (int i = 0; i < ZPP_LENT_SLICES && !memory; i++) {
        if (!zero->lent[i].memory || zero->lent[i].bytes != bytes) continue;
        memory = zero->lent[i].memory;
        zero->lent[i] = (struct zpp_lent){ NULL, 0 };
    }
    if (!memory) zero->slice_bytes += bytes;
    pthread_mutex_unlock(&zero->lent_lock);
    return memory;
}

zpp_status zpp_lend_slice(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_slice_bytes(grad);
    if (grad->slice) return ZPP_OK;
    void *memory = borrow(zero, bytes);
    const zpp_status status = memory ? ZPP_OK : zpp_device_alloc(zero->options.device, bytes, &memory, err);
    if (status == ZPP_OK) grad->slice = memory;
    return status;
}

static void free_lent(zpp_zero *zero, struct zpp_lent *lent) {
    if (!lent->memory) return;
    zpp_device_free(zero->options.device, lent->memory, lent->bytes);
    zero->slice_bytes -= lent->bytes;
    *lent = (struct zpp_lent){ NULL, 0 };
}

/* The one that waited longest makes room. */
void zpp_lent_give(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (!grad->slice) return;
    pthread_mutex_lock(&zero->lent_lock);
    free_lent(zero, &zero->lent[ZPP_LENT_SLICES - 1]);
    for (int i = ZPP_LENT_SLICES - 1; i > 0; i--) zero->lent[i] = zero->lent[i - 1];
    zero->lent[0] = (struct zpp_lent){ grad->slice, zpp_grad_slice_bytes(grad) };
    pthread_mutex_unlock(&zero->lent_lock);
    grad->slice = NULL;
}

void zpp_lent_drop(zpp_zero *zero) {
    for (int i = 0; i < ZPP_LENT_SLICES; i++) free_lent(zero, &zero->lent[i]);
}

void zpp_zero_lend_slices(zpp_zero *zero) {
    zero->lends_slices = zero->options.stage >= 2 && !zero->slices.filed;
}

int zpp_zero_next_reduced(zpp_zero *zero, int done) {
    if (done >= zero->order_at) return -1;
    struct zpp_err ignored = ZPP_ERR_INIT;
    const struct zpp_unit_grad *grad = zero->units[zero->order[done]]->grad;
    (void)zpp_stream_poll(zero->reduce, &ignored); /* the backward's end says what is wrong */
    return zpp_event_sync(grad->done, NULL, &ignored) == ZPP_OK ? zero->order[done] : -1;
}

zpp_status zpp_zero_drop_grad(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    if (!grad) return ZPP_OK;
    memset(grad->present, 0, grad->unit->params);
    grad->has = false;
    if (zero->lends_slices) zpp_lent_give(zero, grad);
    return zero->slices.filed ? zpp_slices_drop(zero, grad, err) : ZPP_OK;
}
