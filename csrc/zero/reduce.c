/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients of a backward, from the first one of a unit to its reduction, in the order of units that all ranks share.
 * See reduce.h.
 */
#include "reduce.h"

#include <stdlib.h>
#include <string.h>

#include "grad_path.h"
#include "grad_store.h"
#include "internal.h"

/* --- creation ----------------------------------------------------------------------------------------------------- */

zpp_status zpp_reduce_add_unit(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_unit_grad *grad = calloc(1, sizeof *grad);
    if (!grad) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the gradients of unit %s", unit->name);
    unit->grad = grad;
    grad->unit = unit;
    grad->zero = zero;
    grad->elem_bytes = zpp_dtype_bytes(unit->grad_dtype);
    grad->bucket_bytes = zpp_round_up(zpp_grad_whole_bytes(grad) + unit->params, ZPP_BUCKET_ALIGN_BYTES);
    const size_t area_bytes = zero->path->area_bytes ? zero->path->area_bytes(zero, unit) : 0;
    if (area_bytes) grad->area_offset_bytes = grad->bucket_bytes;
    grad->bucket_bytes += area_bytes;
    grad->bucket_offset_bytes = ZPP_BUCKET_NONE;
    grad->missing = unit->params;
    const size_t capacity = unit->params ? unit->params : 1;
    grad->seen = calloc(capacity, 1);
    grad->present = calloc(capacity, 1);
    grad->stale = calloc(capacity, 1);
    grad->peer_offsets = calloc((size_t)zero->ranks, sizeof *grad->peer_offsets);
    if (!grad->seen || !grad->present || !grad->stale || !grad->peer_offsets)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the gradients of unit %s", unit->name);
    zpp_status status = zpp_event_create(zero->options.device, &grad->written, err);
    if (status == ZPP_OK) status = zpp_event_create(zpp_zero_host(zero), &grad->done, err);
    return status;
}

void zpp_reduce_drop_unit(zpp_zero *zero, struct zpp_unit *unit) {
    struct zpp_unit_grad *grad = unit->grad;
    if (!grad) return;
    zpp_internode_drop(grad->unit->group->comm, &grad->internode_flags);
    zpp_internode_drop(grad->unit->group->comm, &grad->internode_sum);
    free(grad->internode_memory);
    if (zero->store->free) zero->store->free(zero, grad);
    if (zero->path->drop_unit) zero->path->drop_unit(zero, grad);
    zpp_bucket_drop_carry(zero, grad);
    zpp_event_destroy(grad->written);
    zpp_event_destroy(grad->done);
    free(grad->seen);
    free(grad->present);
    free(grad->stale);
    free(grad->peer_offsets);
    free(grad);
    unit->grad = NULL;
}

/* The accelerator writes to page-locked memory without a host that waits: to as much of the arena as may be in use, or
 * to the buckets that stay. */
static zpp_status pin_buckets(zpp_zero *zero, size_t arena_bytes, size_t bytes, struct zpp_err *err) {
    const size_t bound = zpp_round_up(zero->options.bucket_bytes, zpp_page_bytes());
    size_t used_bytes = arena_bytes ? arena_bytes : bytes;
    if (arena_bytes && bound && bound < used_bytes) used_bytes = bound;
    return zpp_pin(zero, zpp_grads_of_rank(zero, zero->rank), used_bytes, err);
}

static zpp_status make_bucket_memory(zpp_zero *zero, size_t arena_bytes, size_t bytes, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (zero->options.comm) {
        status = zpp_region_create(zero->options.comm, ZPP_REGION_PER_RANK, bytes, &zero->grads, err);
    } else {
        void *memory = NULL;
        status = zpp_mem_alloc(bytes, zpp_page_bytes(), &memory, err);
        zero->grads_alone = memory;
        zero->grads_alone_bytes = bytes;
    }
    return status == ZPP_OK ? pin_buckets(zero, arena_bytes, bytes, err) : status;
}

/* The arena, then a mapping for each unit, also for those that are reserved: addresses cost nothing until they are
 * written to. Buckets of stages 0 and 1 lie in the mappings. */
