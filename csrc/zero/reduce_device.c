/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions between GPUs of one host (on_device.h): buckets lie in memory that all ranks map, and one kernel adds the
 * shards of all of them in rank order, in fp32 with one rounding, as reduce_shm.c does. Hosts exchange descriptors, and
 * which parameters have a gradient. They never wait for a GPU.
 *
 *   post        this rank's descriptor, once the stream's signal that its bucket is written is enqueued
 *   add         all descriptors are there: enqueue the sum of this rank's shard
 *   post_shard, copy   stage 0: all ranks have enqueued their sums: enqueue the copies of the others
 *
 * Stages 2 and 3: buckets come from an arena of bucket_bytes. A bucket that is given back may still be read by streams;
 * the compute stream waits for those before the place is filled again. Where gradients are held back (accumulation)
 * the arena is soon full. Then a unit collects in memory of its own, and its gradient is copied to one place behind the
 * arena when it goes out.
 *
 * Where NCCL moves the bytes, buckets are memory of this rank alone, and by_nccl.c has the rounds.
 */
#include "on_device.h"

#include <string.h>

#include "../comm/stream_sum.h"
#include "grad_path.h"
#include "grad_store.h"
#include "internal.h"

/* --- memory of buckets -------------------------------------------------------------------------------------------- */

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static zpp_status check_unit(const struct zpp_unit *unit, struct zpp_err *err) {
    const zpp_dtype dtype = unit->grad_dtype;
    if (dtype == ZPP_F32 || dtype == ZPP_BF16 || dtype == ZPP_F16 || dtype == ZPP_F64) return ZPP_OK;
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "zero: not supported yet: gradients of unit %s add in %s between GPUs; wanted float32, bfloat16, "
                    "float16 or float64",
                    unit->name, zpp_dtype_name(unit->grad_dtype));
}

/* Places of flags in the host's region. */
static zpp_status lay_out_flags(zpp_zero *zero, size_t *flags_bytes, size_t *largest_bytes, struct zpp_err *err) {
    for (int at = 0; at < zero->order_count; at++) {
        const struct zpp_unit *unit = zero->units[zero->order[at]];
        const zpp_status status = check_unit(unit, err);
        if (status != ZPP_OK) return status;
        unit->grad->flags_offset_bytes = *flags_bytes;
        *flags_bytes += unit->params;
        *largest_bytes = larger(*largest_bytes, unit->grad->bucket_bytes);
    }
    *flags_bytes = zpp_round_up(*flags_bytes, ZPP_BUCKET_ALIGN_BYTES);
    return ZPP_OK;
}

/* NCCL: behind the buckets, every rank's shard of one bucket as it came, and zeros in the place of one shard. They are
 * read by streams in order, so there is one of each. */
static zpp_status make_own_buckets(zpp_zero *zero, size_t bytes, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    size_t received_bytes = 0, zeros_bytes = 0;
    for (int at = 0; at < zero->order_count; at++) {
        const struct zpp_unit *unit = zero->units[zero->order[at]];
        zeros_bytes = larger(zeros_bytes, zpp_device_stride(zero, unit));
        received_bytes = larger(received_bytes, zpp_device_stride(zero, unit) * (size_t)unit->group->ranks);
    }
    void *memory = NULL;
    const size_t all_bytes = bytes + received_bytes + zeros_bytes;
    const zpp_status status = zpp_device_alloc(zero->options.device, all_bytes, &memory, err);
    if (status != ZPP_OK) return status;
    on->buckets = memory;
    on->buckets_bytes = all_bytes;
    zero->by_nccl.received = on->buckets + bytes;
    zero->by_nccl.zeros = zero->by_nccl.received + received_bytes;
    zero->buckets.touched_bytes += received_bytes + zeros_bytes;
    return zpp_stream_fill(zero->compute, zero->by_nccl.received + received_bytes, 0, zeros_bytes, err);
}

