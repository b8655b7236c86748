/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients in a tier: the reduced shards of stages 2 and 3 live in a scratch file, come to memory to be added to, and
 * go again (ZeRO-Infinity, arXiv:2104.07857, section 5). One rank, whose gradients are not reduced, adds them to its
 * shards parameter by parameter.
 *
 *   ON_DISK --load--> READING --load_wait--> LOADED --add, complete--> WRITING --> ON_DISK
 *            \--- no gradient yet ----------/
 *
 * All shards lie in one mapping of this rank's own (unit_file.h), at pages; a fraction of them, the resident bytes,
 * stays in memory. Units are reduced in one order that is known beforehand, so the next shards are read while this one
 * is added to. What is open or being written is bounded; where the disk is slower than the backward, reductions wait,
 * and buckets with them. Bytes a backward: all written; from the second one of a step on all read, too. The step reads
 * them beside the states (struct zpp_step_files).
 *
 * A read or write that fails does not end a backward, on which the other ranks wait: it is kept, nothing goes to the
 * file any more, and zpp_zero_grads_settle returns it, before a norm or a step. Clearing all gradients forgets it.
 *
 * A backward whose units are stepped inside it keeps what is reduced LOADED, until the step has read it and drops it:
 * the last sum of a step is never written. That is the one call that may come while other units are reduced.
 *
 * With delayed steps (step_delayed.h) each shard has two places, one after the other: the step reads the one that it
 * took, while backward fills the other.
 *
 * Threads: the reduce stream's while reductions are under way, else the coordinator's; drop from the latter always.
 */
#include <string.h>

#include "../../comm/reduce.h"
#include "../grad_store.h"
#include "../internal.h"

enum { LEAST_BOUND_BYTES = 32 << 20 };

/* No time-out and no tick: the kernel ends every request on a file. */
static const struct zpp_wait patience = { 0, NULL, NULL };

static bool is_held(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return zpp_unit_file_is_held(zero->grad_file.unit_file, grad->file_index);
}

/* Places for shards, of the units that are held or of the others. */
static zpp_status lay_out_some(zpp_zero *zero, bool held, size_t *largest_bytes, struct zpp_err *err) {
    zpp_unit_file *unit_file = zero->grad_file.unit_file;
    for (int at = 0; at < zero->order_count; at++) {
        const struct zpp_unit *unit = zero->units[zero->order[at]];
        struct zpp_unit_grad *grad = unit->grad;
        const size_t bytes = zpp_grad_shard_bytes(grad);
        if (unit->held != held) continue;
        zpp_status status = zpp_unit_file_add(unit_file, bytes, &grad->file_index, &grad->unit_file_offset_bytes, err);
        if (status == ZPP_OK && zero->delays_steps)
            status = zpp_unit_file_add(unit_file, bytes, &grad->back_file_index, &grad->back_offset_bytes, err);
        if (status != ZPP_OK) return status;
        grad->order_at = at;
        if (bytes > *largest_bytes) *largest_bytes = bytes;
    }
    return ZPP_OK;
}

static zpp_status seal(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_grad_file *grad_file = &zero->grad_file;
    size_t largest_bytes = 0;
    grad_file->newest = &grad_file->oldest;
    zpp_status status = lay_out_some(zero, true, &largest_bytes, err);
    if (status == ZPP_OK && zpp_zero_holds(zero)) status = zpp_unit_file_hold(grad_file->unit_file, err);
    if (status == ZPP_OK) status = lay_out_some(zero, false, &largest_bytes, err);
    if (status != ZPP_OK) return status;
    grad_file->bound_bytes = 2 * largest_bytes > LEAST_BOUND_BYTES ? 2 * largest_bytes : (size_t)LEAST_BOUND_BYTES;
    status = zpp_unit_file_seal(grad_file->unit_file, grad_file->bound_bytes, err);
    for (int at = 0; at < zero->order_count && status == ZPP_OK; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        grad->shard = zpp_unit_file_mapping(grad_file->unit_file) + grad->unit_file_offset_bytes;
        if (zero->delays_steps)
            grad->back_shard = zpp_unit_file_mapping(grad_file->unit_file) + grad->back_offset_bytes;
    }
    if (!zero->delays_steps) return status;
    struct zpp_unit_file_figures seen;
    zpp_unit_file_figures(grad_file->unit_file, &seen);
    zero->back_bytes = seen.resident_bytes / 2;
    return status;
}

/* --- loads and stores --------------------------------------------------------------------------------------------- */

