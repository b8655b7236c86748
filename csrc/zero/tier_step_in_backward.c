/* SPDX-License-Identifier: Apache-2.0
 *
 * The step unit by unit, inside the backward (docs/design/0032). Buffers are a write-back cache of records:
 *
 *   FREE --read, ahead or when needed--> HERE --stepped--> CHANGED --its last slice was stepped--> LEAVING --> FREE
 *
 * Slices are expected from the last to the first, as a backward meets them, so their records are read in descending
 * order of the line, as far ahead as buffers go; a record that two slices share is the last of one and the first of the
 * next. Where another order comes, what was read ahead gives way, and what had changed is written and read again.
 *
 * After a failure nothing is under way and nothing is cached.
 */
#include <stdlib.h>
#include <string.h>

#include "../base/wait.h"
#include "tier_internal.h"

enum { MOST_BUFFERS = 64, LEAST_BUFFERS = 4 };

/* The chunks that a slice has a part of; false: none, all of it is held. */
static bool chunks_of(const zpp_tier *tier, const struct tier_slice *slice, size_t *first, size_t *last) {
    const struct tier_line *line = &tier->lines[slice->line];
    const size_t end = slice->begin_elems + slice->elems;
    if (!slice->elems || end <= line->held_elems) return false;
    const size_t begin = slice->begin_elems > line->held_elems ? slice->begin_elems - line->held_elems : 0;
    *first = begin / line->chunk_elems;
    *last = (end - 1 - line->held_elems) / line->chunk_elems;
    return true;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static size_t most_chunks(const zpp_tier *tier) {
    size_t most = 0, first, last;
    for (int i = 0; i < tier->slices_count; i++)
        if (chunks_of(tier, &tier->slices[i], &first, &last) && last - first + 1 > most) most = last - first + 1;
    return most;
}

/* One slice that is stepped and written while the next one is read. */
void tier_backward_step_choose_buffers(zpp_tier *tier) {
    const size_t records = tier->lines[0].chunks + tier->lines[1].chunks;
    size_t buffers = 2 * most_chunks(tier) + 2;
    if (buffers > records) buffers = records;
    if (buffers > MOST_BUFFERS) buffers = MOST_BUFFERS;
    tier->options.buffers = buffers < LEAST_BUFFERS ? LEAST_BUFFERS : (unsigned)buffers;
}

zpp_status tier_backward_step_seal(zpp_tier *tier, struct zpp_err *err) {
    struct tier_backward_step *backward_step = &tier->backward_step;
    size_t room = 1, first, last;
    if (!tier->options.backward_step) return ZPP_OK;
    for (int i = 0; i < tier->slices_count; i++)
        if (chunks_of(tier, &tier->slices[i], &first, &last)) room += last - first + 1;
    backward_step->order = calloc(room, sizeof *backward_step->order);
    for (int i = 0; i < 2; i++) backward_step->left[i] = calloc(tier->lines[i].chunks + 1,
                                                                sizeof *backward_step->left[i]);
    if (!backward_step->order || !backward_step->left[0] || !backward_step->left[1])
        return zpp_fail(err, ZPP_NOMEM, "tier: no memory for the order of %zu records", room);
    size_t before[2] = { SIZE_MAX, SIZE_MAX };
    for (int i = tier->slices_count - 1; i >= 0; i--) {
        const struct tier_slice *slice = &tier->slices[i];
        if (!chunks_of(tier, slice, &first, &last)) continue;
        for (size_t chunk = last + 1; chunk-- > first;) {
            if (chunk == before[slice->line]) continue;
            backward_step->order[backward_step->order_count++] = (struct tier_record){ slice->line, chunk };
            before[slice->line] = chunk;
        }
    }
    return ZPP_OK;
}

void tier_backward_step_drop(zpp_tier *tier) {
    free(tier->backward_step.order);
    free(tier->backward_step.left[0]);
    free(tier->backward_step.left[1]);
}

void tier_backward_step_forget(zpp_tier *tier) {
    for (unsigned i = 0; tier->buffers && i < tier->options.buffers; i++) {
        struct zpp_err ignored = ZPP_ERR_INIT;
        struct tier_buffer *buffer = &tier->buffers[i];
        (void)tier_finish(&buffer->read, NULL, &ignored);
        (void)tier_finish(&buffer->write, NULL, &ignored);
        buffer->state = TIER_FREE;
    }
    tier->backward_step.next = 0;
}

/* --- buffers ------------------------------------------------------------------------------------------------------ */

static void set_state(zpp_tier *tier, struct tier_buffer *buffer, enum tier_buffer_state state) {
    buffer->state = state;
    buffer->since = ++tier->backward_step.clock;
}

static struct tier_buffer *find(zpp_tier *tier, int line, size_t chunk) {
    for (unsigned i = 0; i < tier->options.buffers; i++) {
        struct tier_buffer *buffer = &tier->buffers[i];
        if (buffer->state != TIER_FREE && buffer->line == line && buffer->chunk == chunk) return buffer;
    }
    return NULL;
}

/* Moments that were never written are zeros, and not read. */
static zpp_status begin_read(zpp_tier *tier, struct tier_buffer *buffer, int which, size_t chunk,
                             struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct tier_line *line = &tier->lines[which];
    const size_t stride = tier_chunk_elems(line, chunk), master = line->plane[ZPP_TIER_MASTER] >= 0;
    const size_t planes = line->stepped[chunk] ? line->planes : master;
    zpp_status status = ZPP_OK;
    memset(buffer->memory + planes * stride, 0, (line->planes - planes) * stride * sizeof(float));
    if (planes)
        status = tier_submit(tier, tier_record_offset(line, chunk), buffer->memory, planes * stride * sizeof(float),
                             false, &buffer->read, fault, err);
    if (status != ZPP_OK) return status;
    buffer->line = which;
    buffer->chunk = chunk;
    set_state(tier, buffer, TIER_HERE);
    return ZPP_OK;
}

static zpp_status begin_write(zpp_tier *tier, struct tier_buffer *buffer, struct zpp_aio_fault *fault,
                              struct zpp_err *err) {
    struct tier_line *line = &tier->lines[buffer->line];
    const size_t bytes = line->planes * tier_chunk_elems(line, buffer->chunk) * sizeof(float);
    const zpp_status status = tier_submit(tier, tier_record_offset(line, buffer->chunk), buffer->memory, bytes, true,
                                          &buffer->write, fault, err);
    if (status != ZPP_OK) return status;
    line->stepped[buffer->chunk] = true;
    set_state(tier, buffer, TIER_LEAVING);
    return ZPP_OK;
}

static zpp_status finish_write(zpp_tier *tier, struct tier_buffer *buffer, struct zpp_aio_fault *fault,
                               struct zpp_err *err) {
    const zpp_status status = tier_finish_timed(tier, &buffer->write, fault, err);
    buffer->state = TIER_FREE;
    return status;
}

/* The one of a state that has been in it for the shortest or the longest time; NULL: none. */
static struct tier_buffer *choose(zpp_tier *tier, enum tier_buffer_state state, bool newest) {
    struct tier_buffer *best = NULL;
    for (unsigned i = 0; i < tier->options.buffers; i++) {
        struct tier_buffer *buffer = &tier->buffers[i];
        if (buffer->state == state && (!best || (buffer->since > best->since) == newest)) best = buffer;
    }
    return best;
}

/* Of what is expected next, as much as there are buffers for, without waiting. */
static zpp_status read_ahead(zpp_tier *tier, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct tier_backward_step *backward_step = &tier->backward_step;
    while (backward_step->next < backward_step->order_count) {
        const struct tier_record *record = &backward_step->order[backward_step->next];
        if (!find(tier, record->line, record->chunk)) {
            struct tier_buffer *buffer = choose(tier, TIER_FREE, false);
            if (!buffer) buffer = choose(tier, TIER_LEAVING, false);
            if (!buffer || (buffer->write && !zpp_aio_done(buffer->write))) return ZPP_OK;
            zpp_status status = finish_write(tier, buffer, fault, err);
            if (status == ZPP_OK) status = begin_read(tier, buffer, record->line, record->chunk, fault, err);
            if (status != ZPP_OK) return status;
        }
        backward_step->next++;
    }
    return ZPP_OK;
}

/* An empty buffer; best one that nobody misses. */
static zpp_status make_room(zpp_tier *tier, struct tier_buffer **out, struct zpp_aio_fault *fault,
                            struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    struct tier_buffer *buffer = choose(tier, TIER_FREE, false);
    if (!buffer) buffer = choose(tier, TIER_LEAVING, false);
    if (!buffer) buffer = choose(tier, TIER_HERE, true); /* expected last of those read ahead */
    if (!buffer) {
        buffer = choose(tier, TIER_CHANGED, false);
        status = begin_write(tier, buffer, fault, err);
    }
    if (status == ZPP_OK) status = tier_finish_timed(tier, &buffer->read, fault, err);
    if (status == ZPP_OK) status = finish_write(tier, buffer, fault, err);
    if (status == ZPP_OK) *out = buffer;
    return status;
}

/* The buffer that has the record, whole, and may be changed. */
static zpp_status take(zpp_tier *tier, int line, size_t chunk, struct tier_buffer **out, struct zpp_aio_fault *fault,
                       struct zpp_err *err) {
    struct tier_buffer *buffer = find(tier, line, chunk);
    zpp_status status = ZPP_OK;
    if (!buffer) {
        status = make_room(tier, &buffer, fault, err);
        if (status == ZPP_OK) status = begin_read(tier, buffer, line, chunk, fault, err);
    }
    if (status == ZPP_OK) status = tier_finish_timed(tier, &buffer->read, fault, err);
    if (status == ZPP_OK) status = tier_finish_timed(tier, &buffer->write, fault, err);
    if (status == ZPP_OK) *out = buffer;
    return status;
}

/* --- the calls ---------------------------------------------------------------------------------------------------- */

static zpp_status fail(zpp_tier *tier, zpp_status status) {
    if (status == ZPP_OK) return status;
    tier->torn = true;
    tier->backward_step.open = false;
    tier_backward_step_forget(tier);
    return status;
}

zpp_status zpp_tier_backward_step_begin(zpp_tier *tier, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct tier_backward_step *backward_step = &tier->backward_step;
    size_t first, last;
    if (tier->torn || !tier->sealed || !tier->options.backward_step || backward_step->open)
        return zpp_fail(err, ZPP_STATE, "tier: the states in %s are %s", tier->path,
                        tier->torn         ? "torn by a step that failed; load a checkpoint first"
                        : !tier->sealed    ? "not sealed yet"
                        : backward_step->open      ? "in the middle of a step"
                                           : "not made for steps inside a backward");
    for (int i = 0; i < 2; i++) memset(backward_step->left[i], 0,
                                       tier->lines[i].chunks * sizeof *backward_step->left[i]);
    for (int i = 0; i < tier->slices_count; i++) {
        const struct tier_slice *slice = &tier->slices[i];
        if (!chunks_of(tier, slice, &first, &last)) continue;
        for (size_t chunk = first; chunk <= last; chunk++) backward_step->left[slice->line][chunk]++;
    }
    backward_step->open = true;
    /* A read that fails is no more than a read: nothing was stepped. */
    const zpp_status status = read_ahead(tier, fault, err);
    if (status != ZPP_OK) {
        backward_step->open = false;
        tier_backward_step_forget(tier);
    }
    return status;
}

static zpp_status step_visit(zpp_tier *tier, struct tier_plan *plan, const struct tier_visit *visit, float grad_scale,
                             zpp_pool *pool, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct tier_buffer *buffer = NULL;
    zpp_status status = take(tier, visit->line, visit->chunk, &buffer, fault, err);
    if (status != ZPP_OK) return status;
    tier_plan_bind(tier, plan, visit, buffer->memory);
    zpp_update_step(plan->segments, visit->cuts, grad_scale, pool);
    set_state(tier, buffer, TIER_CHANGED);
    if (--tier->backward_step.left[visit->line][visit->chunk] == 0) status = begin_write(tier, buffer, fault, err);
    return status == ZPP_OK ? read_ahead(tier, fault, err) : status;
}

zpp_status zpp_tier_backward_step_unit(zpp_tier *tier, const struct zpp_tier_piece *pieces, size_t pieces_count,
                                       float grad_scale, zpp_pool *pool, struct zpp_aio_fault *fault,
                                       struct zpp_err *err) {
    if (!tier->backward_step.open)
        return zpp_fail(err, ZPP_STATE, "tier: a slice is stepped in %s before the step has begun", tier->path);
    const uint64_t began_ns = zpp_now_ns();
    struct tier_plan plan = { 0 };
    zpp_status status = tier_plan_make(tier, pieces, pieces_count, &plan, err);
    if (status == ZPP_OK) zpp_update_step(plan.segments, plan.held_count, grad_scale, pool);
    for (size_t i = plan.visits_count; i-- > 0 && status == ZPP_OK;)
        status = step_visit(tier, &plan, &plan.visits[i], grad_scale, pool, fault, err);
    tier_plan_drop(&plan);
    tier->step_ns += zpp_now_ns() - began_ns;
    return fail(tier, status);
}

zpp_status zpp_tier_backward_step_poll(zpp_tier *tier, struct zpp_aio_fault *fault, struct zpp_err *err) {
    return tier->backward_step.open ? fail(tier, read_ahead(tier, fault, err)) : ZPP_OK;
}

zpp_status zpp_tier_backward_step_end(zpp_tier *tier, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!tier->backward_step.open) return ZPP_OK;
    const uint64_t began_ns = zpp_now_ns();
    zpp_status status = ZPP_OK;
    /* Records that a slice without gradients has a part of. */
    for (unsigned i = 0; i < tier->options.buffers && status == ZPP_OK; i++)
        if (tier->buffers[i].state == TIER_CHANGED) status = begin_write(tier, &tier->buffers[i], fault, err);
    for (unsigned i = 0; i < tier->options.buffers && status == ZPP_OK; i++)
        if (tier->buffers[i].state == TIER_LEAVING) status = finish_write(tier, &tier->buffers[i], fault, err);
    tier->backward_step.open = false;
    tier->backward_step.next = 0;
    tier->steps++;
    tier->step_ns += zpp_now_ns() - began_ns;
    return fail(tier, status);
}

void zpp_tier_backward_step_ahead(zpp_tier *tier) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    if (tier->torn || tier->backward_step.open) return;
    if (read_ahead(tier, &fault, &ignored) != ZPP_OK) tier_backward_step_forget(tier);
}
