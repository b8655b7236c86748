/* SPDX-License-Identifier: Apache-2.0
 *
 * The streamed step. Pieces are cut at the borders of chunks; then, chunk by chunk, with four buffers:
 *
 *   read     k+1, k+2        submitted before chunk k is stepped
 *   step     k               in this thread and the pool's
 *   write    k-1             the buffer is read into again only when it is done
 *
 * What is held in memory is stepped while the first chunks are read. Parameters and gradients that are in files
 * themselves go through a window of theirs beside each buffer (unit_file.h). Nothing allocated here outlives the call.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../../base/timeline.h"
#include "../../base/wait.h"
#include "optim_file_internal.h"

static bool grow(void **at, size_t *room, size_t count, size_t size) {
    if (count < *room) return true;
    const size_t wanted = *room ? 2 * *room : 256;
    void *memory = realloc(*at, wanted * size);
    if (!memory) return false;
    *at = memory;
    *room = wanted;
    return true;
}

/* Elements [from, from + elems) of a segment, without its states. */
static struct zpp_optim_segment part_of(const struct zpp_optim_segment *whole, size_t from, size_t elems) {
    struct zpp_optim_segment part = *whole;
    part.grad = (const unsigned char *)whole->grad + from * zpp_dtype_bytes(whole->grad_dtype);
    if (whole->param) part.param = whole->param + from;
    if (whole->param_out) part.param_out = (unsigned char *)whole->param_out + from * zpp_dtype_bytes(whole->out_dtype);
    part.elems = elems;
    return part;
}

/* `planes` of `stride` elements each, from `inside` on. */
static void bind_states(const struct optim_file_line *line, struct zpp_optim_segment *segment, float *planes,
                        size_t stride, size_t inside) {
    float **const states[ZPP_TIER_KINDS] = { &segment->param, &segment->exp_avg, &segment->exp_avg_sq,
                                             &segment->max_exp_avg_sq };
    for (int kind = 0; kind < ZPP_TIER_KINDS; kind++) {
        const int plane = line->plane[kind];
        if (plane >= 0 && (kind == ZPP_TIER_MASTER || *states[kind]))
            *states[kind] = planes + (size_t)plane * stride + inside;
    }
}

static bool add_cut(struct optim_file_plan *plan, int line, size_t chunk, size_t inside,
                    struct zpp_optim_segment segment) {
    const struct optim_file_visit *last = plan->visits_count ? &plan->visits[plan->visits_count - 1] : NULL;
    if (!last || last->line != line || last->chunk != chunk) {
        if (!grow((void **)&plan->visits, &plan->visits_room, plan->visits_count, sizeof *plan->visits)) return false;
        plan->visits[plan->visits_count++] =
            (struct optim_file_visit){ .line = line, .chunk = chunk, .first_cut = plan->cuts_count };
    }
    if (!grow((void **)&plan->cuts, &plan->cuts_room, plan->cuts_count, sizeof *plan->cuts)) return false;
    plan->cuts[plan->cuts_count++] = (struct optim_file_cut){ segment, inside };
    plan->visits[plan->visits_count - 1].cuts++;
    return true;
}

/* One piece: its held part to `segments`, the rest to visits. */
static bool plan_piece(const zpp_optim_file *optim_file, const struct zpp_optim_file_piece *piece, int line_index,
                       struct optim_file_plan *plan) {
    const struct optim_file_line *line = &optim_file->lines[line_index];
    size_t at = optim_file->shards[piece->shard].begin_elems + piece->first;
    for (size_t done = 0; done < piece->segment.elems;) {
        const bool held = at < line->held_elems;
        const size_t beyond = held ? 0 : at - line->held_elems, chunk = beyond / line->chunk_elems;
        const size_t inside = beyond % line->chunk_elems;
        size_t run = held ? line->held_elems - at : line->chunk_elems - inside;
        if (run > piece->segment.elems - done) run = piece->segment.elems - done;
        struct zpp_optim_segment part = part_of(&piece->segment, done, run);
        if (!held) {
            if (!add_cut(plan, line_index, chunk, inside, part)) return false;
        } else {
            if (!grow((void **)&plan->segments, &plan->segments_room, plan->held_count, sizeof *plan->segments))
                return false;
            bind_states(line, &part, line->held, line->held_elems, at);
            plan->segments[plan->held_count++] = part;
        }
        done += run;
        at += run;
    }
    return true;
}