static void keep_failure(struct zpp_grad_file *grad_file, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { 0 };
    const zpp_status status = zpp_unit_file_read_status(grad_file->unit_file, unit, &fault, &err);
    if (status == ZPP_OK || grad_file->status != ZPP_OK) return;
    grad_file->status = status;
    grad_file->err = err;
    grad_file->fault = fault;
}

/* The first failure since all gradients were cleared; `fault` may be NULL. */
static zpp_status first_failure(const struct zpp_grad_file *grad_file, struct zpp_aio_fault *fault,
                                struct zpp_err *err) {
    if (grad_file->status == ZPP_OK) return ZPP_OK;
    *err = grad_file->err;
    if (fault) *fault = grad_file->fault;
    return grad_file->status;
}

static zpp_status finish_write(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait) {
    struct zpp_grad_file *grad_file = &zero->grad_file;
    const zpp_status status = zpp_unit_file_read_wait(grad_file->unit_file, grad->file_index, wait);
    if (status != ZPP_OK) return status;
    keep_failure(grad_file, grad->file_index);
    struct zpp_unit_grad **at = &grad_file->oldest;
    while (*at != grad) at = &(*at)->next_written; /* almost always the first */
    *at = grad->next_written;
    if (!*at) grad_file->newest = at;
    grad->grad_file_state = ZPP_GRAD_FILE_LOADED;
    return ZPP_OK;
}

static zpp_status acquire_memory(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_grad_file *grad_file = &zero->grad_file;
    pthread_mutex_lock(&grad_file->lock);
    const zpp_status status = zpp_unit_file_acquire(grad_file->unit_file, grad->file_index, err);
    if (status == ZPP_OK) grad_file->open_bytes += zpp_grad_shard_bytes(grad);
    pthread_mutex_unlock(&grad_file->lock);
    return status;
}

static zpp_status release_memory(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_grad_file *grad_file = &zero->grad_file;
    grad->grad_file_state = ZPP_GRAD_FILE_ON_DISK;
    pthread_mutex_lock(&grad_file->lock);
    grad_file->open_bytes -= zpp_grad_shard_bytes(grad);
    const zpp_status status = zpp_unit_file_release(grad_file->unit_file, grad->file_index, err);
    pthread_mutex_unlock(&grad_file->lock);
    return status;
}

static bool has_capacity(struct zpp_grad_file *grad_file, size_t bytes) {
    pthread_mutex_lock(&grad_file->lock);
    const bool fits = grad_file->open_bytes + bytes <= grad_file->bound_bytes;
    pthread_mutex_unlock(&grad_file->lock);
    return fits;
}

