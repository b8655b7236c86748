/* SPDX-License-Identifier: Apache-2.0
 *
 * Reduced gradients that live from a unit's reduction until its step inside the backward (docs/design/0032). Memory
 * that one gives back is taken by the next one of the same size, so that a backward holds the shards of a unit or two,
 * and allocates nothing once it has begun to repeat itself.
 *
 * Threads: reductions take, wherever they run; the coordinator's thread gives back.
 */
#include "grad_store.h"

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

static zpp_status acquire(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    if (grad->shard) return ZPP_OK;
    void *memory = take_pooled(zero, bytes);
    const zpp_status status = memory ? ZPP_OK : zpp_device_alloc(zero->options.device, bytes, &memory, err);
    if (status == ZPP_OK) grad->shard = memory;
    return status;
}

static void free_pooled(zpp_zero *zero, struct zpp_pooled_grad *pooled) {
    if (!pooled->memory) return;
    zpp_device_free(zero->options.device, pooled->memory, pooled->bytes);
    zero->shard_bytes -= pooled->bytes;
    *pooled = (struct zpp_pooled_grad){ NULL, 0 };
}

/* The memory that has waited longest is freed. */
static zpp_status drop(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    (void)err;
    if (!grad->shard) return ZPP_OK;
    pthread_mutex_lock(&zero->grad_pool_lock);
    free_pooled(zero, &zero->grad_pool[ZPP_POOLED_GRADS - 1]);
    for (int i = ZPP_POOLED_GRADS - 1; i > 0; i--) zero->grad_pool[i] = zero->grad_pool[i - 1];
    zero->grad_pool[0] = (struct zpp_pooled_grad){ grad->shard, zpp_grad_shard_bytes(grad) };
    pthread_mutex_unlock(&zero->grad_pool_lock);
    grad->shard = NULL;
    return ZPP_OK;
}

/* The first unit that goes takes the pool with it. */
static void free_shard(zpp_zero *zero, struct zpp_unit_grad *grad) {
    for (int i = 0; i < ZPP_POOLED_GRADS; i++) free_pooled(zero, &zero->grad_pool[i]);
    zpp_grad_memory_free(zero, grad);
}

const struct zpp_grad_store zpp_grad_store_pooled = {
    .name = "pooled",
    .free = free_shard,
    .count_memory = zpp_grad_memory_count,
    .acquire = acquire,
    .drop = drop,
    .clear = zpp_grad_memory_clear,
    .flip = zpp_grad_memory_flip,
};