static zpp_status make_buckets(zpp_zero *zero, struct zpp_err *err) {
    size_t arena_bytes = 0, mappings_bytes = 0;
    for (int at = 0; at < zero->order_count; at++) {
        const struct zpp_unit *unit = zero->units[zero->order[at]];
        unit->grad->mapping_offset_bytes = mappings_bytes;
        mappings_bytes += unit->grad->bucket_bytes;
        if (zpp_keeps_buckets(zero) && unit->trainable) zero->kept_bucket_bytes += unit->grad->bucket_bytes;
    }
    /* Behind them, the board of exchange.c: a norm, the name of its worst element and whose it was for each unit. */
    const size_t board_bytes = zpp_round_up(ZPP_NORM_BYTES * ((size_t)zero->units_count + 1), ZPP_BUCKET_ALIGN_BYTES);
    if (zero->path->make_buckets) return zero->path->make_buckets(zero, mappings_bytes, board_bytes, err);
    if (!zpp_keeps_buckets(zero)) arena_bytes = zpp_round_up(mappings_bytes, zpp_page_bytes());
    for (int at = 0; at < zero->order_count; at++)
        zero->units[zero->order[at]]->grad->mapping_offset_bytes += arena_bytes;
    if (!zpp_buckets_init(&zero->buckets, (size_t)zero->order_count, arena_bytes))
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the buckets of %d units", zero->order_count);
    const zpp_status status = zpp_exchange_init(zero, arena_bytes + mappings_bytes, board_bytes, err);
    if (status != ZPP_OK) return status;
    return make_bucket_memory(zero, arena_bytes, arena_bytes + mappings_bytes + board_bytes, err);
}

static zpp_status make_shards(zpp_zero *zero, struct zpp_err *err) {
    const struct zpp_grad_store *store = zero->store;
    zpp_status status = store->seal ? store->seal(zero, err) : ZPP_OK;
    for (int at = 0; at < zero->order_count && store->add && status == ZPP_OK; at++)
        status = store->add(zero, zero->units[zero->order[at]]->grad, err);
    return status;
}

static zpp_status make_rings(zpp_zero *zero, struct zpp_err *err) {
    if (!zero->options.comm || zpp_internode(zero->options.comm) || zpp_zero_by_nccl(zero)) return ZPP_OK;
    zpp_status status = zpp_desc_ring_create(zero->options.comm, "reduce", &zero->ring, err);
    if (status == ZPP_OK && zero->options.stage == 0)
        status = zpp_desc_ring_create(zero->options.comm, "copy", &zero->copy_ring, err);
    if (zero->ring) zpp_desc_ring_set_describe(zero->ring, zpp_exchange_describe, zero);
    if (zero->copy_ring) zpp_desc_ring_set_describe(zero->copy_ring, zpp_exchange_describe, zero);
    return status;
}

/* The order of reductions: backward meets the last unit first. `reserved`: also units that are frozen and reserved. */
static void list_order(zpp_zero *zero, bool reserved) {
    zero->order_count = 0;
    for (int i = zero->units_count - 1; i >= 0; i--) {
        const struct zpp_unit *unit = zero->units[i];
        if (unit->trainable || (reserved && unit->frozen_reserved)) zero->order[zero->order_count++] = i;
    }
}

