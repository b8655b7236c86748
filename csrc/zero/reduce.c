/* SPDX-License-Identifier: Apache-2.0
 *
 * Buckets, their fixed order, and the reduction. See reduce.h.
 *
 * A reduction is one operation on the reduce stream that remembers how far it came (`round`), because on cpu it is
 * asked again and again until the slowest rank has posted. The descriptor rings' descriptors carry unit, pass and
 * length: where ranks disagree, nothing is added and both hear both sides.
 */
#include "reduce.h"

#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "internode.h"
#include "origin.h"

enum { ROUND_PACK, ROUND_POST, ROUND_TAKE, ROUND_ADD, ROUND_POST_SHARD, ROUND_COPY, ROUND_DONE };
#define NO_BUCKET UINT64_MAX
static const uint64_t LINGER_NS = 100000000;

static size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static bool keeps_buckets(const zpp_zero *zero) {
    return zero->options.stage <= 1;
}

/* --- creation ----------------------------------------------------------------------------------------------------- */

zpp_status zpp_reduce_add_unit(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_unit_grad *grad = calloc(1, sizeof *grad);
    if (!grad) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the gradients of unit %s", unit->name);
    unit->grad = grad;
    grad->unit = unit;
    grad->zero = zero;
    grad->elem_bytes = zpp_dtype_bytes(unit->grad_dtype);
    grad->bucket_bytes = round_up(zpp_grad_whole_bytes(grad) + unit->params, ZPP_BUCKET_ALIGN_BYTES);
    grad->bucket_offset_bytes = ZPP_BUCKET_NONE;
    grad->missing = unit->params;
    const size_t room = unit->params ? unit->params : 1;
    grad->seen = calloc(room, 1);
    grad->present = calloc(room, 1);
    grad->stale = calloc(room, 1);
    grad->peer_offsets = calloc((size_t)zero->ranks, sizeof *grad->peer_offsets);
    if (!grad->seen || !grad->present || !grad->stale || !grad->peer_offsets)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the gradients of unit %s", unit->name);
    zpp_status status = zpp_event_create(zero->options.device, &grad->written, err);
    if (status == ZPP_OK) status = zpp_event_create(zero->options.device, &grad->done, err);
    return status;
}

void zpp_reduce_drop_unit(zpp_zero *zero, struct zpp_unit *unit) {
    struct zpp_unit_grad *grad = unit->grad;
    if (!grad) return;
    zpp_internode_drop(zero->options.comm, &grad->internode_flags);
    zpp_internode_drop(zero->options.comm, &grad->internode_sum);
    free(grad->internode_memory);
    if (!keeps_buckets(zero) && grad->shard && !zero->grad_file.unit_file)
        zpp_device_free(zero->options.device, grad->shard, zpp_grad_shard_bytes(grad));
    if (grad->back_shard && !zero->grad_file.unit_file)
        zpp_device_free(zero->options.device, grad->back_shard, zpp_grad_shard_bytes(grad));
    free(grad->carry);
    zpp_event_destroy(grad->written);
    zpp_event_destroy(grad->done);
    free(grad->seen);
    free(grad->present);
    free(grad->stale);
    free(grad->peer_offsets);
    free(grad);
    unit->grad = NULL;
}

/* The arena, then a mapping for each unit, also for those that sleep: addresses cost nothing until they are written to.
 * Stages 0 and 1 live in the homes. */
static zpp_status make_buckets(zpp_zero *zero, struct zpp_err *err) {
    size_t arena_bytes = 0, homes_bytes = 0;
    for (int at = 0; at < zero->order_count; at++) {
        const struct zpp_unit *unit = zero->units[zero->order[at]];
        unit->grad->mapping_offset_bytes = homes_bytes;
        homes_bytes += unit->grad->bucket_bytes;
        if (keeps_buckets(zero) && unit->trainable) zero->kept_bucket_bytes += unit->grad->bucket_bytes;
    }
    if (!keeps_buckets(zero)) arena_bytes = round_up(homes_bytes, ZPP_PAGE_BYTES);
    for (int at = 0; at < zero->order_count; at++)
        zero->units[zero->order[at]]->grad->mapping_offset_bytes += arena_bytes;
    if (!zpp_buckets_init(&zero->buckets, (size_t)zero->order_count, arena_bytes))
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the buckets of %d units", zero->order_count);
    /* Behind them, the board of exchange.h: a norm, the name of its worst element and whose it was for each unit. */
    const size_t board_bytes = round_up(24 * ((size_t)zero->units_count + 1), ZPP_BUCKET_ALIGN_BYTES);
    const zpp_status status = zpp_exchange_init(zero, arena_bytes + homes_bytes, board_bytes, err);
    if (status != ZPP_OK) return status;
    return zpp_region_create(zero->options.comm, ZPP_REGION_PER_RANK, arena_bytes + homes_bytes + board_bytes,
                             &zero->grads, err);
}