static zpp_status make_buckets(zpp_zero *zero, size_t mappings_bytes, size_t board_bytes, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    size_t flags_bytes = 0, largest_bytes = 0, arena_bytes = 0, bytes = mappings_bytes;
    zpp_status status = lay_out_flags(zero, &flags_bytes, &largest_bytes, err);
    if (status != ZPP_OK) return status;
    if (!zpp_keeps_buckets(zero)) {
        const size_t bound = zero->options.bucket_bytes ? zero->options.bucket_bytes : mappings_bytes;
        arena_bytes = smaller(mappings_bytes, larger(bound, largest_bytes));
        arena_bytes = zpp_round_up(arena_bytes, ZPP_BUCKET_ALIGN_BYTES);
        on->sending_offset_bytes = arena_bytes;
        bytes = arena_bytes + largest_bytes;
    }
    if (!zpp_buckets_init(&zero->buckets, (size_t)zero->order_count, arena_bytes))
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the buckets of %d units", zero->order_count);
    if (!zpp_keeps_buckets(zero)) zero->buckets.touched_bytes = bytes;
    status = zpp_exchange_init(zero, flags_bytes, board_bytes, err);
    if (status == ZPP_OK)
        status =
            zpp_region_create(zero->options.comm, ZPP_REGION_PER_RANK, flags_bytes + board_bytes, &zero->grads, err);
    if (status != ZPP_OK) return status;
    if (zpp_zero_by_nccl(zero)) return make_own_buckets(zero, bytes, err);
    return zpp_device_region_create(zero->options.comm, zero->options.device, bytes, &on->grads, err);
}

/* NCCL: of this rank alone. */
static unsigned char *part_of(const zpp_zero *zero, int rank) {
    const struct zpp_on_device *on = zero->on_device;
    return zpp_zero_by_nccl(zero) ? on->buckets : zpp_device_region_base(on->grads, rank);
}

static unsigned char *memory_of(const zpp_zero *zero, const struct zpp_unit *unit) {
    const struct zpp_unit_grad *grad = unit->grad;
    if (grad->bucket_offset_bytes == ZPP_BUCKET_NONE) return NULL;
    if (grad->at_mapping && !zpp_keeps_buckets(zero)) return grad->own;
    return part_of(zero, zero->rank) + grad->bucket_offset_bytes;
}

static uint8_t *flags_of(const zpp_zero *zero, const struct zpp_unit_grad *grad, int rank) {
    return (uint8_t *)zpp_region_base(zero->grads, rank) + grad->flags_offset_bytes;
}

static uint8_t *flags(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return flags_of(zero, grad, zero->rank);
}

/* From the first time that the arena is full until the end: to free it would wait for the GPU. */
static zpp_status make_own(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    grad->mapping_offset_bytes = zero->on_device->sending_offset_bytes;
    if (grad->own) return ZPP_OK;
    const zpp_status status = zpp_device_alloc(zero->options.device, zpp_grad_whole_bytes(grad), &grad->own, err);
    if (status != ZPP_OK) return status;
    zero->buckets.touched_bytes += zpp_grad_whole_bytes(grad);
    return ZPP_OK;
}

static void drop_unit(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (grad->own) zpp_device_free(zero->options.device, grad->own, zpp_grad_whole_bytes(grad));
    grad->own = NULL;
}

/* --- gradients come, and go out ----------------------------------------------------------------------------------- */

static zpp_status add_gradient(zpp_zero *zero, void *to, const void *from, size_t elems, zpp_dtype dtype,
                               struct zpp_err *err) {
    const struct zpp_sum_op sum = {.dst = to,
                                   .src = &from,
                                   .sources = 1,
                                   .elems = elems,
                                   .scale = 1.0,
                                   .dtype = dtype,
                                   .dst_dtype = dtype,
                                   .accumulate = true,
                                   .halt = zero->on_device->halt};
    return zpp_stream_sum(zero->compute, &sum, err);
}