zpp_status zpp_reduce_seal(zpp_zero *zero, struct zpp_err *err) {
    if (!zpp_zero_takes_grads(zero)) return ZPP_OK;
    zero->out_last = &zero->out_first;
    zero->order = calloc((size_t)zero->units_count + 1, sizeof *zero->order);
    if (!zero->order) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the order of %d units", zero->units_count);
    list_order(zero, true);
    /* nothing is reduced */
    if (zpp_zero_keeps_local_grads(zero) || zero->order_count == 0) return make_shards(zero, err);
    zpp_status status = make_rings(zero, err);
    if (status == ZPP_OK) status = make_buckets(zero, err);
    list_order(zero, false);
    return status == ZPP_OK ? make_shards(zero, err) : status;
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

static zpp_status add_here(zpp_zero *zero, void *to, const void *from, size_t elems, zpp_dtype dtype,
                           struct zpp_err *err) {
    const struct add_args args = {to, from, elems, dtype};
    return zpp_stream_launch(zero->compute, add_gradient, &args, sizeof args, err);
}

/* The reduction begins after what was launched so far. */
static zpp_status send_here(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const zpp_status status = zpp_event_record(grad->written, zero->compute, err);
    return status == ZPP_OK ? zpp_stream_wait(zero->reduce, grad->written, NULL, err) : status;
}

const struct zpp_grad_path zpp_grad_path_direct = {
    .name = "direct",
    .memory = zpp_bucket_of,
    .add = add_here,
    .send = send_here,
};

static zpp_status put_gradient(zpp_zero *zero, struct zpp_unit *unit, size_t param, const void *from,
                               struct zpp_err *err) {
    const size_t elems = unit->param_elems[param];
    const size_t bytes = elems * unit->grad->elem_bytes;
    unsigned char *to = zero->path->memory(zero, unit) + unit->offset_elems[param] * unit->grad->elem_bytes;
    uint8_t *touched = &zpp_bucket_flags(zero, unit)[param];
    const bool add = *touched && zero->options.stage > 0; /* stage 0: autograd itself adds to p.grad, a view of `to` */
    if (!*touched) unit->grad->touched_params++;
    *touched = 1;
    if (from == (const void *)to || elems == 0) return ZPP_OK;
    if (!add) return zpp_stream_copy(zero->compute, to, from, bytes, err);
    return zero->path->add(zero, to, from, elems, unit->grad_dtype, err);
}

/* Before the bucket goes out: parameters without a gradient on this rank count as zeros. */
static zpp_status clear_untouched(const zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const uint8_t *touched = zpp_bucket_flags(zero, unit);
    unsigned char *bucket = zero->path->memory(zero, unit);
    const size_t bytes = unit->grad->elem_bytes;
    zpp_status status = ZPP_OK;
    if (unit->grad->touched_params == unit->params) return ZPP_OK;
    for (size_t i = 0; i < unit->params && status == ZPP_OK; i++)
        if (!touched[i])
            status = zpp_stream_fill(zero->compute, bucket + unit->offset_elems[i] * bytes, 0,
                                     unit->param_elems[i] * bytes, err);
    return status;
}

/* --- order -------------------------------------------------------------------------------------------------------- */

static zpp_status launch(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    grad->empty = grad->touched_params == 0; /* a bucket of the backward before may still be read by a peer */
    grad->round = 0;
    grad->pass = zero->pass;
    zpp_unit_grad_reduce(grad);
    zpp_bucket_list(zero, grad);
    const bool internode = zpp_internode(zero->options.comm) && !zero->path->reduce;
    zpp_status status = zero->path->send(zero, grad, err);
    if (status == ZPP_OK && internode)
        status = zpp_reduce_net_launch(zero, grad, grad->empty ? NULL : zpp_bucket_flags(zero, grad->unit),
                                      zpp_bucket_of(zero, grad->unit), err);
    const zpp_op_fn on_host = internode ? zpp_reduce_net_finish : zpp_reduce_shm;
    if (status == ZPP_OK)
        status = zpp_stream_launch(zero->reduce, zero->path->reduce ? zero->path->reduce : on_host, &grad,
                                   sizeof(struct zpp_unit_grad *), err);
    if (status == ZPP_OK) status = zpp_event_record(grad->done, zero->reduce, err);
    return status;
}

static bool is_complete(const struct zpp_unit_grad *grad) {
    const struct zpp_unit *unit = grad->unit;
    return grad->missing == 0 && !unit->awaits_graphs && zpp_zero_gets_gradients_once(grad->zero, unit->index);
}

/* The bucket of the next unit goes out. AGAIN: its way is not free yet. */
static zpp_status send_next(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    const bool any = unit->grad->touched_params;
    zpp_status status = any && zero->path->prepare ? zero->path->prepare(zero, unit->grad, wait, err) : ZPP_OK;
    if (status == ZPP_OK && any) status = clear_untouched(zero, unit, err);
    if (status == ZPP_OK) status = launch(zero, unit->grad, err);
    if (status == ZPP_OK) zero->order_at++;
    return status;
}

static zpp_status poll(zpp_zero *zero, struct zpp_err *err) {
    const zpp_status status = zpp_stream_poll(zero->reduce, err);
    return status == ZPP_AGAIN ? ZPP_OK : status;
}

bool zpp_reduce_sends_singly(const zpp_zero *zero) {
    return zpp_zero_by_nccl(zero) && zero->store == &zpp_grad_store_device_pooled;
}

int zpp_reduce_sent(const zpp_zero *zero) { return zero->order_at; }

/* Buckets of units whose gradients have all come. */
static zpp_status send_complete(zpp_zero *zero, struct zpp_err *err) {
    const bool singly = zpp_reduce_sends_singly(zero);
    zpp_status status = ZPP_OK;
    for (int sent = 0; zero->order_at < zero->order_count && !(singly && sent); sent++) {
        struct zpp_unit *unit = zero->units[zero->order[zero->order_at]];
        if (!is_complete(unit->grad)) break;
        status = send_next(zero, unit, NULL, err);
        if (status == ZPP_AGAIN) break;
        if (status != ZPP_OK) return status;
    }
    return poll(zero, err);
}

zpp_status zpp_reduce_send_until(zpp_zero *zero, int count, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    while (zero->order_at < zero->order_count && zero->order_at < count && status == ZPP_OK)
        status = send_next(zero, zero->units[zero->order[zero->order_at]], wait, err);
    return status == ZPP_OK ? poll(zero, err) : status;
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
        memset(unit->grad->seen, unit->masked, unit->params);
        unit->grad->missing = unit->masked ? 0 : unit->params;
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
    return !zpp_zero_keeps_local_grads(zero) && grad && grad->state == ZPP_GRAD_REDUCING;
}

static void count_gradient(struct zpp_unit_grad *grad, size_t param, bool partial) {
    if (partial) grad->partial = grad->zero->used_again = true;
    if (grad->seen[param]) return;
    grad->seen[param] = 1;
    grad->missing--;
}

/* One rank, gradients in a file. */
static zpp_status add_alone(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param, const void *from, bool partial,
                            const struct zpp_wait *wait, struct zpp_err *err) {
    const zpp_status status = zero->store->accumulate(zero, grad, param, from, wait, err);
    if (status != ZPP_OK) return status;
    count_gradient(grad, param, partial);
    return is_complete(grad) ? zero->store->complete(zero, grad, err) : ZPP_OK;
}

zpp_status zpp_zero_grad(zpp_zero *zero, int index, size_t param, const void *from, bool partial,
                         const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    struct zpp_unit_grad *grad = unit->grad;
    if (zpp_zero_keeps_local_grads(zero)) return add_alone(zero, grad, param, from, partial, wait, err);
    if (grad->state == ZPP_GRAD_REDUCING) { /* the binding adds the parameter's name */
        char words[ZPP_UNIT_WORDS];
        return zpp_fail(err, ZPP_STATE, "zero: a gradient of %s came after its gradients were reduced",
                        zpp_unit_words(unit, words, sizeof words));
    }
    zpp_status status = ZPP_OK;
    if (grad->state != ZPP_GRAD_ACCUMULATING) {
        status = zpp_bucket_take(zero, unit, wait, err);
        if (status != ZPP_OK) return status;
        zpp_unit_grad_accumulate(grad);
    }
    status = zpp_unit_noticed(unit, "the backward", put_gradient(zero, unit, param, from, err), err);
    if (status != ZPP_OK) return status;
    count_gradient(grad, param, partial);
    return zero->reduces && is_complete(grad) ? send_complete(zero, err) : ZPP_OK;
}

/* Stage 0: from here on the whole gradient lies in the bucket on every rank, also where it had none. */
static void adopt_result(zpp_zero *zero, struct zpp_unit_grad *grad) {
    grad->bucket_offset_bytes = grad->mapping_offset_bytes;
    grad->at_mapping = true;
    uint8_t *touched = zpp_bucket_flags(zero, grad->unit);
    for (size_t i = 0; i < grad->unit->params; i++) {
        touched[i] = grad->present[i];
        grad->touched_params += grad->present[i];
    }
}

static zpp_status finish(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    /* They run in order, so the last one is the one to wait for. At stage 0 also until the peers have copied this
     * rank's shards: p.grad is a view of where they lie, and the caller may change it. */
    const uint64_t began_ns = zpp_span_begin();
    struct zpp_unit_grad *last = zero->units[zero->order[zero->order_count - 1]]->grad;
    zpp_status status = zpp_event_sync(last->done, wait, err);
    if (status == ZPP_OK && zero->copy_ring && !zero->path->settle)
        status = zpp_bucket_wait_idle(zero, last, wait, err);
    if (status != ZPP_OK) return status;
    zpp_span_end(began_ns, ZPP_SPAN_WAIT, "for reductions", 0);
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        zpp_unit_grad_reduced(grad);
        grad->touched_params = 0;
        if (zero->options.stage == 0 && grad->has) adopt_result(zero, grad);
        grad->carries = false;
        if (!zero->path->keeps_carry) zpp_bucket_drop_carry(zero, grad);
    }
    (void)zpp_bucket_sweep(zero);
    zero->pass++;
    return zero->path->finish ? zero->path->finish(zero, err) : ZPP_OK;
}