zpp_status zpp_reduce_make_shard(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    if (!keeps_buckets(zero)) return zero->pools_grads ? ZPP_OK /* add_shards */ : zpp_grad_pool_take(zero, grad, err);
    unsigned char *bucket = (unsigned char *)zpp_region_base(zero->grads, zero->rank) + grad->mapping_offset_bytes;
    grad->shard = bucket + (zero->options.stage == 0 ? 0 : (size_t)zero->rank * zpp_grad_shard_bytes(grad));
    return ZPP_OK;
}

static zpp_status make_shards(zpp_zero *zero, struct zpp_err *err) {
    if (zero->grad_file.unit_file) return zpp_grad_file_seal(zero, err);
    for (int at = 0; at < zero->order_count; at++) {
        const zpp_status status = zpp_reduce_make_shard(zero, zero->units[zero->order[at]]->grad, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

zpp_status zpp_reduce_seal(zpp_zero *zero, struct zpp_err *err) {
    if (zero->ranks == 1 && !zero->grad_file.unit_file) return ZPP_OK;
    zero->out_last = &zero->out_first;
    zero->order = calloc((size_t)zero->units_count + 1, sizeof *zero->order);
    if (!zero->order) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the order of %d units", zero->units_count);
    zpp_reduce_list_order(zero, true);
    if (zero->ranks == 1 || zero->order_count == 0) return make_shards(zero, err); /* nothing is reduced */
    const bool rings = !zpp_internode(zero->options.comm);
    zpp_status status = rings ? zpp_desc_ring_create(zero->options.comm, "reduce", &zero->ring, err) : ZPP_OK;
    if (status == ZPP_OK && rings && zero->options.stage == 0)
        status = zpp_desc_ring_create(zero->options.comm, "copy", &zero->copy_ring, err);
    if (status == ZPP_OK) status = make_buckets(zero, err);
    zpp_reduce_list_order(zero, false);
    if (status == ZPP_OK) status = make_shards(zero, err);
    if (status != ZPP_OK) return status;
    if (zero->ring) zpp_desc_ring_set_describe(zero->ring, zpp_exchange_describe, zero);
    if (zero->copy_ring) zpp_desc_ring_set_describe(zero->copy_ring, zpp_exchange_describe, zero);
    return ZPP_OK;
}

bool zpp_reduce_pending(const zpp_zero *zero) {
    if (zero->exchange.done && zpp_event_sync(zero->exchange.done, NULL, NULL) == ZPP_AGAIN) return true;
    if (zero->board.done && zpp_event_sync(zero->board.done, NULL, NULL) == ZPP_AGAIN) return true;
    for (int at = 0; at < zero->order_count; at++) {
        const struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        if (grad->state >= ZPP_GRAD_REDUCING && zpp_event_sync(grad->done, NULL, NULL) == ZPP_AGAIN) return true;
    }
    return false;
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

unsigned char *zpp_reduce_bucket(const zpp_zero *zero, const struct zpp_unit *unit) {
    if (unit->grad->bucket_offset_bytes == ZPP_BUCKET_NONE) return NULL;
    return (unsigned char *)zpp_region_base(zero->grads, zero->rank) + unit->grad->bucket_offset_bytes;
}

/* One byte a parameter, behind the gradient. */
static uint8_t *touched_flags(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_reduce_bucket(zero, unit) + zpp_grad_whole_bytes(unit->grad);
}

/* Is nobody, here or on a peer, reading the unit's bucket any more? */
static bool is_idle(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    if (zpp_event_sync(grad->done, NULL, NULL) != ZPP_OK) return false;
    if (!zero->ring) return true; /* over several hosts the collective is finished, so nobody reads it */
    return zpp_desc_ring_acked(zero->ring) >= grad->seq &&
           (!zero->copy_ring || zpp_desc_ring_acked(zero->copy_ring) >= grad->copy_seq);
}

static void give_bucket(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (!grad->at_mapping && !keeps_buckets(zero)) zpp_buckets_give(&zero->buckets, grad->bucket_offset_bytes);
    grad->bucket_offset_bytes = ZPP_BUCKET_NONE;
}

static void list_bucket(zpp_zero *zero, struct zpp_unit_grad *grad) {
    if (grad->listed || grad->bucket_offset_bytes == ZPP_BUCKET_NONE || keeps_buckets(zero)) return;
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

/* Buckets whose reduction is over everywhere go back. Returns the oldest that is still read, or NULL. They go out in
 * one order and come back in it, so whoever is behind the oldest need not be asked. */
static struct zpp_unit_grad *sweep(zpp_zero *zero) {
    while (zero->out_first && is_idle(zero, zero->out_first)) {
        struct zpp_unit_grad *grad = zero->out_first;
        unlist_bucket(zero, grad);
        give_bucket(zero, grad);
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
static zpp_status wait_idle(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                            struct zpp_err *err) {
    zpp_status status = zpp_event_sync(grad->done, wait, err);
    if (status != ZPP_OK || is_idle(zero, grad)) return status;
    if (!wait) return ZPP_AGAIN;
    status = zpp_stream_launch(zero->reduce, await_acks, &grad, sizeof(struct zpp_unit_grad *), err);
    if (status == ZPP_OK) status = zpp_event_record(zero->acked, zero->reduce, err);
    if (status == ZPP_OK) status = zpp_event_sync(zero->acked, wait, err);
    return status;
}

/* Stage 1, second backward of a step: the bucket is about to be refilled, and its own shard is the gradient so far. */
static zpp_status save_carry(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    if (zero->options.stage != 1 || !grad->has || grad->carry) return ZPP_OK;
    grad->carry = malloc(zpp_grad_shard_bytes(grad));
    if (!grad->carry)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory to keep %zu bytes of gradients of unit %s",
                        zpp_grad_shard_bytes(grad), grad->unit->name);
    memcpy(grad->carry, grad->shard, zpp_grad_shard_bytes(grad));
    zero->carry_bytes += zpp_grad_shard_bytes(grad);
    return ZPP_OK;
}

/* The bound is kept by waiting for slower ranks. Where several coordinators are in one backward, a peer may wait in
 * another one of them for this rank, for ever: then a bucket more is better than that. Every unit has a mapping, so
 * there is always a place. The stream is asked and not waited for: an operation that is late would end it. */
static zpp_status linger(zpp_zero *zero, const struct zpp_unit_grad *oldest, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    const uint64_t until_ns = zpp_now_ns() + LINGER_NS;
    if (!wait) return ZPP_AGAIN;
    while (!is_idle(zero, oldest)) {
        const struct timespec pause = { 0, 50000 };
        const zpp_status status = zpp_stream_poll(zero->reduce, err);
        if (status != ZPP_OK && status != ZPP_AGAIN) return status;
        zero->over_bound = zpp_now_ns() >= until_ns;
        if (zero->over_bound) return ZPP_OK;
        (void)nanosleep(&pause, NULL);
    }
    return ZPP_OK;
}

static zpp_status take_bucket(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_unit_grad *grad = unit->grad;
    const size_t bound = zero->options.bucket_bytes;
    zpp_status status = wait_idle(zero, grad, wait, err); /* the bucket of the backward before */
    if (status == ZPP_OK) status = save_carry(zero, grad, err);
    if (status != ZPP_OK) return status;
    if (grad->listed) {
        unlist_bucket(zero, grad);
        give_bucket(zero, grad);
    }
    struct zpp_unit_grad *oldest = sweep(zero);
    while (bound && oldest && !zero->over_bound && zero->buckets.used_bytes + grad->bucket_bytes > bound) {
        status = zero->shares_backward ? linger(zero, oldest, wait, err) : wait_idle(zero, oldest, wait, err);
        if (status != ZPP_OK) return status;
        oldest = sweep(zero);
    }
    size_t offset = keeps_buckets(zero) ? ZPP_BUCKET_NONE : zpp_buckets_take(&zero->buckets, grad->bucket_bytes);
    grad->at_mapping = offset == ZPP_BUCKET_NONE;
    grad->bucket_offset_bytes = grad->at_mapping ? grad->mapping_offset_bytes : offset;
    if (zero->options.stage == 0 && grad->touched_params) return ZPP_OK; /* p.grad lives here: what was touched stays */
    memset(touched_flags(zero, unit), 0, unit->params);
    grad->touched_params = 0;
    return ZPP_OK;
}

/* --- gradients come ----------------------------------------------------------------------------------------------- */

struct add_args {
    void *to;
    const void *from;
    size_t elems;
    zpp_dtype dtype;
};

static zpp_status add_gradient(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct add_args *args = arg;
    zpp_reduce_sources(args->to, args->dtype, true, &args->from, 1, args->dtype, args->elems, 1.0f);
    return ZPP_OK;
}

static zpp_status put_gradient(zpp_zero *zero, struct zpp_unit *unit, size_t param, const void *from,
                               struct zpp_err *err) {
    const size_t elems = unit->param_elems[param];
    const size_t bytes = elems * unit->grad->elem_bytes;
    unsigned char *to = zpp_reduce_bucket(zero, unit) + unit->offset_elems[param] * unit->grad->elem_bytes;
    uint8_t *touched = &touched_flags(zero, unit)[param];
    const bool add = *touched && zero->options.stage > 0; /* stage 0: autograd itself adds to p.grad, a view of `to` */
    if (!*touched) unit->grad->touched_params++;
    *touched = 1;
    if (from == (const void *)to || elems == 0) return ZPP_OK;
    if (!add) return zpp_stream_copy(zero->compute, to, from, bytes, err);
    const struct add_args args = { to, from, elems, unit->grad_dtype };
    return zpp_stream_launch(zero->compute, add_gradient, &args, sizeof args, err);
}

/* Before the bucket goes out: parameters without a gradient on this rank count as zeros. */
static void clear_untouched(const zpp_zero *zero, struct zpp_unit *unit) {
    const uint8_t *touched = touched_flags(zero, unit);
    unsigned char *bucket = zpp_reduce_bucket(zero, unit);
    const size_t bytes = unit->grad->elem_bytes;
    if (unit->grad->touched_params == unit->params) return;
    for (size_t i = 0; i < unit->params; i++)
        if (!touched[i]) memset(bucket + unit->offset_elems[i] * bytes, 0, unit->param_elems[i] * bytes);
}

/* --- the operation ------------------------------------------------------------------------------------------------ */

static struct zpp_desc desc_of(const struct zpp_unit_grad *grad, uint64_t kind) {
    return (struct zpp_desc){
        .kind = kind,
        .object = (uint64_t)grad->unit->index,
        .step = grad->pass,
        .elems = grad->unit->elems,
        .offset_bytes = grad->empty ? NO_BUCKET : grad->bucket_offset_bytes,
    };
}

static zpp_status read_peers(zpp_zero *zero, struct zpp_unit_grad *grad, zpp_desc_ring *ring, uint64_t kind,
                             uint64_t seq, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_desc expect = desc_of(grad, kind);
    for (int rank = 0; rank < zero->ranks; rank++) {
        struct zpp_desc desc;
        const zpp_status status = zpp_desc_ring_read(ring, rank, seq, &expect, wait, &desc, err);
        if (status != ZPP_OK) return status;
        grad->peer_offsets[rank] = desc.offset_bytes;
    }
    return ZPP_OK;
}

/* Which parameters have a gradient on any rank; returns how many sources there are and fills `sources` for shard
 * `rank`, and `from`, whose they are. */
static int collect_sources(zpp_zero *zero, struct zpp_unit_grad *grad, int shard, const void **sources, int *from) {
    const struct zpp_unit *unit = grad->unit;
    int count = 0;
    for (int rank = 0; rank < zero->ranks; rank++) {
        if (grad->peer_offsets[rank] == NO_BUCKET) continue;
        const unsigned char *bucket =
            (const unsigned char *)zpp_region_base(zero->grads, rank) + grad->peer_offsets[rank];
        const uint8_t *touched = bucket + zpp_grad_whole_bytes(grad);
        for (size_t i = 0; i < unit->params; i++) grad->present[i] |= touched[i];
        from[count] = rank;
        sources[count++] = bucket + (size_t)shard * zpp_grad_shard_bytes(grad);
        /* Where the bucket keeps the result, the result would overwrite what is still to be read of it. */
        if (rank == zero->rank && keeps_buckets(zero) && zpp_wire_narrows(unit))
            sources[count - 1] = zpp_wire_aside(zero, unit, sources[count - 1]);
    }
    return count;
}

enum { MAX_RANKS_ON_STACK = 256 };

static zpp_status add_shards(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const struct zpp_unit *unit = grad->unit;
    const void *sources[MAX_RANKS_ON_STACK];
    int from[MAX_RANKS_ON_STACK];
    if (zero->ranks > MAX_RANKS_ON_STACK)
        return zpp_fail(err, ZPP_INVALID, "zero: %d ranks on one host, at most %d work", zero->ranks,
                        MAX_RANKS_ON_STACK);
    const int count = collect_sources(zero, grad, zero->rank, sources, from);
    const zpp_status grad_pool = count ? zpp_grad_pool_take(zero, grad, err) : ZPP_OK;
    if (count == 0 || grad_pool != ZPP_OK) return grad_pool;
    unsigned char *to = grad->shard;
    if (zero->options.stage == 0) to += (size_t)zero->rank * zpp_grad_shard_bytes(grad);
    /* Stage 1: my bucket was not refilled, so its shard still is the gradient so far; else the carry has it. */
    const bool accumulate = grad->has && (zero->options.stage >= 2 || (zero->options.stage == 1 && grad->empty));
    const struct zpp_sources all = { sources, from, count, zpp_grad_factor(zero, unit, zero->ranks), accumulate };
    zpp_origin_note(zero, grad, zpp_origin_add(zero, unit, &all, to));
    const size_t source_bytes = zpp_wire_packs(zero) ? zpp_wire_qcopy_bytes(zero, unit) : zpp_wire_shard_bytes(unit);
    if (grad->carry) {
        const void *carry = grad->carry;
        zpp_reduce_sources(to, unit->grad_dtype, true, &carry, 1, unit->grad_dtype, unit->shard_elems, 1.0f);
    }
    grad->has = grad->changed = true;
    int read = 0;
    for (int rank = 0; rank < zero->ranks; rank++) read += rank != zero->rank && grad->peer_offsets[rank] != NO_BUCKET;
    zpp_comm_count(zero->options.comm, zero->options.stage == 0 ? ZPP_TRAFFIC_ALL_REDUCE : ZPP_TRAFFIC_REDUCE_SCATTER,
                   (uint64_t)read * source_bytes);
    return ZPP_OK;
}

/* Stage 0: rank r has finished shard r, so nobody reads shard r of my bucket any more, and it may be overwritten. */
static void copy_shards(zpp_zero *zero, struct zpp_unit_grad *grad) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    uint64_t copied_bytes = 0;
    for (int rank = 0; rank < zero->ranks && grad->has; rank++) {
        if (rank == zero->rank) continue;
        const unsigned char *made = (const unsigned char *)zpp_region_base(zero->grads,
                                                                           rank) + grad->mapping_offset_bytes;
        memcpy(grad->shard + (size_t)rank * bytes, made + (size_t)rank * bytes, bytes);
        copied_bytes += bytes;
    }
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_REDUCE, copied_bytes);
}

static zpp_status reduce_bucket(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    struct zpp_unit_grad *grad = *(struct zpp_unit_grad **)arg;
    zpp_zero *zero = grad->zero;
    zpp_status status = ZPP_OK;
    if (grad->round == ROUND_PACK) {
        unsigned char *bucket = grad->empty ? NULL : zpp_reduce_bucket(zero, grad->unit);
        if (bucket && zpp_wire_packs(zero)) zpp_wire_pack(zero, grad->unit, bucket);
        else if (bucket && zpp_wire_narrows(grad->unit)) zpp_wire_narrow(zero, grad->unit, bucket);
        grad->round = ROUND_POST;
    }
    if (grad->round == ROUND_POST) {
        const struct zpp_desc desc = desc_of(grad, ZPP_DESC_REDUCE);
        status = zpp_desc_ring_post(zero->ring, &desc, wait, &grad->seq, err);
        if (status != ZPP_OK) return status;
        grad->round = zero->grad_file.unit_file ? ROUND_TAKE : ROUND_ADD;
    }
    if (grad->round == ROUND_TAKE) {
        status = zpp_grad_file_load(zero, grad, wait, err);
        if (status != ZPP_OK) return status;
        grad->round = ROUND_ADD;
    }
    if (grad->round == ROUND_ADD) {
        status = read_peers(zero, grad, zero->ring, ZPP_DESC_REDUCE, grad->seq, wait, err);
        if (status == ZPP_OK) status = zpp_grad_file_load_wait(zero, grad, wait);
        const uint64_t began_ns = zpp_span_begin();
        if (status == ZPP_OK) status = add_shards(zero, grad, err);
        if (status != ZPP_OK) return status;
        zpp_span_end(began_ns, ZPP_SPAN_REDUCE, grad->unit->name, zpp_grad_shard_bytes(grad));
        zpp_desc_ring_ack(zero->ring, grad->seq);
        if (zero->grad_file.unit_file) status = zpp_grad_file_complete(zero, grad, err);
        if (status != ZPP_OK) return status;
        grad->round = zero->copy_ring ? ROUND_POST_SHARD : ROUND_DONE;
    }
    if (grad->round == ROUND_POST_SHARD) {
        struct zpp_desc desc = desc_of(grad, ZPP_DESC_COPY);
        desc.offset_bytes = grad->origins; /* of my shard: where that lies is known */
        status = zpp_desc_ring_post(zero->copy_ring, &desc, wait, &grad->copy_seq, err);
        if (status != ZPP_OK) return status;
        grad->round = ROUND_COPY;
    }
    if (grad->round == ROUND_COPY) {
        status = read_peers(zero, grad, zero->copy_ring, ZPP_DESC_COPY, grad->copy_seq, wait, err);
        if (status != ZPP_OK) return status;
        copy_shards(zero, grad);
        for (int rank = 0; rank < zero->ranks; rank++) grad->origins |= grad->peer_offsets[rank];
        zpp_desc_ring_ack(zero->copy_ring, grad->copy_seq);
        grad->round = ROUND_DONE;
    }
    return ZPP_OK;
}

/* --- order -------------------------------------------------------------------------------------------------------- */

static zpp_status launch(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    grad->empty = grad->touched_params == 0; /* a bucket of the backward before may still be read by a peer */
    grad->round = ROUND_PACK;
    grad->pass = zero->pass;
    zpp_unit_grad_reduce(grad);
    list_bucket(zero, grad);
    const bool internode = zpp_internode(zero->options.comm);
    zpp_status status = zpp_event_record(grad->written, zero->compute, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->reduce, grad->written, NULL, err);
    if (status == ZPP_OK && internode)
        status = zpp_reduce_net_launch(zero, grad, grad->empty ? NULL : touched_flags(zero, grad->unit),
                                      zpp_reduce_bucket(zero, grad->unit), err);
    if (status == ZPP_OK)
        status = zpp_stream_launch(zero->reduce, internode ? zpp_reduce_net_finish : reduce_bucket, &grad,
                                   sizeof(struct zpp_unit_grad *), err);
    if (status == ZPP_OK) status = zpp_event_record(grad->done, zero->reduce, err);
    return status;
}

static bool is_complete(const struct zpp_unit_grad *grad) {
    return grad->missing == 0 && grad->uses <= 1 && !grad->partial;
}

static zpp_status drain(zpp_zero *zero, bool all, struct zpp_err *err) {
    while (zero->order_at < zero->order_count) {
        struct zpp_unit *unit = zero->units[zero->order[zero->order_at]];
        if (!all && !is_complete(unit->grad)) break;
        if (unit->grad->touched_params) clear_untouched(zero, unit);
        const zpp_status status = launch(zero, unit->grad, err);
        if (status != ZPP_OK) return status;
        zero->order_at++;
    }
    const zpp_status status = zpp_stream_poll(zero->reduce, err);
    return status == ZPP_AGAIN ? ZPP_OK : status;
}

/* --- the calls ---------------------------------------------------------------------------------------------------- */

zpp_status zpp_zero_backward_begin(zpp_zero *zero, bool reduce, struct zpp_err *err) {
    if (zero->in_backward) return zpp_fail(err, ZPP_STATE, "zero: a backward begins inside a backward");
    zero->backward_ns = zpp_span_begin();
    char words[ZPP_UNIT_WORDS];
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit *unit = zero->units[zero->order[at]];
        if (unit->grad->state == ZPP_GRAD_REDUCING)
            return zpp_fail(err, ZPP_STATE,
                            "zero: the backward before this one ended by an exception after the gradient of %s had "
                            "gone out, so the ranks no longer agree on the gradients; restart from a checkpoint",
                            zpp_unit_words(unit, words, sizeof words));
        memset(unit->grad->seen, 0, unit->params);
        unit->grad->missing = unit->params;
        unit->grad->partial = false;
    }
    zero->in_backward = true;
    zero->shares_backward = zero->over_bound = false;
    zero->reduces = reduce;
    zero->grad_file.keeps = false;
    zero->order_at = 0;
    return ZPP_OK;
}

bool zpp_zero_came_late(const zpp_zero *zero, int unit) {
    const struct zpp_unit_grad *grad = zero->units[unit]->grad;
    return zero->ranks > 1 && grad && grad->state == ZPP_GRAD_REDUCING;
}

static void count_gradient(struct zpp_unit_grad *grad, size_t param, bool partial) {
    if (partial) grad->partial = true;
    if (grad->seen[param]) return;
    grad->seen[param] = 1;
    grad->missing--;
}

/* One rank, gradients in a file. */
static zpp_status add_alone(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param, const void *from, bool partial,
                            const struct zpp_wait *wait, struct zpp_err *err) {
    const zpp_status status = zpp_grad_file_add(zero, grad, param, from, wait, err);
    if (status != ZPP_OK) return status;
    count_gradient(grad, param, partial);
    return is_complete(grad) ? zpp_grad_file_complete(zero, grad, err) : ZPP_OK;
}

zpp_status zpp_zero_grad(zpp_zero *zero, int index, size_t param, const void *from, bool partial,
                         const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    struct zpp_unit_grad *grad = unit->grad;
    if (zero->ranks == 1) return add_alone(zero, grad, param, from, partial, wait, err);
    if (grad->state == ZPP_GRAD_REDUCING) { /* the binding knows the parameter's name */
        char words[ZPP_UNIT_WORDS];
        return zpp_fail(err, ZPP_STATE, "zero: a gradient of %s came after its gradients were reduced",
                        zpp_unit_words(unit, words, sizeof words));
    }
    zpp_status status = ZPP_OK;
    if (grad->state != ZPP_GRAD_ACCUMULATING) {
        status = take_bucket(zero, unit, wait, err);
        if (status != ZPP_OK) return status;
        zpp_unit_grad_accumulate(grad);
    }
    status = put_gradient(zero, unit, param, from, err);
    if (status != ZPP_OK) return status;
    count_gradient(grad, param, partial);
    return zero->reduces && is_complete(grad) ? drain(zero, false, err) : ZPP_OK;
}

/* Stage 0: from here on the whole gradient lies in the bucket on every rank, also where it had none. */
static void adopt_result(zpp_zero *zero, struct zpp_unit_grad *grad) {
    grad->bucket_offset_bytes = grad->mapping_offset_bytes;
    grad->at_mapping = true;
    uint8_t *touched = touched_flags(zero, grad->unit);
    for (size_t i = 0; i < grad->unit->params; i++) {
        touched[i] = grad->present[i];
        grad->touched_params += grad->present[i];
    }
}

static zpp_status finish(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    /* They run in order, so the last one is the one to wait for. */
    const uint64_t began_ns = zpp_span_begin();
    const zpp_status status = zpp_event_sync(zero->units[zero->order[zero->order_count - 1]]->grad->done, wait, err);
    if (status != ZPP_OK) return status;
    zpp_span_end(began_ns, ZPP_SPAN_WAIT, "for reductions", 0);
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        zpp_unit_grad_reduced(grad);
        grad->touched_params = 0;
        if (zero->options.stage == 0 && grad->has) adopt_result(zero, grad);
        if (grad->carry) zero->carry_bytes -= zpp_grad_shard_bytes(grad);
        free(grad->carry);
        grad->carry = NULL;
    }
    (void)sweep(zero);
    zero->pass++;
    return ZPP_OK;
}

zpp_status zpp_zero_backward_end(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (zero->ranks == 1 && zero->grad_file.unit_file) {
        if (!zero->grad_file.keeps) status = zpp_grad_file_store_all(zero, err);
    } else if (zero->reduces && zero->order_count) {
        status = drain(zero, true, err);
        if (status == ZPP_OK) status = finish(zero, wait, err);
    }
    if (status != ZPP_OK) return status;
    zpp_zero_reset_uses(zero);
    zero->in_backward = false;
    zpp_span_end(zero->backward_ns, ZPP_SPAN_BACKWARD, "backward", 0);
    return ZPP_OK;
}

void zpp_zero_backward_abort(zpp_zero *zero) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    zpp_zero_reset_uses(zero);
    if (zero->ranks == 1 && zero->grad_file.unit_file) (void)zpp_grad_file_store_all(zero, &ignored);
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit *unit = zero->units[zero->order[at]];
        if (unit->grad->state != ZPP_GRAD_ACCUMULATING) continue;
        give_bucket(zero, unit->grad);
        zpp_unit_grad_discard(unit->grad);
        unit->grad->touched_params = 0;
    }
    zero->in_backward = false;
}