static enum zpp_counter last_of(const zpp_zero *zero) {
    return zero->options.stage == 0 ? ZPP_COUNTER_COPIED : ZPP_COUNTER_TAKEN;
}

static bool settled(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    const struct zpp_on_device *on = zero->on_device;
    return grad->number <= on->settled || zpp_counters_reached(on->counters, last_of(zero), grad->number);
}

static zpp_status settle(zpp_zero *zero, const struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    if (settled(zero, grad)) return ZPP_OK;
    const zpp_status status = zpp_counters_await(on->counters, zero->compute, last_of(zero), grad->number, err);
    if (status == ZPP_OK) on->settled = grad->number;
    return status;
}

static bool sends_own(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return grad->at_mapping && !zpp_keeps_buckets(zero);
}

/* The place to send from has one bucket at a time. */
static zpp_status prepare(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    struct zpp_unit_grad *sent = zero->on_device->sent;
    if (!sent || !sends_own(zero, grad)) return ZPP_OK;
    return zpp_bucket_wait_idle(zero, sent, wait, err);
}

size_t zpp_device_stride(const zpp_zero *zero, const struct zpp_unit *unit) {
    const size_t stride = zpp_wire_device_stride(zero, unit);
    return stride ? stride : zpp_grad_shard_bytes(unit->grad);
}

unsigned char *zpp_device_place(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    const size_t offset_bytes =
        sends_own(zero, grad) ? zero->on_device->sending_offset_bytes : grad->bucket_offset_bytes;
    return part_of(zero, zero->rank) + offset_bytes + grad->area_offset_bytes;
}

/* The place is the bucket, or the one to send from; in it, the area if there is one. */
zpp_status zpp_device_put(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const bool own = sends_own(zero, grad);
    unsigned char *place = zpp_device_place(zero, grad);
    if (own) zero->on_device->sent = grad;
    if (grad->area_offset_bytes)
        return zpp_wire_device_pack(zero, grad->unit, memory_of(zero, grad->unit), place, err);
    return own ? zpp_stream_copy(zero->compute, place, grad->own, zpp_grad_whole_bytes(grad), err) : ZPP_OK;
}

static zpp_status send(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    const zpp_status status = grad->empty ? ZPP_OK : zpp_device_put(zero, grad, err);
    grad->number = ++on->reductions;
    if (status != ZPP_OK) return status;
    return zpp_counters_signal(on->counters, zero->compute, ZPP_COUNTER_WRITTEN, grad->number, err);
}

/* --- the rounds of a reduction: each returns OK when it is over; AGAIN leaves the reduction in it ------------------
 */

static zpp_status post(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_desc desc = zpp_reduce_desc(grad, ZPP_DESC_REDUCE);
    return zpp_desc_ring_post(zero->ring, &desc, wait, &grad->seq, err);
}

/* Note which parameters have a gradient on any member of the unit's group. Return the number of buckets, and this
 * rank's shard in each. */
static int collect_sources(zpp_zero *zero, struct zpp_unit_grad *grad, const void **sources) {
    const struct zpp_group *group = grad->unit->group;
    const size_t stride = zpp_device_stride(zero, grad->unit);
    int count = 0;
    for (int at = 0; at < group->ranks; at++) {
        const int rank = group->members[at];
        if (grad->peer_offsets[at] == ZPP_NO_BUCKET) continue;
        const uint8_t *touched = flags_of(zero, grad, rank);
        for (size_t i = 0; i < grad->unit->params; i++) grad->present[i] |= touched[i];
        sources[count++] =
            part_of(zero, rank) + grad->peer_offsets[at] + grad->area_offset_bytes + (size_t)group->rank * stride;
    }
    return count;
}

