/* SPDX-License-Identifier: Apache-2.0
 *
 * How reduced slices come from their file and go back. See slices.h.
 */
#include "slices.h"

#include <string.h>

#include "../comm/reduce.h"
#include "internal.h"

enum { LEAST_BOUND_BYTES = 32 << 20 };

/* No time-out and no tick: the kernel ends every request on a file. */
static const struct zpp_wait patience = { 0, NULL, NULL };

static bool is_held(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return zpp_unit_file_is_held(zero->slices.unit_file, grad->file_index);
}

zpp_status zpp_slices_seal(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_slices *slices = &zero->slices;
    size_t largest_bytes = 0;
    slices->newest = &slices->oldest;
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        const zpp_status status =
            zpp_unit_file_add(slices->unit_file, zpp_grad_slice_bytes(grad), &grad->file_index,
                              &grad->unit_file_offset_bytes, err);
        if (status != ZPP_OK) return status;
        if (zero->delays_steps) {
            const zpp_status second = zpp_unit_file_add(slices->unit_file, zpp_grad_slice_bytes(grad),
                                                        &grad->unit_file_taken,
                                                        &grad->unit_file_taken_offset_bytes, err);
            if (second != ZPP_OK) return second;
        }
        grad->order_at = at;
        if (zpp_grad_slice_bytes(grad) > largest_bytes) largest_bytes = zpp_grad_slice_bytes(grad);
    }
    slices->bound_bytes = 2 * largest_bytes > LEAST_BOUND_BYTES ? 2 * largest_bytes : (size_t)LEAST_BOUND_BYTES;
    const zpp_status status = zpp_unit_file_seal(slices->unit_file, slices->bound_bytes, err);
    for (int at = 0; at < zero->order_count && status == ZPP_OK; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        grad->slice = zpp_unit_file_mapping(slices->unit_file) + grad->unit_file_offset_bytes;
        if (zero->delays_steps)
            grad->taken = zpp_unit_file_mapping(slices->unit_file) + grad->unit_file_taken_offset_bytes;
    }
    if (!zero->delays_steps) return status;
    struct zpp_unit_file_figures seen;
    zpp_unit_file_figures(slices->unit_file, &seen);
    zero->taken_bytes = seen.cut_bytes / 2;
    return status;
}

/* --- coming and going --------------------------------------------------------------------------------------------- */

static void keep_failure(struct zpp_slices *slices, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { 0 };
    const zpp_status status = zpp_unit_file_read_status(slices->unit_file, unit, &fault, &err);
    if (status == ZPP_OK || slices->status != ZPP_OK) return;
    slices->status = status;
    slices->err = err;
    slices->fault = fault;
}

static zpp_status finish_write(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait) {
    struct zpp_slices *slices = &zero->slices;
    const zpp_status status = zpp_unit_file_read_wait(slices->unit_file, grad->file_index, wait);
    if (status != ZPP_OK) return status;
    keep_failure(slices, grad->file_index);
    struct zpp_unit_grad **at = &slices->oldest;
    while (*at != grad) at = &(*at)->next_written; /* almost always the first */
    *at = grad->next_written;
    if (!*at) slices->newest = at;
    grad->slice_state = ZPP_SLICE_HERE;
    return ZPP_OK;
}

static zpp_status come(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_slices *slices = &zero->slices;
    pthread_mutex_lock(&slices->lock);
    const zpp_status status = zpp_unit_file_acquire(slices->unit_file, grad->file_index, err);
    if (status == ZPP_OK) slices->open_bytes += zpp_grad_slice_bytes(grad);
    pthread_mutex_unlock(&slices->lock);
    return status;
}

static zpp_status let_go(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_slices *slices = &zero->slices;
    grad->slice_state = ZPP_SLICE_AWAY;
    pthread_mutex_lock(&slices->lock);
    slices->open_bytes -= zpp_grad_slice_bytes(grad);
    const zpp_status status = zpp_unit_file_release(slices->unit_file, grad->file_index, err);
    pthread_mutex_unlock(&slices->lock);
    return status;
}

static bool is_room(struct zpp_slices *slices, size_t bytes) {
    pthread_mutex_lock(&slices->lock);
    const bool fits = slices->open_bytes + bytes <= slices->bound_bytes;
    pthread_mutex_unlock(&slices->lock);
    return fits;
}