zpp_status zpp_reduce_send_rest(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (zpp_zero_keeps_local_grads(zero) && zero->store->end_backward) {
        status = zero->store->end_backward(zero, false, err);
    } else if (zero->reduces && zero->order_count) {
        status = zpp_reduce_send_until(zero, zero->order_count, wait, err);
        zero->unsettled = status == ZPP_OK;
    }
    return status;
}

zpp_status zpp_zero_settle(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    if (!zero->unsettled) return ZPP_OK;
    const zpp_status status = finish(zero, wait, err);
    if (status != ZPP_OK) return status;
    zero->unsettled = false;
    if (!zero->pass_is_open) zero->defers = false;
    return ZPP_OK;
}

zpp_status zpp_zero_backward_end(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = zpp_reduce_send_rest(zero, wait, err);
    if (status == ZPP_OK) status = zpp_zero_settle(zero, wait, err);
    if (status != ZPP_OK) return status;
    if (!zero->pass_is_open) zpp_zero_reset_uses(zero);
    zero->in_backward = false;
    zpp_span_end(zero->backward_ns, ZPP_SPAN_BACKWARD, "backward", 0);
    return ZPP_OK;
}

/* One rank beside an accelerator agrees with itself. So what is going out comes to its end, and is dropped as what did
 * not go out is. If that fails, the next backward says so. */