zpp_status zpp_device_add(zpp_zero *zero, struct zpp_unit_grad *grad, const void *const *sources, int count,
                          struct zpp_err *err) {
    const struct zpp_unit *unit = grad->unit;
    struct zpp_on_device *on = zero->on_device;
    const void *carry = grad->carry;
    zpp_status status = zero->store->acquire ? zero->store->acquire(zero, grad, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    unsigned char *to = grad->shard;
    if (zero->options.stage == 0) to += (size_t)unit->group->rank * zpp_grad_shard_bytes(grad);
    struct zpp_sum_op sum = {.dst = to,
                             .src = sources,
                             .sources = count,
                             .elems = unit->shard_elems,
                             .scale = zpp_grad_factor(zero, unit, unit->group->divisor),
                             .dtype = unit->grad_dtype,
                             .dst_dtype = unit->grad_dtype,
                             .accumulate = zpp_reduce_accumulates(zero, grad),
                             .halt = zero->on_device->halt};
    if (grad->area_offset_bytes) status = zpp_wire_device_sum(zero, unit, &sum, err);
    else status = zpp_stream_sum(on->sums, &sum, err);
    if (status == ZPP_OK && grad->carries) {
        sum.dtype = unit->grad_dtype;
        sum.src = &carry;
        sum.sources = 1;
        sum.scale = 1.0;
        sum.accumulate = true;
        status = zpp_stream_sum(on->sums, &sum, err);
    }
    return status;
}

/* As add_shards of reduce_shm.c. On the CPU the sum also finds whose gradient was not finite; here nobody is named. */
static zpp_status add_shards(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const void *sources[ZPP_RANKS_MAX];
    const int count = collect_sources(zero, grad, sources);
    if (count == 0) return ZPP_OK;
    const zpp_status status = zpp_device_add(zero, grad, sources, count, err);
    zpp_origin_note(zero, grad, 0);
    grad->has = grad->changed = true;
    zpp_reduce_count_traffic(zero, grad);
    return status;
}

/* The members have posted their descriptors, and so have enqueued their signals. */
static zpp_status await_members(zpp_zero *zero, const struct zpp_unit_grad *grad, enum zpp_counter word,
                                struct zpp_err *err) {
    const struct zpp_group *group = grad->unit->group;
    return zpp_counters_await_some(zero->on_device->counters, zero->on_device->sums, word, grad->number, group->members,
                                   group->ranks, err);
}

static zpp_status add(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    zpp_status status = zpp_reduce_read_peers(zero, grad, zero->ring, ZPP_DESC_REDUCE, grad->seq, wait, err);
    if (status == ZPP_OK && zero->store->load_wait) status = zero->store->load_wait(zero, grad, wait);
    if (status == ZPP_OK) status = await_members(zero, grad, ZPP_COUNTER_WRITTEN, err);
    if (status == ZPP_OK) status = add_shards(zero, grad, err);
    if (status == ZPP_OK) status = zpp_counters_signal(on->counters, on->sums, ZPP_COUNTER_TAKEN, grad->number, err);
    if (status != ZPP_OK) return status;
    zpp_desc_ring_ack(zero->ring, grad->seq);
    return zero->store->complete ? zero->store->complete(zero, grad, err) : ZPP_OK;
}

static zpp_status post_shard(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                             struct zpp_err *err) {
    const struct zpp_desc desc = zpp_reduce_desc(grad, ZPP_DESC_COPY);
    return zero->copy_ring ? zpp_desc_ring_post(zero->copy_ring, &desc, wait, &grad->copy_seq, err) : ZPP_OK;
}

/* Stage 0: rank r has made shard r, so no rank reads shard r of this bucket any more, and it may be overwritten. */
static zpp_status copy_shards(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    const struct zpp_group *group = grad->unit->group;
    uint64_t copied_bytes = 0;
    zpp_status status = ZPP_OK;
    for (int at = 0; at < group->ranks && grad->has && status == ZPP_OK; at++) {
        const size_t offset = (size_t)at * bytes;
        if (at == group->rank) continue;
        status = zpp_stream_copy(zero->on_device->sums, grad->shard + offset,
                                 part_of(zero, group->members[at]) + grad->mapping_offset_bytes + offset, bytes, err);
        copied_bytes += bytes;
    }
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_REDUCE, copied_bytes);
    return status;
}

