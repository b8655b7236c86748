/* SPDX-License-Identifier: Apache-2.0
 *
 * Places of buckets: first fit over a sorted array, because only a handful of buckets live at a time. Then the buckets
 * of units: taken when the first gradient comes, listed when they go out, and given back when every peer has read them.
 */
#include "reduce.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "grad_path.h"
#include "internal.h"

static const uint64_t LINGER_NS = 100000000;

/* --- places ------------------------------------------------------------------------------------------------------- */

bool zpp_buckets_init(struct zpp_buckets *buckets, size_t units, size_t capacity_bytes) {
    *buckets = (struct zpp_buckets){ .spans_capacity = units, .capacity_bytes = capacity_bytes };
    buckets->used = calloc(units ? units : 1, sizeof *buckets->used);
    return buckets->used != NULL;
}

void zpp_buckets_fini(struct zpp_buckets *buckets) {
    free(buckets->used);
    buckets->used = NULL;
}

/* `bytes` is a multiple of ZPP_BUCKET_ALIGN_BYTES. Return the offset, or ZPP_BUCKET_NONE where nothing fits. */
static size_t take_span(struct zpp_buckets *buckets, size_t bytes) {
    assert(buckets->count < buckets->spans_capacity);
    size_t at = 0, index = 0;
    while (index < buckets->count && buckets->used[index].offset_bytes - at < bytes) {
        at = buckets->used[index].offset_bytes + buckets->used[index].bytes;
        index++;
    }
    if (at + bytes > buckets->capacity_bytes) return ZPP_BUCKET_NONE;
    memmove(&buckets->used[index + 1], &buckets->used[index], (buckets->count - index) * sizeof *buckets->used);
    buckets->used[index] = (struct zpp_bucket_span){ at, bytes };
    buckets->count++;
    buckets->used_bytes += bytes;
    if (buckets->used_bytes > buckets->peak_bytes) buckets->peak_bytes = buckets->used_bytes;
    if (at + bytes > buckets->touched_bytes) buckets->touched_bytes = at + bytes;
    return at;
}

static void give_span(struct zpp_buckets *buckets, size_t offset_bytes) {
    size_t index = 0;
    while (index < buckets->count && buckets->used[index].offset_bytes != offset_bytes) index++;
    assert(index < buckets->count);
    buckets->used_bytes -= buckets->used[index].bytes;
    buckets->count--;
    memmove(&buckets->used[index], &buckets->used[index + 1], (buckets->count - index) * sizeof *buckets->used);
}

/* --- buckets of units --------------------------------------------------------------------------------------------- */

unsigned char *zpp_bucket_of(const zpp_zero *zero, const struct zpp_unit *unit) {
    if (unit->grad->bucket_offset_bytes == ZPP_BUCKET_NONE) return NULL;
    return zpp_grads_of_rank(zero, zero->rank) + unit->grad->bucket_offset_bytes;
}

uint8_t *zpp_bucket_flags(const zpp_zero *zero, const struct zpp_unit *unit) {
    if (zero->path->flags) return zero->path->flags(zero, unit->grad);
    return zpp_bucket_of(zero, unit) + zpp_grad_whole_bytes(unit->grad);
}

/* True if no host reads the unit's bucket any more, or has still to enqueue what reads it. */
static bool is_enqueued(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    if (zpp_event_sync(grad->done, NULL, NULL) != ZPP_OK) return false;
    if (!zero->ring) return true; /* over several hosts the collective is finished, so no rank reads it */
    return zpp_desc_ring_acked(zero->ring) >= grad->seq &&
           (!zero->copy_ring || zpp_desc_ring_acked(zero->copy_ring) >= grad->copy_seq);
}

/* True if no rank reads the unit's bucket any more. */
static bool is_idle(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return is_enqueued(zero, grad) && (!zero->path->settled || zero->path->settled(zero, grad));
}

void zpp_bucket_give(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (zero->path->give) zero->path->give(zero, grad);
    if (!grad->at_mapping && !zpp_keeps_buckets(zero)) give_span(&zero->buckets, grad->bucket_offset_bytes);
    grad->bucket_offset_bytes = ZPP_BUCKET_NONE;
}

