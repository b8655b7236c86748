/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards of gradients that live from a unit's reduction until its step (docs/design/0032): what one gives back the next
 * one takes, so a backward holds the shards of a unit or two, and allocates nothing once it has begun to repeat itself.
 */
#include <string.h>

#include "internal.h"

/* NULL: none fits. */
static void *take_pooled(zpp_zero *zero, size_t bytes) {
    void *memory = NULL;
    pthread_mutex_lock(&zero->grad_pool_lock);
    for (int i = 0; i < ZPP_POOLED_GRADS && !memory; i++) {
        if (!zero->grad_pool[i].memory || zero->grad_pool[i].bytes != bytes) continue;
        memory = zero->grad_pool[i].memory;
        zero->grad_pool[i] = (struct zpp_pooled_grad){ NULL, 0 };
    }
    if (!memory) zero->shard_bytes += bytes;
    pthread_mutex_unlock(&zero->grad_pool_lock);
    return memory;
}

zpp_status zpp_grad_pool_take(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    if (grad->shard) return ZPP_OK;
    void *memory = take_pooled(zero, bytes);
    const zpp_status status = memory ? ZPP_OK : zpp_device_alloc(zero->options.device, bytes, &memory, err);
    if (status == ZPP_OK) grad->shard = memory;
    return status;
}

static void free_pooled(zpp_zero *zero, struct zpp_pooled_grad *grad_pool) {
    if (!grad_pool->memory) return;
    zpp_device_free(zero->options.device, grad_pool->memory, grad_pool->bytes);
    zero->shard_bytes -= grad_pool->bytes;
    *grad_pool = (struct zpp_pooled_grad){ NULL, 0 };
}

/* The one that waited longest makes room. */
void zpp_grad_pool_give(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (!grad->shard) return;
    pthread_mutex_lock(&zero->grad_pool_lock);
    free_pooled(zero, &zero->grad_pool[ZPP_POOLED_GRADS - 1]);
    for (int i = ZPP_POOLED_GRADS - 1; i > 0; i--) zero->grad_pool[i] = zero->grad_pool[i - 1];
    zero->grad_pool[0] = (struct zpp_pooled_grad){ grad->shard, zpp_grad_shard_bytes(grad) };
    pthread_mutex_unlock(&zero->grad_pool_lock);
    grad->shard = NULL;
}

void zpp_grad_pool_drop(zpp_zero *zero) {
    for (int i = 0; i < ZPP_POOLED_GRADS; i++) free_pooled(zero, &zero->grad_pool[i]);
}

void zpp_zero_pool_grads(zpp_zero *zero) {
    zero->pools_grads = zero->options.stage >= 2 && !zero->grad_file.unit_file;
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
    if (zero->pools_grads) zpp_grad_pool_give(zero, grad);
    return zero->grad_file.unit_file ? zpp_grad_file_drop(zero, grad, err) : ZPP_OK;
}