static size_t most_cuts(const struct optim_file_plan *plan) {
    size_t most = 1;
    for (size_t i = 0; i < plan->visits_count; i++)
        if (plan->visits[i].cuts > most) most = plan->visits[i].cuts;
    return most;
}

/* Line after line, so that a chunk is visited once. */
zpp_status optim_file_plan_make(const zpp_optim_file *optim_file, const struct zpp_optim_file_piece *pieces,
                                size_t pieces_count, struct optim_file_plan *plan, struct zpp_err *err) {
    bool memory = true;
    for (int line = 0; line < 2; line++)
        for (size_t i = 0; i < pieces_count && memory; i++)
            if (optim_file->shards[pieces[i].shard].line == line) memory = plan_piece(optim_file, &pieces[i], line,
                                                                                      plan);
    while (memory && plan->segments_room < most_cuts(plan))
        memory = grow((void **)&plan->segments, &plan->segments_room, plan->segments_room, sizeof *plan->segments);
    if (memory) return ZPP_OK;
    return zpp_fail(err, ZPP_NOMEM, "tier: no memory for the plan of a step over %zu pieces", pieces_count);
}

void optim_file_plan_drop(struct optim_file_plan *plan) {
    free(plan->cuts);
    free(plan->visits);
    free(plan->segments);
}

void optim_file_plan_bind(const zpp_optim_file *optim_file, struct optim_file_plan *plan,
                          const struct optim_file_visit *visit, float *memory) {
    const struct optim_file_line *line = &optim_file->lines[visit->line];
    for (size_t i = 0; i < visit->cuts; i++) {
        const struct optim_file_cut *cut = &plan->cuts[visit->first_cut + i];
        plan->segments[i] = cut->segment;
        bind_states(line, &plan->segments[i], memory, optim_file_chunk_elems(line, visit->chunk), cut->inside);
    }
}

/* --- the pipeline ------------------------------------------------------------------------------------------------- */

zpp_status optim_file_finish_timed(zpp_optim_file *optim_file, zpp_aio_request **request, struct zpp_aio_fault *fault,
                                   struct zpp_err *err) {
    if (!*request) return ZPP_OK;
    const uint64_t before_ns = zpp_now_ns();
    const zpp_status status = optim_file_finish(request, fault, err);
    optim_file->waited_ns += zpp_now_ns() - before_ns;
    if (zpp_span_begin()) zpp_span_end(before_ns, ZPP_SPAN_WAIT, "for states in a file", 0);
    return status;
}

/* Read visit `index` into its buffer, once that buffer's write is done. Moments that were never written are not read.
 */
static zpp_status begin_read(zpp_optim_file *optim_file, const struct optim_file_plan *plan, size_t index,
                             struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (index >= plan->visits_count) return ZPP_OK;
    struct optim_file_buffer *buffer = &optim_file->buffers[index % optim_file->options.buffers];
    const struct optim_file_visit *visit = &plan->visits[index];
    zpp_status status = optim_file_finish_timed(optim_file, &buffer->write, fault, err);
    if (status == ZPP_OK && plan->windows)
        status = zpp_unit_file_window_open(&plan->files, index, &plan->cuts[visit->first_cut].segment, visit->cuts,
                                           sizeof *plan->cuts, fault, err);
    if (status != ZPP_OK) return status;
    const struct optim_file_line *line = &optim_file->lines[visit->line];
    const bool master = line->plane[ZPP_TIER_MASTER] >= 0;
    const size_t planes = line->stepped[visit->chunk] ? line->planes : (size_t)master;
    const size_t bytes = planes * optim_file_chunk_elems(line, visit->chunk) * sizeof(float);
    if (!bytes) return ZPP_OK;
    return optim_file_submit(optim_file, optim_file_record_offset(line, visit->chunk), buffer->memory, bytes, false,
                             &buffer->read, fault, err);
}