void zpp_bucket_list(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (grad->listed || grad->bucket_offset_bytes == ZPP_BUCKET_NONE || zpp_keeps_buckets(zero)) return;
    grad->listed = true;
    grad->next_out = NULL;
    *zero->out_last = grad;
    zero->out_last = &grad->next_out;
}

static void unlist_bucket(zpp_zero *zero, struct zpp_unit_grad *grad) {
    struct zpp_unit_grad **at = &zero->out_first;
    if (!grad->listed) return;
    while (*at != grad) at = &(*at)->next_out; /* almost always the first */
    *at = grad->next_out;
    if (!*at) zero->out_last = at;
    grad->listed = false;
}

/* Buckets go out in one order and come back in it, so those behind the oldest need not be asked. */
struct zpp_unit_grad *zpp_bucket_sweep(zpp_zero *zero) {
    while (zero->out_first && is_idle(zero, zero->out_first)) {
        struct zpp_unit_grad *grad = zero->out_first;
        unlist_bucket(zero, grad);
        zpp_bucket_give(zero, grad);
    }
    return zero->out_first;
}

static zpp_status await_acks(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    struct zpp_unit_grad *grad = *(struct zpp_unit_grad **)arg;
    zpp_zero *zero = grad->zero;
    zpp_status status = zpp_desc_ring_wait_acked(zero->ring, grad->seq, wait, err);
    if (status == ZPP_OK && zero->copy_ring) status = zpp_desc_ring_wait_acked(zero->copy_ring, grad->copy_seq, wait,
                                                                               err);
    return status;
}

/* The descriptor rings belong to the reduce stream, so it is that stream which waits for the peers. */
static zpp_status wait_enqueued(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                                struct zpp_err *err) {
    zpp_status status = zpp_event_sync(grad->done, wait, err);
    if (status != ZPP_OK || is_enqueued(zero, grad)) return status;
    if (!wait) return ZPP_AGAIN;
    status = zpp_stream_launch(zero->reduce, await_acks, &grad, sizeof(struct zpp_unit_grad *), err);
    if (status == ZPP_OK) status = zpp_event_record(zero->acked, zero->reduce, err);
    if (status == ZPP_OK) status = zpp_event_sync(zero->acked, wait, err);
    return status;
}

zpp_status zpp_bucket_wait_idle(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                                struct zpp_err *err) {
    const zpp_status status = wait_enqueued(zero, grad, wait, err);
    return status == ZPP_OK && zero->path->settle ? zero->path->settle(zero, grad, err) : status;
}

/* Copy the shard to the carry, on a stream of the device where it lies. */
static zpp_status copy_to_carry(zpp_zero *zero, const struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    if (zero->path->keeps_carry) return zpp_stream_copy(zero->compute, grad->carry, grad->shard, bytes, err);
    memcpy(grad->carry, grad->shard, bytes);
    return ZPP_OK;
}

/* Stage 1, second backward of a step: the bucket is about to be refilled, and its own shard is the gradient so far. */
static zpp_status save_carry(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    void *memory = grad->carry;
    if (zero->options.stage != 1 || !grad->has || grad->carries) return ZPP_OK;
    const zpp_status status = memory ? ZPP_OK : zpp_device_alloc(zpp_zero_shards_device(zero), bytes, &memory, err);
    if (status != ZPP_OK) return status;
    if (!grad->carry) zero->carry_bytes += bytes;
    grad->carry = memory;
    grad->carries = true;
    return copy_to_carry(zero, grad, err);
}

void zpp_bucket_drop_carry(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (!grad->carry) return;
    zpp_device_free(zpp_zero_shards_device(zero), grad->carry, zpp_grad_shard_bytes(grad));
    zero->carry_bytes -= zpp_grad_shard_bytes(grad);
    grad->carry = NULL;
}

/* The bound is kept by waiting for slower ranks. Where several coordinators are in one backward, a peer may wait in
 * another one of them for this rank, for ever: a bucket more is better than that. Every unit has a mapping, or gets
 * memory of its own, so there is always a place. The stream is asked and not waited for: an operation that is late
 * would end it. */