/* End the oldest writes until `bytes` more fit, or none is under way. */
static zpp_status end_writes_until(zpp_zero *zero, size_t bytes, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_grad_file *grad_file = &zero->grad_file;
    while (grad_file->oldest && !has_capacity(grad_file, bytes)) {
        struct zpp_unit_grad *grad = grad_file->oldest;
        zpp_status status = finish_write(zero, grad, wait);
        if (status == ZPP_OK) status = release_memory(zero, grad, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

static zpp_status load(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_grad_file *grad_file = &zero->grad_file;
    if (is_held(zero, grad) || grad->grad_file_state == ZPP_GRAD_FILE_LOADED
        || grad->grad_file_state == ZPP_GRAD_FILE_READING)
        return ZPP_OK;
    /* what is being written is still in memory */
    if (grad->grad_file_state == ZPP_GRAD_FILE_WRITING) return finish_write(zero, grad, wait);
    zpp_status status = end_writes_until(zero, zpp_grad_shard_bytes(grad), wait, err);
    if (status == ZPP_OK) status = acquire_memory(zero, grad, err);
    if (status != ZPP_OK) return status;
    grad->changed = false;
    grad->grad_file_state = ZPP_GRAD_FILE_LOADED;
    if (!grad->has || grad_file->status != ZPP_OK) return ZPP_OK;
    zpp_unit_file_read_begin(grad_file->unit_file, grad->file_index);
    grad->grad_file_state = ZPP_GRAD_FILE_READING;
    return ZPP_OK;
}

/* Read the next shards in the order of reductions, as many as fit without waiting. */
static zpp_status load_ahead(zpp_zero *zero, int at, struct zpp_err *err) {
    for (at++; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        if (!grad->has || is_held(zero, grad) || grad->grad_file_state != ZPP_GRAD_FILE_ON_DISK) continue;
        if (!has_capacity(&zero->grad_file, zpp_grad_shard_bytes(grad))) return ZPP_OK;
        const zpp_status status = load(zero, grad, NULL, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

/* Load the shard, and the next ones in the order of reductions as long as they fit. */
static zpp_status load_all(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                           struct zpp_err *err) {
    if (grad->grad_file_state == ZPP_GRAD_FILE_LOADED) return ZPP_OK;
    const zpp_status status = load(zero, grad, wait, err);
    return status == ZPP_OK ? load_ahead(zero, grad->order_at, err) : status;
}

static void zero_stale(const zpp_zero *zero, struct zpp_unit_grad *grad) {
    for (size_t i = 0; i < grad->unit->params; i++)
        if (grad->stale[i]) zpp_grad_zero_param(zero, grad, i);
    memset(grad->stale, 0, grad->unit->params);
    grad->any_stale = false;
    grad->changed = true;
}

static zpp_status load_wait(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait) {
    if (grad->grad_file_state == ZPP_GRAD_FILE_READING) {
        const zpp_status status = zpp_unit_file_read_wait(zero->grad_file.unit_file, grad->file_index, wait);
        if (status != ZPP_OK) return status;
        keep_failure(&zero->grad_file, grad->file_index);
        grad->grad_file_state = ZPP_GRAD_FILE_LOADED;
    }
    if (grad->any_stale && grad->grad_file_state == ZPP_GRAD_FILE_LOADED) zero_stale(zero, grad);
    return ZPP_OK;
}

/* Begin to write the shard if it was changed, else release its memory. */
static zpp_status store(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_grad_file *grad_file = &zero->grad_file;
    if (is_held(zero, grad) || grad->grad_file_state != ZPP_GRAD_FILE_LOADED) return ZPP_OK;
    if (!grad->changed || grad_file->status != ZPP_OK) return release_memory(zero, grad, err);
    zpp_unit_file_write_unit(grad_file->unit_file, grad->file_index);
    grad->changed = false;
    grad->grad_file_state = ZPP_GRAD_FILE_WRITING;
    grad->next_written = NULL;
    *grad_file->newest = grad;
    grad_file->newest = &grad->next_written;
    return ZPP_OK;
}

/* Store a shard to which this backward adds nothing more, or keep it for a step inside the backward. */
static zpp_status complete(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    grad->lost = zero->grad_file.status != ZPP_OK;
    return zero->grad_file.keeps ? ZPP_OK : store(zero, grad, err);
}

/* Release the memory of the shard without a write. */
static zpp_status drop(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (grad->grad_file_state == ZPP_GRAD_FILE_READING) status = load_wait(zero, grad, &patience);
    if (grad->grad_file_state == ZPP_GRAD_FILE_WRITING) status = finish_write(zero, grad, &patience);
    if (status != ZPP_OK || grad->grad_file_state != ZPP_GRAD_FILE_LOADED) return status;
    grad->changed = false;
    return release_memory(zero, grad, err);
}

/* Store the shard, and wait for its write. Return the first failure of all shards. */
static zpp_status settle(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    zpp_status status = load_wait(zero, grad, &patience);
    if (status == ZPP_OK) status = store(zero, grad, err);
    if (status == ZPP_OK && grad->grad_file_state == ZPP_GRAD_FILE_WRITING) {
        status = finish_write(zero, grad, &patience);
        if (status == ZPP_OK) status = release_memory(zero, grad, err);
    }
    return status == ZPP_OK ? first_failure(&zero->grad_file, NULL, err) : status;
}

/* --- one rank ----------------------------------------------------------------------------------------------------- */

static zpp_status accumulate(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param, const void *from,
                             const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_unit *unit = grad->unit;
    const size_t elems = unit->param_elems[param];
    zpp_status status = zpp_event_record(grad->written, zero->compute, err);
    if (status == ZPP_OK) status = zpp_event_sync(grad->written, wait, err); /* `from` is complete */
    if (status == ZPP_OK) status = load_all(zero, grad, wait, err);
    if (status == ZPP_OK) status = load_wait(zero, grad, wait);
    if (status != ZPP_OK) return status;
    unsigned char *to = grad->shard + unit->offset_elems[param] * grad->elem_bytes;
    if (grad->present[param]) zpp_reduce_sources(to, unit->grad_dtype, true, &from, 1, unit->grad_dtype, elems, 1.0f);
    else if (elems) memcpy(to, from, elems * grad->elem_bytes);
    grad->present[param] = 1;
    grad->has = grad->changed = true;
    return ZPP_OK;
}

static zpp_status store_all(zpp_zero *zero, struct zpp_err *err) {
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        zpp_status status = load_wait(zero, grad, &patience);
        if (status == ZPP_OK) status = store(zero, grad, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

/* --- clearing ----------------------------------------------------------------------------------------------------- */

static void clear(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param) {
    if (is_held(zero, grad)) {
        zpp_grad_zero_param(zero, grad, param);
        return;
    }
    grad->stale[param] = 1;
    grad->any_stale = true;
}

static void clear_all(zpp_zero *zero) {
    zero->grad_file.status = ZPP_OK;
    for (int at = 0; at < zero->order_count; at++) {
        struct zpp_unit_grad *grad = zero->units[zero->order[at]]->grad;
        memset(grad->stale, 0, grad->unit->params);
        grad->any_stale = false;
    }
}

/* --- the store ---------------------------------------------------------------------------------------------------- */

static zpp_status end_backward(zpp_zero *zero, bool aborted, struct zpp_err *err) {
    return aborted || !zero->grad_file.keeps ? store_all(zero, err) : ZPP_OK;
}

static void count_memory(const zpp_zero *zero, struct zpp_zero_memory *out) {
    struct zpp_unit_file_figures seen;
    zpp_unit_file_figures(zero->grad_file.unit_file, &seen);
    zpp_grad_memory_count(zero, out);
    out->grad_bytes += seen.resident_bytes - zero->back_bytes;
}

/* Exchange the two places that each shard has in the file. */
static zpp_status flip(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    if (!zero->delays_steps)
        return zpp_fail(err, ZPP_STATE, "zero: the gradient of unit %s has no back buffer in its file; call "
                        "zpp_zero_delay_steps before units are added", grad->unit->name);
    const zpp_status status = settle(zero, grad, err);
    if (status != ZPP_OK) return status;
    const struct zpp_unit_grad filled = *grad;
    grad->shard = filled.back_shard;
    grad->file_index = filled.back_file_index;
    grad->unit_file_offset_bytes = filled.back_offset_bytes;
    grad->back_shard = filled.shard;
    grad->back_file_index = filled.file_index;
    grad->back_offset_bytes = filled.unit_file_offset_bytes;
    return ZPP_OK;
}

/* --- for the step and the norm (zero.h) --------------------------------------------------------------------------- */

static zpp_unit_file *file(const zpp_zero *zero) {
    return zero->grad_file.unit_file;
}

static zpp_status settle_all(zpp_zero *zero, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_grad_file *grad_file = &zero->grad_file;
    zpp_status status = store_all(zero, err);
    while (grad_file->oldest && status == ZPP_OK) {
        struct zpp_unit_grad *grad = grad_file->oldest;
        status = finish_write(zero, grad, &patience);
        if (status == ZPP_OK) status = release_memory(zero, grad, err);
    }
    return status == ZPP_OK ? first_failure(grad_file, fault, err) : status;
}

static zpp_status open_grad(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    zpp_status status = load_all(zero, grad, &patience, err);
    if (status == ZPP_OK) status = load_wait(zero, grad, &patience);
    return status == ZPP_OK ? first_failure(&zero->grad_file, NULL, err) : status;
}

static void keep(zpp_zero *zero) {
    zero->grad_file.keeps = true;
}

/* Several ranks: the reduction has loaded the shard, and kept whether something had failed by then. What fails now may
 * be another unit's. */
static zpp_status load_kept(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_aio_fault *fault,
                            struct zpp_err *err) {
    if (zero->ranks > 1) return grad->lost ? first_failure(&zero->grad_file, fault, err) : ZPP_OK;
    const zpp_status status = open_grad(zero, grad, err);
    if (status == ZPP_TIER) *fault = zero->grad_file.fault;
    return status;
}

static zpp_status copy(zpp_zero *zero, struct zpp_unit_grad *grad, size_t first, size_t elems, void *memory, bool write,
                       struct zpp_aio_fault *fault, struct zpp_err *err) {
    const zpp_status status = settle_all(zero, fault, err);
    if (status != ZPP_OK) return status;
    const size_t bytes = grad->elem_bytes;
    return zpp_unit_file_copy(zero->grad_file.unit_file, grad->unit_file_offset_bytes + first * bytes, memory,
                              elems * bytes, write, fault, err);
}

const struct zpp_grad_store zpp_grad_store_nvme = {
    .name = "nvme",
    .each_backward = true,
    .seal = seal,
    .count_memory = count_memory,
    .load = load_all,
    .load_wait = load_wait,
    .complete = complete,
    .drop = drop,
    .clear = clear,
    .clear_all = clear_all,
    .flip = flip,
    .accumulate = accumulate,
    .end_backward = end_backward,
    .file = file,
    .open = open_grad,
    .close = store,
    .settle = settle_all,
    .copy = copy,
    .keep = keep,
    .load_kept = load_kept,
};