static void end_alone(zpp_zero *zero) {
    const struct zpp_wait patience = {.timeout_ns = UINT64_C(600000000000), .tick = NULL, .ctx = NULL};
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (zero->ranks > 1 || !zero->in_backward || !zero->reduces || !zero->order_at) return;
    zpp_status status = zpp_reduce_send_until(zero, zero->order_count, &patience, &ignored);
    if (status == ZPP_OK) status = finish(zero, &patience, &ignored);
    if (status == ZPP_OK) zpp_zero_clear_grads(zero);
}

void zpp_zero_pass_forget(zpp_zero *zero) {
    zero->pass_is_open = zero->reduces_graphs = false;
    zero->defers = zero->unsettled;
    zero->may_sum = false;
    for (int i = 0; i < zero->units_count; i++) zero->units[i]->awaits_graphs = false;
}

void zpp_zero_backward_abort(zpp_zero *zero) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    end_alone(zero);
    zero->unsettled = false;
    zpp_zero_pass_forget(zero);
    zpp_zero_reset_uses(zero);
    if (zpp_zero_keeps_local_grads(zero) && zero->store->end_backward)
        (void)zero->store->end_backward(zero, true, &ignored);
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit *unit = zero->units[zero->order[at]];
        if (unit->grad->state != ZPP_GRAD_ACCUMULATING) continue;
        zpp_bucket_give(zero, unit->grad);
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
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (clear_untouched(zero, unit, &ignored) != ZPP_OK) return NULL;
    *touched = zpp_bucket_flags(zero, unit);
    return zero->path->memory(zero, unit);
}

