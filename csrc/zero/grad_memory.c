/* SPDX-License-Identifier: Apache-2.0
 *
 * Reduced gradients in memory: as a part of their bucket (stages 0 and 1), each in memory of its own, or in memory from
 * a pool. A delayed step reads a back buffer: the shard of stage 1 is copied to it, because it is a part of its bucket;
 * one with memory of its own changes places with it, so that the next backward fills the other one.
 */
#include "grad_store.h"

#include <string.h>

#include "internal.h"

void zpp_grad_zero_param(const zpp_zero *zero, struct zpp_unit_grad *grad, size_t param) {
    const struct zpp_unit *unit = grad->unit;
    const struct zpp_unit one = { .params = 1, .param_elems = &unit->param_elems[param],
                                  .offset_elems = &unit->offset_elems[param], .shard_elems = unit->shard_elems };
    struct zpp_piece pieces[1];
    (void)zero;
    if (!zpp_unit_pieces(&one, unit->group->rank, pieces)) return;
    const size_t at = pieces[0].offset_elems - (size_t)unit->group->rank * unit->shard_elems;
    memset(grad->shard + at * grad->elem_bytes, 0, pieces[0].elems * grad->elem_bytes);
}

static void clear(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param) {
    if (grad->shard) zpp_grad_zero_param(zero, grad, param);
}

/* --- for a delayed step ------------------------------------------------------------------------------------------- */

static zpp_status make_back_shard(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    void *memory = NULL;
    if (grad->back_shard) return ZPP_OK;
    const zpp_status status = zpp_device_alloc(zpp_zero_shards_device(zero), bytes, &memory, err);
    if (status != ZPP_OK) return status;
    grad->back_shard = memory;
    zero->back_bytes += bytes;
    return ZPP_OK;
}

static zpp_status flip(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const zpp_status status = make_back_shard(zero, grad, err);
    if (status != ZPP_OK) return status;
    unsigned char *filled = grad->shard;
    grad->shard = grad->back_shard;
    grad->back_shard = filled;
    return ZPP_OK;
}

static void free_back_shard(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (grad->back_shard) zpp_device_free(zpp_zero_shards_device(zero), grad->back_shard, zpp_grad_shard_bytes(grad));
    grad->back_shard = NULL;
}

void zpp_grad_memory_count(const zpp_zero *zero, struct zpp_zero_memory *out) {
    out->grad_bytes += zero->shard_bytes + zero->kept_bucket_bytes + zero->carry_bytes;
}

/* --- in the bucket ------------------------------------------------------------------------------------------------ */

static zpp_status add_in_bucket(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    (void)err;
    unsigned char *bucket = zpp_grads_of_rank(zero, zero->rank) + grad->mapping_offset_bytes;
    const size_t shard = zero->options.stage == 0 ? 0 : (size_t)grad->unit->group->rank;
    grad->shard = bucket + shard * zpp_grad_shard_bytes(grad);
    return ZPP_OK;
}

/* Stage 0: the bucket's flags say which gradients there are. */
static void clear_in_bucket(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param) {
    if (grad->shard && zero->options.stage > 0) zpp_grad_zero_param(zero, grad, param);
}

/* Stage 1. (At stage 0 every rank has the whole gradient, and a delayed step reads that.) */
static zpp_status flip_in_bucket(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const zpp_status status = make_back_shard(zero, grad, err);
    if (status != ZPP_OK) return status;
    memcpy(grad->back_shard, grad->shard, zpp_grad_shard_bytes(grad));
    return ZPP_OK;
}

const struct zpp_grad_store zpp_grad_store_bucket = {
    .name = "bucket",
    .add = add_in_bucket,
    .free = free_back_shard,
    .count_memory = zpp_grad_memory_count,
    .clear = clear_in_bucket,
    .flip = flip_in_bucket,
};

/* --- in memory of its own ----------------------------------------------------------------------------------------- */

static zpp_status add(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    void *memory = NULL;
    const zpp_status status = zpp_device_alloc(zpp_zero_shards_device(zero), bytes, &memory, err);
    if (status != ZPP_OK) return status;
    grad->shard = memory;
    zero->shard_bytes += bytes;
    return ZPP_OK;
}

static void free_shards(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (grad->shard) zpp_device_free(zpp_zero_shards_device(zero), grad->shard, zpp_grad_shard_bytes(grad));
    grad->shard = NULL;
    free_back_shard(zero, grad);
}

const struct zpp_grad_store zpp_grad_store_memory = {
    .name = "memory",
    .add = add,
    .free = free_shards,
    .count_memory = zpp_grad_memory_count,
    .clear = clear,
    .flip = flip,
};

/* --- in memory from a pool ---------------------------------------------------------------------------------------- */

/* For a step inside the backward (docs/design/0032), a shard lives from its unit's reduction until its step. Memory
 * that one gives back is taken by the next one of the same size, so that a backward holds the shards of a unit or two,
 * and allocates nothing once it has begun to repeat itself. Reductions take memory, wherever they run; the
 * coordinator's thread gives it back. */

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

static zpp_status acquire_pooled(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    if (grad->shard) return ZPP_OK;
    void *memory = take_pooled(zero, bytes);
    const zpp_status status = memory ? ZPP_OK : zpp_device_alloc(zpp_zero_shards_device(zero), bytes, &memory, err);
    if (status == ZPP_OK) grad->shard = memory;
    return status;
}

static void free_pooled(zpp_zero *zero, struct zpp_pooled_grad *pooled) {
    if (!pooled->memory) return;
    zpp_device_free(zpp_zero_shards_device(zero), pooled->memory, pooled->bytes);
    zero->shard_bytes -= pooled->bytes;
    *pooled = (struct zpp_pooled_grad){ NULL, 0 };
}

/* The memory that has waited longest is freed. */
static zpp_status give_to_pool(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
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
static void free_with_pool(zpp_zero *zero, struct zpp_unit_grad *grad) {
    for (int i = 0; i < ZPP_POOLED_GRADS; i++) free_pooled(zero, &zero->grad_pool[i]);
    free_shards(zero, grad);
}

const struct zpp_grad_store zpp_grad_store_pooled = {
    .name = "pooled",
    .free = free_with_pool,
    .count_memory = zpp_grad_memory_count,
    .acquire = acquire_pooled,
    .drop = give_to_pool,
    .clear = clear,
    .flip = flip,
};