static zpp_status linger(zpp_zero *zero, struct zpp_unit_grad *oldest, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    const uint64_t until_ns = zpp_now_ns() + LINGER_NS;
    if (!wait) return ZPP_AGAIN;
    while (!is_enqueued(zero, oldest)) {
        const struct timespec pause = { 0, 50000 };
        zero->may_sum = true;
        const zpp_status status = zpp_stream_poll(zero->reduce, err);
        if (status != ZPP_OK && status != ZPP_AGAIN) return status;
        zero->over_bound = zpp_now_ns() >= until_ns;
        if (zero->over_bound) return ZPP_OK;
        (void)nanosleep(&pause, NULL);
    }
    return zero->path->settle ? zero->path->settle(zero, oldest, err) : ZPP_OK;
}

static zpp_status await_oldest(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_unit_grad *oldest = zero->out_first;
    return zero->shares_backward ? linger(zero, oldest, wait, err) : zpp_bucket_wait_idle(zero, oldest, wait, err);
}

/* Keep what is in buckets within bucket_bytes, `bytes` more included. */
static zpp_status stay_in_bound(zpp_zero *zero, size_t bytes, const struct zpp_wait *wait, struct zpp_err *err) {
    const size_t bound = zero->options.bucket_bytes;
    struct zpp_unit_grad *oldest = zpp_bucket_sweep(zero);
    while (bound && oldest && !zero->over_bound && zero->buckets.used_bytes + bytes > bound) {
        const zpp_status status = await_oldest(zero, wait, err);
        if (status != ZPP_OK) return status;
        oldest = zpp_bucket_sweep(zero);
    }
    return ZPP_OK;
}

/* *offset: ZPP_BUCKET_NONE where the arena has no place. Without mappings, buckets that went out are waited for before
 * the unit gets memory of its own. */
static zpp_status find_place(zpp_zero *zero, struct zpp_unit_grad *grad, size_t *offset, const struct zpp_wait *wait,
                             struct zpp_err *err) {
    *offset = ZPP_BUCKET_NONE;
    if (zpp_keeps_buckets(zero)) return ZPP_OK;
    *offset = take_span(&zero->buckets, grad->bucket_bytes);
    if (!zero->path->make_own) return ZPP_OK;
    while (*offset == ZPP_BUCKET_NONE && zero->out_first && !zero->over_bound) {
        const zpp_status status = await_oldest(zero, wait, err);
        if (status != ZPP_OK) return status;
        (void)zpp_bucket_sweep(zero);
        *offset = take_span(&zero->buckets, grad->bucket_bytes);
    }
    return *offset == ZPP_BUCKET_NONE ? zero->path->make_own(zero, grad, err) : ZPP_OK;
}

zpp_status zpp_bucket_take(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_unit_grad *grad = unit->grad;
    zpp_status status = zpp_bucket_wait_idle(zero, grad, wait, err); /* the bucket of the backward before */
    if (status == ZPP_OK) status = save_carry(zero, grad, err);
    if (status != ZPP_OK) return status;
    if (grad->listed) {
        unlist_bucket(zero, grad);
        zpp_bucket_give(zero, grad);
    }
    status = stay_in_bound(zero, grad->bucket_bytes, wait, err);
    size_t offset = ZPP_BUCKET_NONE;
    if (status == ZPP_OK) status = find_place(zero, grad, &offset, wait, err);
    if (status != ZPP_OK) return status;
    grad->at_mapping = offset == ZPP_BUCKET_NONE;
    grad->bucket_offset_bytes = grad->at_mapping ? grad->mapping_offset_bytes : offset;
    if (zero->options.stage == 0 && grad->touched_params) return ZPP_OK; /* p.grad lives here: what was touched stays */
    memset(zpp_bucket_flags(zero, unit), 0, unit->params);
    grad->touched_params = 0;
    return zero->path->take ? zero->path->take(zero, grad, err) : ZPP_OK;
}

void zpp_bucket_add_carry(const struct zpp_unit_grad *grad, unsigned char *to) {
    const struct zpp_unit *unit = grad->unit;
    const void *carry = grad->carry;
    if (grad->carries)
        zpp_reduce_sources(to, unit->grad_dtype, true, &carry, 1, unit->grad_dtype, unit->shard_elems, 1.0f);
}