bool zpp_zero_grads_pending(const zpp_zero *zero) {
    for (int at = 0; at < zero->order_count; at++) {
        const struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        if (grad->state == ZPP_GRAD_ACCUMULATING && grad->touched_params) return true;
    }
    return false;
}

/* True if the unit's bucket flags the gradients of this rank; at stage 0 after the reduction, too. */
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
    zero->store->clear(zero, grad, param);
    if (!keeps_flags(zero, grad)) return;
    uint8_t *touched = &zpp_bucket_flags(zero, unit)[param];
    if (*touched) grad->touched_params--;
    *touched = 0;
}

void zpp_zero_clear_grads(zpp_zero *zero) {
    if (zero->store->clear_all) zero->store->clear_all(zero);
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit *unit = zero->units[zero->order[at]];
        struct zpp_unit_grad *grad = unit->grad;
        memset(grad->present, 0, unit->params);
        grad->has = false;
        if (!keeps_flags(zero, grad)) continue;
        memset(zpp_bucket_flags(zero, unit), 0, unit->params);
        grad->touched_params = 0;
        if (grad->state != ZPP_GRAD_ACCUMULATING) continue;
        zpp_bucket_give(zero, grad);
        zpp_unit_grad_discard(grad);
    }
}

zpp_status zpp_zero_wait_reduced(zpp_zero *zero, int done, const struct zpp_wait *wait, int *unit,
                                 struct zpp_err *err) {
    *unit = -1;
    if (done >= zero->order_at) return ZPP_OK;
    const zpp_status status = zpp_event_sync(zero->units[zero->order[done]]->grad->done, wait, err);
    if (status == ZPP_OK) *unit = zero->order[done];
    return status;
}

int zpp_zero_next_reduced(zpp_zero *zero, int done) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    int unit;
    (void)zpp_stream_poll(zero->reduce, &ignored); /* the backward's end says what is wrong */
    (void)zpp_zero_wait_reduced(zero, done, NULL, &unit, &ignored);
    return unit;
}

zpp_status zpp_zero_drop_grad(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    if (!grad) return ZPP_OK;
    memset(grad->present, 0, grad->unit->params);
    grad->dropped |= grad->has;
    grad->has = false;
    return zero->store->drop ? zero->store->drop(zero, grad, err) : ZPP_OK;
}

/* --- shards in a file --------------------------------------------------------------------------------------------- */

zpp_unit_file *zpp_zero_grad_file(const zpp_zero *zero) {
    return zero->store->file ? zero->store->file(zero) : NULL;
}

zpp_status zpp_zero_grads_settle(zpp_zero *zero, struct zpp_aio_fault *fault, struct zpp_err *err) {
    return zero->store->settle ? zero->store->settle(zero, fault, err) : ZPP_OK;
}

zpp_status zpp_zero_grad_open(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    return zero->store->open && grad && grad->has ? zero->store->open(zero, grad, err) : ZPP_OK;
}

zpp_status zpp_zero_grad_close(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    return zero->store->close && grad ? zero->store->close(zero, grad, err) : ZPP_OK;
}

void zpp_zero_keep_grads(zpp_zero *zero) {
    if (zero->store->keep) zero->store->keep(zero);
}

bool zpp_zero_loads_grads(const zpp_zero *zero) {
    return zero->store->load_kept;
}

zpp_status zpp_zero_grad_load(zpp_zero *zero, int index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    return zero->store->load_kept && grad && grad->has ? zero->store->load_kept(zero, grad, fault, err) : ZPP_OK;
}

zpp_status zpp_zero_grad_copy(zpp_zero *zero, int index, size_t first, size_t elems, void *memory, bool write,
                              struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    const size_t shard_elems = zero->units[index]->shard_elems;
    if (!zero->store->copy || !grad || first > shard_elems || elems > shard_elems - first)
        return zpp_fail(err, ZPP_INVALID, "zero: elements %zu to %zu of the gradient of unit %s are not in a file",
                        first, first + elems, zero->units[index]->name);
    return zero->store->copy(zero, grad, first, elems, memory, write, fault, err);
}

/* --- units that were frozen when zpp_zero_seal ran (docs/design/0034) --------------------------------------------- */