static zpp_status copy(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    if (!zero->copy_ring) return ZPP_OK;
    zpp_status status = zpp_reduce_read_peers(zero, grad, zero->copy_ring, ZPP_DESC_COPY, grad->copy_seq, wait, err);
    if (status == ZPP_OK) status = await_members(zero, grad, ZPP_COUNTER_TAKEN, err);
    if (status == ZPP_OK) status = copy_shards(zero, grad, err);
    if (status == ZPP_OK) status = zpp_counters_signal(on->counters, on->sums, ZPP_COUNTER_COPIED, grad->number, err);
    if (status == ZPP_OK) zpp_desc_ring_ack(zero->copy_ring, grad->copy_seq);
    return status;
}

static const zpp_reduce_round rounds[] = {post, add, post_shard, copy, NULL};

static zpp_status reduce(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    return zpp_reduce_run_rounds(rounds, *(struct zpp_unit_grad **)arg, wait, err);
}

/* At stage 0 p.grad is a view of where the peers copy this rank's shards from, and the caller may change it: whatever
 * does so comes after their copies. */
static zpp_status finish(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    zpp_status status = zpp_event_record(on->summed, on->sums, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->compute, on->summed, NULL, err);
    if (status != ZPP_OK || !zero->copy_ring) return status;
    return settle(zero, zero->units[zero->order[zero->order_count - 1]]->grad, err);
}

/* create, and destroy; one rank reduces nothing. */
static zpp_status open_streams(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    if (zero->ranks == 1) return ZPP_OK;
    const zpp_status status = zpp_stream_create(zero->options.device, ZPP_STREAM_THREAD, "sums", &on->sums, err);
    return status == ZPP_OK ? zpp_event_create(zero->options.device, &on->summed, err) : status;
}

static void close_streams(zpp_zero *zero) {
    if (!zero->on_device) return;
    zpp_stream_destroy(zero->on_device->sums);
    zpp_event_destroy(zero->on_device->summed);
}

const struct zpp_grad_path zpp_grad_path_device = {
    .name = "device",
    .seal = open_streams,
    .fini = close_streams,
    .memory = memory_of,
    .add = add_gradient,
    .send = send,
    .area_bytes = zpp_wire_device_bytes,
    .make_buckets = make_buckets,
    .drop_unit = drop_unit,
    .flags = flags,
    .make_own = make_own,
    .settled = settled,
    .settle = settle,
    .prepare = prepare,
    .reduce = reduce,
    .finish = finish,
    .keeps_carry = true,
};

/* --- reduced gradients: a store (grad_store.h) -------------------------------------------------------------------- */

/* On the compute stream: a later sum comes after it, because it waits for this rank's `written`, too. */
static void clear(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param) {
    const struct zpp_unit *unit = grad->unit;
    struct zpp_err ignored = ZPP_ERR_INIT; /* the stream keeps it */
    const size_t begin_elems = (size_t)unit->group->rank * unit->shard_elems;
    const size_t end_elems = begin_elems + unit->shard_elems;
    const size_t first = larger(unit->offset_elems[param], begin_elems);
    const size_t end = smaller(unit->offset_elems[param] + unit->param_elems[param], end_elems);
    if (!grad->shard || zero->options.stage == 0 || first >= end) return;
    (void)zpp_stream_fill(zero->compute, grad->shard + (first - begin_elems) * grad->elem_bytes, 0,
                          (end - first) * grad->elem_bytes, &ignored);
}

static zpp_status add_in_bucket(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    (void)err;
    grad->shard = part_of(zero, zero->rank) + grad->mapping_offset_bytes;
    if (zero->options.stage > 0) grad->shard += (size_t)grad->unit->group->rank * zpp_grad_shard_bytes(grad);
    return ZPP_OK;
}