/* The oldest writes end until `bytes` more fit, or none is under way. */
static zpp_status make_room(zpp_zero *zero, size_t bytes, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_slices *slices = &zero->slices;
    while (slices->oldest && !is_room(slices, bytes)) {
        struct zpp_unit_grad *grad = slices->oldest;
        zpp_status status = finish_write(zero, grad, wait);
        if (status == ZPP_OK) status = let_go(zero, grad, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

static zpp_status take(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_slices *slices = &zero->slices;
    if (is_held(zero, grad) || grad->slice_state == ZPP_SLICE_HERE || grad->slice_state == ZPP_SLICE_READING)
        return ZPP_OK;
    if (grad->slice_state == ZPP_SLICE_WRITING) return finish_write(zero, grad, wait); /* its contents are there */
    zpp_status status = make_room(zero, zpp_grad_slice_bytes(grad), wait, err);
    if (status == ZPP_OK) status = come(zero, grad, err);
    if (status != ZPP_OK) return status;
    grad->changed = false;
    grad->slice_state = ZPP_SLICE_HERE;
    if (!grad->has || slices->status != ZPP_OK) return ZPP_OK;
    zpp_unit_file_read_begin(slices->unit_file, grad->file_index);
    grad->slice_state = ZPP_SLICE_READING;
    return ZPP_OK;
}

/* What comes next, as far as there is room for it without waiting. */
static zpp_status take_ahead(zpp_zero *zero, int at, struct zpp_err *err) {
    for (at++; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        if (!grad->has || is_held(zero, grad) || grad->slice_state != ZPP_SLICE_AWAY) continue;
        if (!is_room(&zero->slices, zpp_grad_slice_bytes(grad))) return ZPP_OK;
        const zpp_status status = take(zero, grad, NULL, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

zpp_status zpp_slices_take(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                           struct zpp_err *err) {
    if (grad->slice_state == ZPP_SLICE_HERE) return ZPP_OK;
    const zpp_status status = take(zero, grad, wait, err);
    return status == ZPP_OK ? take_ahead(zero, grad->order_at, err) : status;
}

static void zero_param(const zpp_zero *zero, struct zpp_unit_grad *grad, size_t param) {
    const struct zpp_unit *unit = grad->unit;
    const struct zpp_unit one = { .params = 1, .param_elems = &unit->param_elems[param],
                                  .offset_elems = &unit->offset_elems[param], .shard_elems = unit->shard_elems };
    struct zpp_piece pieces[1];
    if (!zpp_unit_pieces(&one, zero->rank, pieces)) return;
    const size_t at = pieces[0].offset_elems - (size_t)zero->rank * unit->shard_elems;
    memset(grad->slice + at * grad->elem_bytes, 0, pieces[0].elems * grad->elem_bytes);
}

static void zero_stale(const zpp_zero *zero, struct zpp_unit_grad *grad) {
    for (size_t i = 0; i < grad->unit->params; i++)
        if (grad->stale[i]) zero_param(zero, grad, i);
    memset(grad->stale, 0, grad->unit->params);
    grad->any_stale = false;
    grad->changed = true;
}

zpp_status zpp_slices_arrive(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait) {
    if (grad->slice_state == ZPP_SLICE_READING) {
        const zpp_status status = zpp_unit_file_read_wait(zero->slices.unit_file, grad->file_index, wait);
        if (status != ZPP_OK) return status;
        keep_failure(&zero->slices, grad->file_index);
        grad->slice_state = ZPP_SLICE_HERE;
    }
    if (grad->any_stale && grad->slice_state == ZPP_SLICE_HERE) zero_stale(zero, grad);
    return ZPP_OK;
}

zpp_status zpp_slices_give(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_slices *slices = &zero->slices;
    if (is_held(zero, grad) || grad->slice_state != ZPP_SLICE_HERE) return ZPP_OK;
    if (!grad->changed || slices->status != ZPP_OK) return let_go(zero, grad, err);
    zpp_unit_file_write_unit(slices->unit_file, grad->file_index);
    grad->changed = false;
    grad->slice_state = ZPP_SLICE_WRITING;
    grad->next_written = NULL;
    *slices->newest = grad;
    slices->newest = &grad->next_written;
    return ZPP_OK;
}

zpp_status zpp_slices_complete(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    grad->lost = zero->slices.status != ZPP_OK;
    return zero->slices.keeps ? ZPP_OK : zpp_slices_give(zero, grad, err);
}

zpp_status zpp_slices_drop(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (grad->slice_state == ZPP_SLICE_READING) status = zpp_slices_arrive(zero, grad, &patience);
    if (grad->slice_state == ZPP_SLICE_WRITING) status = finish_write(zero, grad, &patience);
    if (status != ZPP_OK || grad->slice_state != ZPP_SLICE_HERE) return status;
    grad->changed = false;
    return let_go(zero, grad, err);
}

zpp_status zpp_slices_settle(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    zpp_status status = zpp_slices_arrive(zero, grad, &patience);
    if (status == ZPP_OK) status = zpp_slices_give(zero, grad, err);
    if (status == ZPP_OK && grad->slice_state == ZPP_SLICE_WRITING) {
        status = finish_write(zero, grad, &patience);
        if (status == ZPP_OK) status = let_go(zero, grad, err);
    }
    if (status != ZPP_OK || zero->slices.status == ZPP_OK) return status;
    *err = zero->slices.err;
    return zero->slices.status;
}

/* --- one rank ----------------------------------------------------------------------------------------------------- */

zpp_status zpp_slices_add(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param, const void *from,
                          const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_unit *unit = grad->unit;
    const size_t elems = unit->param_elems[param];
    zpp_status status = zpp_event_record(grad->written, zero->compute, err);
    if (status == ZPP_OK) status = zpp_event_sync(grad->written, wait, err); /* `from` is complete */
    if (status == ZPP_OK) status = zpp_slices_take(zero, grad, wait, err);
    if (status == ZPP_OK) status = zpp_slices_arrive(zero, grad, wait);
    if (status != ZPP_OK) return status;
    unsigned char *to = grad->slice + unit->offset_elems[param] * grad->elem_bytes;
    if (grad->present[param]) zpp_reduce_sources(to, unit->grad_dtype, true, &from, 1, unit->grad_dtype, elems, 1.0f);
    else if (elems) memcpy(to, from, elems * grad->elem_bytes);
    grad->present[param] = 1;
    grad->has = grad->changed = true;
    return ZPP_OK;
}

zpp_status zpp_slices_give_all(zpp_zero *zero, struct zpp_err *err) {
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        zpp_status status = zpp_slices_arrive(zero, grad, &patience);
        if (status == ZPP_OK) status = zpp_slices_give(zero, grad, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

/* --- forgetting --------------------------------------------------------------------------------------------------- */

void zpp_slices_clear(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param) {
    if (!zero->slices.unit_file || is_held(zero, grad)) {
        zero_param(zero, grad, param);
        return;
    }
    grad->stale[param] = 1;
    grad->any_stale = true;
}

void zpp_slices_clear_all(zpp_zero *zero) {
    zero->slices.status = ZPP_OK;
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        memset(grad->stale, 0, grad->unit->params);
        grad->any_stale = false;
    }
}

/* --- what the step and the norm ask (zero.h) ---------------------------------------------------------------------- */

zpp_unit_file *zpp_zero_grad_file(zpp_zero *zero) {
    return zero->slices.unit_file;
}

zpp_status zpp_zero_grads_settle(zpp_zero *zero, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_slices *slices = &zero->slices;
    if (!slices->unit_file) return ZPP_OK;
    zpp_status status = zpp_slices_give_all(zero, err);
    while (slices->oldest && status == ZPP_OK) {
        struct zpp_unit_grad *grad = slices->oldest;
        status = finish_write(zero, grad, &patience);
        if (status == ZPP_OK) status = let_go(zero, grad, err);
    }
    if (status != ZPP_OK || slices->status == ZPP_OK) return status;
    *err = slices->err;
    *fault = slices->fault;
    return slices->status;
}

zpp_status zpp_zero_grad_open(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    if (!zero->slices.unit_file || !grad || !grad->has) return ZPP_OK;
    zpp_status status = zpp_slices_take(zero, grad, &patience, err);
    if (status == ZPP_OK) status = zpp_slices_arrive(zero, grad, &patience);
    if (status != ZPP_OK || zero->slices.status == ZPP_OK) return status;
    *err = zero->slices.err;
    return zero->slices.status;
}

zpp_status zpp_zero_grad_close(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    return zero->slices.unit_file && grad ? zpp_slices_give(zero, grad, err) : ZPP_OK;
}

void zpp_zero_keep_grads(zpp_zero *zero) {
    zero->slices.keeps = zero->slices.unit_file != NULL;
}

/* Several ranks: the reduction has brought it, and says whether something had failed by then; it may be another one's
 * that fails now. */
zpp_status zpp_zero_grad_here(zpp_zero *zero, int index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_unit_grad *grad = zero->units[index]->grad;
    if (!zero->slices.unit_file || !grad || !grad->has) return ZPP_OK;
    if (zero->ranks == 1) {
        const zpp_status status = zpp_zero_grad_open(zero, index, err);
        if (status == ZPP_TIER) *fault = zero->slices.fault;
        return status;
    }
    if (!grad->lost) return ZPP_OK;
    *fault = zero->slices.fault;
    *err = zero->slices.err;
    return zero->slices.status;
}

zpp_status zpp_zero_grad_copy(zpp_zero *zero, int index, size_t first, size_t elems, void *memory, bool write,
                              struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct zpp_unit_grad *grad = zero->units[index]->grad;
    if (!zero->slices.unit_file || !grad || first > grad->unit->shard_elems || elems > grad->unit->shard_elems - first)
        return zpp_fail(err, ZPP_INVALID, "zero: elements %zu to %zu of the gradient of unit %s are not in a file",
                        first, first + elems, zero->units[index]->name);
    const zpp_status status = zpp_zero_grads_settle(zero, fault, err);
    if (status != ZPP_OK) return status;
    const size_t bytes = grad->elem_bytes;
    return zpp_unit_file_copy(zero->slices.unit_file, grad->unit_file_offset_bytes + first * bytes, memory,
                              elems * bytes, write, fault, err);
}