static zpp_status join_order(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const zpp_status status = zero->store->add ? zero->store->add(zero, unit->grad, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    if (zpp_keeps_buckets(zero)) zero->kept_bucket_bytes += unit->grad->bucket_bytes;
    int at = zero->order_count++;
    for (; at > 0 && zero->order[at - 1] < unit->index; at--) zero->order[at] = zero->order[at - 1];
    zero->order[at] = unit->index;
    return ZPP_OK;
}

zpp_status zpp_zero_unfreeze(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    char words[ZPP_UNIT_WORDS];
    if (unit->trainable) return ZPP_OK;
    if (!unit->frozen_reserved || !zero->sealed || zero->in_backward || zero->unsettled)
        return zpp_fail(err, ZPP_STATE, "zero: %s cannot be unfrozen: %s", zpp_unit_words(unit, words, sizeof words),
                        unit->frozen_reserved ? "a backward runs, or nothing is sealed"
                        : "it has no room for gradients");
    const zpp_status status = unit->grad ? join_order(zero, unit, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    unit->trainable = true;
    unit->frozen_reserved = false;
    return ZPP_OK;
}

/* --- small answers ------------------------------------------------------------------------------------------------ */

void zpp_zero_skip(zpp_zero *zero, int unit, size_t param) {
    struct zpp_unit_grad *grad = zero->units[unit]->grad;
    if (!grad || grad->seen[param]) return;
    grad->seen[param] = 1;
    grad->missing--;
}

void zpp_zero_share_backward(zpp_zero *zero) {
    zero->shares_backward = true;
}

void zpp_zero_count_use(zpp_zero *zero, int index, bool unseen) {
    struct zpp_unit *unit = zero->units[index];
    if (unit->grad) unit->grad->uses++;
    else unit->uses++;
    unit->used_unseen |= unseen;
    zero->used_again |= zpp_unit_moves(unit) && !unit->shared && zpp_zero_uses(zero, index) > 1;
}

void zpp_zero_reset_uses(zpp_zero *zero) {
    for (int i = 0; i < zero->units_count; i++) {
        if (zero->units[i]->grad) zero->units[i]->grad->uses = 0;
        zero->units[i]->uses = zero->units[i]->forwards = 0;
        zero->units[i]->used_unseen = false;
    }
    zero->used_again = false;
}

int zpp_zero_uses(const zpp_zero *zero, int unit) {
    return zero->units[unit]->grad ? zero->units[unit]->grad->uses : zero->units[unit]->uses;
}

bool zpp_zero_used_once(const zpp_zero *zero, int unit) {
    const struct zpp_unit_grad *grad = zero->units[unit]->grad;
    const int uses = zero->units[unit]->forwards ? zero->units[unit]->forwards : 1;
    return grad ? grad->uses <= uses && !grad->partial : zero->units[unit]->uses <= uses;
}

bool zpp_zero_gets_gradients_once(const zpp_zero *zero, int index) {
    const struct zpp_unit *unit = zero->units[index];
    return zpp_zero_used_once(zero, index) || (!unit->used_unseen && !(unit->grad && unit->grad->partial));
}

const void *zpp_zero_grad_shard(const zpp_zero *zero, int unit, const uint8_t **present) {
    const struct zpp_unit_grad *grad = zero->units[unit]->grad;
    if (!grad || !grad->has) return NULL;
    if (present) *present = grad->present;
    return grad->shard;
}

const void *zpp_zero_grad_address(const zpp_zero *zero, int unit) {
    return zero->store->file ? NULL : zpp_zero_grad_shard(zero, unit, NULL);
}

unsigned char *zpp_zero_whole_gradient(const zpp_zero *zero, int unit) {
    return zero->units[unit]->grad ? zero->units[unit]->grad->shard : NULL;
}

bool zpp_zero_takes_grads(const zpp_zero *zero) { return !zpp_zero_keeps_local_grads(zero) || zero->store->accumulate; }

bool zpp_zero_reduces(const zpp_zero *zero) { return !zpp_zero_keeps_local_grads(zero); }

bool zpp_zero_reduces_each_backward(const zpp_zero *zero) {
    return zero->store->each_backward;
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