static zpp_status add_memory(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    void *memory = NULL;
    if (zpp_keeps_buckets(zero)) return add_in_bucket(zero, grad, err);
    const zpp_status status = zpp_device_alloc(zero->options.device, bytes, &memory, err);
    if (status != ZPP_OK) return status;
    grad->shard = memory;
    zero->shard_bytes += bytes;
    return ZPP_OK;
}

static void free_memory(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (grad->shard && !zpp_keeps_buckets(zero))
        zpp_device_free(zero->options.device, grad->shard, zpp_grad_shard_bytes(grad));
    grad->shard = NULL;
}

/* --- the same, for a step inside the backward --------------------------------------------------------------------- */

/* A shard lives from its unit's sum until its step, and then the next one may have its memory: both are on the stream
 * of the sums, and so in order. Each place holds any shard. Nothing is freed before the end: that would wait for the
 * GPU. */

static zpp_status add_place(zpp_zero *zero, struct zpp_device_grad **out, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    size_t bytes = 0;
    for (int at = 0; at < zero->order_count; at++)
        bytes = larger(bytes, zpp_grad_shard_bytes(zero->units[zero->order[at]]->grad));
    struct zpp_device_grad *all = zpp_array_reserve(on->pool, (size_t)on->pool_count, &on->pool_capacity, sizeof *all);
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for a list of %d gradients", on->pool_count);
    on->pool = all;
    void *memory = NULL;
    const zpp_status status = zpp_device_alloc(zero->options.device, bytes, &memory, err);
    if (status != ZPP_OK) return status;
    all[on->pool_count] = (struct zpp_device_grad){memory, bytes, false};
    *out = &all[on->pool_count++];
    zero->shard_bytes += bytes;
    return ZPP_OK;
}

/* Two places, or one for one unit, before anything waits for them. */
static zpp_status make_pool(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_device_grad *ignored;
    zpp_status status = ZPP_OK;
    for (int i = 0; i < ZPP_POOLED_GRADS && i < zero->order_count && status == ZPP_OK; i++)
        status = add_place(zero, &ignored, err);
    return status;
}

static zpp_status acquire_pooled(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    struct zpp_device_grad *place = NULL;
    if (grad->shard) return ZPP_OK;
    for (int i = 0; i < on->pool_count && !place; i++)
        if (!on->pool[i].used) place = &on->pool[i];
    const zpp_status status = place ? ZPP_OK : add_place(zero, &place, err);
    if (status != ZPP_OK) return status;
    place->used = true;
    on->pool_used++;
    grad->shard = place->memory;
    return ZPP_OK;
}

/* A sum that nobody waits for leaves its unit alone until a step gives memory back. */
static zpp_status await_place(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait) {
    return wait || grad->shard || zero->on_device->pool_used < ZPP_POOLED_GRADS ? ZPP_OK : ZPP_AGAIN;
}

static zpp_status give_place(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    (void)err;
    for (int i = 0; i < on->pool_count && grad->shard; i++)
        if (on->pool[i].memory == grad->shard) on->pool[i].used = false;
    on->pool_used -= grad->shard != NULL;
    grad->shard = NULL;
    return ZPP_OK;
}

/* The first unit that goes takes the pool with it. */
static void free_pool(zpp_zero *zero, struct zpp_unit_grad *grad) {
    struct zpp_on_device *on = zero->on_device;
    grad->shard = NULL;
    for (int i = 0; on && i < on->pool_count; i++)
        zpp_device_free(zero->options.device, on->pool[i].memory, on->pool[i].bytes);
    if (on) on->pool_count = on->pool_used = 0;
}

const struct zpp_grad_store zpp_grad_store_device_pooled = {
    .name = "device_pooled",
    .seal = make_pool,
    .free = free_pool,
    .count_memory = zpp_grad_memory_count,
    .load_wait = await_place,
    .acquire = acquire_pooled,
    .drop = give_place,
    .clear = clear,
};

const struct zpp_grad_store zpp_grad_store_device = {
    .name = "device",
    .add = add_memory,
    .free = free_memory,
    .count_memory = zpp_grad_memory_count,
    .clear = clear,
};