static zpp_status step_visit(zpp_optim_file *optim_file, struct optim_file_plan *plan, size_t index, float grad_scale,
                             zpp_pool *pool, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct optim_file_buffer *buffer = &optim_file->buffers[index % optim_file->options.buffers];
    const struct optim_file_visit *visit = &plan->visits[index];
    struct optim_file_line *line = &optim_file->lines[visit->line];
    const size_t stride = optim_file_chunk_elems(line, visit->chunk), master = line->plane[ZPP_TIER_MASTER] >= 0;
    zpp_status status = optim_file_finish_timed(optim_file, &buffer->read, fault, err);
    if (status == ZPP_OK && plan->windows) status = zpp_unit_file_window_ready(&plan->files, index, fault, err);
    if (status != ZPP_OK) return status;
    if (!line->stepped[visit->chunk])
        memset(buffer->memory + master * stride, 0, (line->planes - master) * stride * sizeof(float));
    optim_file_plan_bind(optim_file, plan, visit, buffer->memory);
    zpp_optim_step(plan->segments, visit->cuts, grad_scale, pool);
    status = optim_file_submit(optim_file, optim_file_record_offset(line, visit->chunk), buffer->memory,
                               line->planes * stride * sizeof(float), true, &buffer->write, fault, err);
    if (status == ZPP_OK) line->stepped[visit->chunk] = true;
    if (status == ZPP_OK && plan->windows) status = zpp_unit_file_window_write(&plan->files, index, fault, err);
    return status;
}

/* What is held: where its parameters or gradients are in a file, before the visits, whose windows are the same. */
static zpp_status step_held(struct optim_file_plan *plan, float grad_scale, zpp_pool *pool, struct zpp_aio_fault *fault,
                            struct zpp_err *err) {
    bool torn;
    return zpp_unit_file_step(&plan->files, plan->segments, plan->held_count, grad_scale, pool, &torn, fault, err);
}

static zpp_status stream(zpp_optim_file *optim_file, struct optim_file_plan *plan, float grad_scale, zpp_pool *pool,
                         struct zpp_aio_fault *fault, struct zpp_err *err) {
    const size_t ahead = optim_file->options.buffers - 1;
    zpp_status status = ZPP_OK;
    if (plan->windows) status = step_held(plan, grad_scale, pool, fault, err);
    for (size_t i = 0; i < ahead && status == ZPP_OK; i++) status = begin_read(optim_file, plan, i, fault, err);
    if (!plan->windows && status == ZPP_OK) status = step_held(plan, grad_scale, pool, fault, err);
    for (size_t i = 0; i < plan->visits_count && status == ZPP_OK; i++) {
        status = step_visit(optim_file, plan, i, grad_scale, pool, fault, err);
        if (status == ZPP_OK) status = begin_read(optim_file, plan, i + ahead, fault, err);
    }
    return status;
}

/* Nothing may be under way when the call returns; the first failure is the one that is told. */
static zpp_status settle(zpp_optim_file *optim_file, const struct zpp_step_files *files, zpp_status status,
                         struct zpp_aio_fault *fault, struct zpp_err *err) {
    for (unsigned i = 0; i < optim_file->options.buffers; i++) {
        zpp_aio_request **const requests[] = { &optim_file->buffers[i].read, &optim_file->buffers[i].write };
        for (int which = 0; which < 2; which++) {
            struct zpp_aio_fault other_fault;
            struct zpp_err other = ZPP_ERR_INIT;
            if (status != ZPP_OK) (void)optim_file_finish_timed(optim_file, requests[which], &other_fault, &other);
            else status = optim_file_finish_timed(optim_file, requests[which], fault, err);
        }
    }
    return zpp_unit_file_settle(files, status, fault, err);
}

zpp_status zpp_optim_file_step(zpp_optim_file *optim_file, const struct zpp_optim_file_piece *pieces,
                               size_t pieces_count,
                               const struct zpp_step_files *files, float grad_scale, zpp_pool *pool,
                               struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (optim_file->torn || !optim_file->sealed)
        return zpp_fail(err, ZPP_STATE, "tier: the states in %s are %s", optim_file->path,
                        optim_file->torn ? "torn by a step that failed; load a checkpoint first" : "not sealed yet");
    const bool windows = files->params || files->grads;
    if (windows && optim_file->options.buffers > ZPP_UNIT_FILE_WINDOWS)
        return zpp_fail(err, ZPP_INVALID, "tier: %u buffers with parameters or gradients in a file, wanted at most %d",
                        optim_file->options.buffers, (int)ZPP_UNIT_FILE_WINDOWS);
    const uint64_t began_ns = zpp_now_ns();
    struct optim_file_plan plan = { .files = *files, .windows = windows };
    zpp_status status = optim_file_plan_make(optim_file, pieces, pieces_count, &plan, err);
    if (status != ZPP_OK) {
        optim_file_plan_drop(&plan);
        return status;
    }
    status = settle(optim_file, files, stream(optim_file, &plan, grad_scale, pool, fault, err), fault, err);
    optim_file_plan_drop(&plan);
    optim_file->torn = status != ZPP_OK;
    optim_file->steps++;
    optim_file->step_ns += zpp_now_ns() - began_ns;
    return status;
}