/* --- results ------------------------------------------------------------------------------------------------------ */

const void *zpp_zero_held_grad(const zpp_zero *zero, int index, const uint8_t **touched) {
    struct zpp_unit *unit = zero->units[index];
    const struct zpp_unit_grad *grad = unit->grad;
    if (!grad || grad->state != ZPP_GRAD_ACCUMULATING || !grad->touched_params) return NULL;
    clear_untouched(zero, unit);
    *touched = touched_flags(zero, unit);
    return zpp_reduce_bucket(zero, unit);
}

bool zpp_zero_grads_pending(const zpp_zero *zero) {
    for (int at = 0; at < zero->order_count; at++) {
        const struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        if (grad->state == ZPP_GRAD_ACCUMULATING && grad->touched_params) return true;
    }
    return false;
}

/* Does the unit's bucket say which gradients this rank has? At stage 0 it does after the reduction, too. */
static bool keeps_flags(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    if (grad->state == ZPP_GRAD_ACCUMULATING) return true;
    return zero->options.stage == 0 && grad->bucket_offset_bytes != ZPP_BUCKET_NONE;
}

void zpp_zero_clear_grad(zpp_zero *zero, int index, size_t param) {
    struct zpp_unit *unit = zero->units[index];
    struct zpp_unit_grad *grad = unit->grad;
    if (!grad) return;
    grad->present[param] = 0;
    if (unit->params && !memchr(grad->present, 1, unit->params)) grad->has = false; /* the last one */
    if (grad->shard && zero->options.stage > 0) zpp_grad_file_clear(zero, grad, param);
    if (!keeps_flags(zero, grad)) return;
    uint8_t *touched = &touched_flags(zero, unit)[param];
    if (*touched) grad->touched_params--;
    *touched = 0;
}

void zpp_zero_clear_grads(zpp_zero *zero) {
    if (zero->grad_file.unit_file) zpp_grad_file_clear_all(zero);
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit *unit = zero->units[zero->order[at]];
        struct zpp_unit_grad *grad = unit->grad;
        memset(grad->present, 0, unit->params);
        grad->has = false;
        if (!keeps_flags(zero, grad)) continue;
        memset(touched_flags(zero, unit), 0, unit->params);
        grad->touched_params = 0;
        if (grad->state != ZPP_GRAD_ACCUMULATING) continue;
        give_bucket(zero, grad);
        zpp_unit_grad_discard(grad);
    }
}
