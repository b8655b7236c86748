/* SPDX-License-Identifier: Apache-2.0
 *
 * The streamed step. Pieces are cut at the borders of chunks; then the chunks go through the pipeline (pipeline.h).
 * Parameters and gradients that are in files themselves go through a window of theirs beside each buffer (unit_file.h).
 * Nothing allocated here outlives the call.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../../base/mem.h"
#include "../../base/timeline.h"
#include "../../base/wait.h"
#include "optim_file_internal.h"

size_t optim_file_chunk_at(const struct record_stream *stream, size_t at, size_t *inside) {
    const size_t wanted = at - stream->held_elems;
    size_t first = 0, last = stream->chunks - 1;
    while (first < last) {
        const size_t middle = (first + last + 1) / 2;
        if (stream->begins[middle] <= wanted) first = middle;
        else last = middle - 1;
    }
    *inside = wanted - stream->begins[first];
    return first;
}

/* `planes` of `stride` elements each, from `inside` on. */
static void bind_states(const struct record_stream *stream, struct zpp_optim_segment *segment, float *planes,
                        size_t stride, size_t inside) {
    float **const states[ZPP_TIER_KINDS] = { &segment->param, &segment->exp_avg, &segment->exp_avg_sq,
                                             &segment->max_exp_avg_sq };
    for (int kind = 0; kind < ZPP_TIER_KINDS; kind++) {
        const int plane = stream->plane[kind];
        if (plane >= 0 && (kind == ZPP_TIER_MASTER || *states[kind]))
            *states[kind] = planes + (size_t)plane * stride + inside;
    }
}

static bool add_cut(struct optim_file_plan *plan, int stream, size_t chunk, size_t inside,
                    struct zpp_optim_segment segment) {
    const struct optim_file_visit *last = plan->visits_count ? &plan->visits[plan->visits_count - 1] : NULL;
    if (!last || last->stream != stream || last->chunk != chunk) {
        struct optim_file_visit *visits =
            zpp_array_reserve(plan->visits, plan->visits_count, &plan->visits_capacity, sizeof *visits);
        if (!visits) return false;
        plan->visits = visits;
        plan->visits[plan->visits_count++] =
            (struct optim_file_visit){ .stream = stream, .chunk = chunk, .first_cut = plan->cuts_count };
    }
    struct optim_file_cut *cuts = zpp_array_reserve(plan->cuts, plan->cuts_count, &plan->cuts_capacity, sizeof *cuts);
    if (!cuts) return false;
    plan->cuts = cuts;
    plan->cuts[plan->cuts_count++] = (struct optim_file_cut){ segment, inside };
    plan->visits[plan->visits_count - 1].cuts++;
    return true;
}

static bool reserve_segment(struct optim_file_plan *plan, size_t count) {
    struct zpp_optim_segment *segments =
        zpp_array_reserve(plan->segments, count, &plan->segments_capacity, sizeof *segments);
    if (segments) plan->segments = segments;
    return segments;
}

/* One piece: its held part to `segments`, the rest to visits. */
static bool plan_piece(const zpp_optim_file *optim_file, const struct zpp_optim_file_piece *piece, int stream_index,
                       struct optim_file_plan *plan) {
    const struct record_stream *stream = &optim_file->streams[stream_index];
    size_t at = optim_file->shards[piece->shard].begin_elems + piece->first;
    for (size_t done = 0; done < piece->segment.elems;) {
        const bool held = at < stream->held_elems;
        size_t inside = 0;
        const size_t chunk = held ? 0 : optim_file_chunk_at(stream, at, &inside);
        size_t run = held ? stream->held_elems - at : optim_file_chunk_elems(stream, chunk) - inside;
        if (run > piece->segment.elems - done) run = piece->segment.elems - done;
        struct zpp_optim_segment part = zpp_optim_part(&piece->segment, done, run);
        if (!held) {
            if (!add_cut(plan, stream_index, chunk, inside, part)) return false;
        } else {
            if (!reserve_segment(plan, plan->held_count)) return false;
            bind_states(stream, &part, stream->held, stream->held_elems, at);
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

/* Plan one record stream after the other, so that each chunk is visited once. */
zpp_status optim_file_plan_make(const zpp_optim_file *optim_file, const struct zpp_optim_file_piece *pieces,
                                size_t pieces_count, struct optim_file_plan *plan, struct zpp_err *err) {
    bool memory = true;
    for (int stream = 0; stream < 2; stream++)
        for (size_t i = 0; i < pieces_count && memory; i++)
            if (optim_file->shards[pieces[i].shard].stream == stream)
                memory = plan_piece(optim_file, &pieces[i], stream, plan);
    while (memory && plan->segments_capacity < most_cuts(plan)) memory = reserve_segment(plan, plan->segments_capacity);
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
    const struct record_stream *stream = &optim_file->streams[visit->stream];
    for (size_t i = 0; i < visit->cuts; i++) {
        const struct optim_file_cut *cut = &plan->cuts[visit->first_cut + i];
        plan->segments[i] = cut->segment;
        bind_states(stream, &plan->segments[i], memory, optim_file_chunk_elems(stream, visit->chunk), cut->inside);
    }
}

/* --- the pipeline ------------------------------------------------------------------------------------------------- */

zpp_status optim_file_finish(zpp_optim_file *optim_file, zpp_status status, zpp_aio_request **request,
                             struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!*request) return status;
    const uint64_t before_ns = zpp_now_ns();
    status = zpp_scratch_finish_after(status, request, fault, err);
    optim_file->waited_ns += zpp_now_ns() - before_ns;
    if (zpp_span_begin()) zpp_span_end(before_ns, ZPP_SPAN_WAIT, "for states in a file", 0);
    return status;
}

/* The windows of the pipeline are the visits of the plan. */
struct step_run {
    zpp_optim_file *optim_file;
    struct optim_file_plan *plan;
    float grad_scale;
    zpp_pool *pool;
};

/* Moments that were never written are not read. */
static zpp_status read_visit(void *ctx, size_t index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct step_run *run = ctx;
    zpp_optim_file *optim_file = run->optim_file;
    const struct optim_file_plan *plan = run->plan;
    struct optim_file_buffer *buffer = &optim_file->buffers[index % optim_file->options.buffers];
    const struct optim_file_visit *visit = &plan->visits[index];
    zpp_status status = optim_file_finish(optim_file, ZPP_OK, &buffer->write, fault, err);
    if (status == ZPP_OK && plan->windows)
        status = zpp_unit_file_window_open(&plan->files, index, &plan->cuts[visit->first_cut].segment, visit->cuts,
                                           sizeof *plan->cuts, fault, err);
    if (status != ZPP_OK) return status;
    const struct record_stream *stream = &optim_file->streams[visit->stream];
    const bool master = stream->plane[ZPP_TIER_MASTER] >= 0;
    const size_t planes = stream->stepped[visit->chunk] ? stream->planes : (size_t)master;
    const size_t bytes = planes * optim_file_chunk_elems(stream, visit->chunk) * sizeof(float);
    if (!bytes) return ZPP_OK;
    return zpp_scratch_submit(&optim_file->file, optim_file_record_offset(stream, visit->chunk), buffer->memory, bytes,
                              false, &buffer->read, fault, err);
}

static zpp_status step_visit(void *ctx, size_t index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct step_run *run = ctx;
    zpp_optim_file *optim_file = run->optim_file;
    struct optim_file_plan *plan = run->plan;
    struct optim_file_buffer *buffer = &optim_file->buffers[index % optim_file->options.buffers];
    const struct optim_file_visit *visit = &plan->visits[index];
    struct record_stream *stream = &optim_file->streams[visit->stream];
    const size_t stride = optim_file_chunk_elems(stream, visit->chunk), master = stream->plane[ZPP_TIER_MASTER] >= 0;
    zpp_status status = optim_file_finish(optim_file, ZPP_OK, &buffer->read, fault, err);
    if (status == ZPP_OK && plan->windows) status = zpp_unit_file_window_ready(&plan->files, index, fault, err);
    if (status != ZPP_OK) return status;
    if (!stream->stepped[visit->chunk])
        memset(buffer->memory + master * stride, 0, (stream->planes - master) * stride * sizeof(float));
    optim_file_plan_bind(optim_file, plan, visit, buffer->memory);
    zpp_optim_step(plan->segments, visit->cuts, run->grad_scale, run->pool);
    status = zpp_scratch_submit(&optim_file->file, optim_file_record_offset(stream, visit->chunk), buffer->memory,
                                stream->planes * stride * sizeof(float), true, &buffer->write, fault, err);
    if (status == ZPP_OK) stream->stepped[visit->chunk] = true;
    if (status == ZPP_OK && plan->windows) status = zpp_unit_file_window_write(&plan->files, index, fault, err);
    return status;
}

/* Step what is held in memory. */
static zpp_status step_held(const struct step_run *run, struct zpp_aio_fault *fault, struct zpp_err *err) {
    bool inconsistent;
    struct optim_file_plan *plan = run->plan;
    return zpp_unit_file_step(&plan->files, plan->segments, plan->held_count, run->grad_scale, run->pool,
                              &inconsistent, fault, err);
}

/* What is held is stepped while the first visits are read; but before them where its parameters or gradients are in a
 * file, because the windows are the same. */
static zpp_status run_windows(struct step_run *run, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct optim_file_plan *plan = run->plan;
    struct zpp_offload_pipeline pipeline = {
        .windows = plan->visits_count, .buffers = run->optim_file->options.buffers, .ctx = run,
        .read = read_visit, .step = step_visit };
    zpp_status status = plan->windows ? step_held(run, fault, err) : ZPP_OK;
    if (status == ZPP_OK) status = zpp_offload_fill(&pipeline, fault, err);
    if (!plan->windows && status == ZPP_OK) status = step_held(run, fault, err);
    return status == ZPP_OK ? zpp_offload_run(&pipeline, fault, err) : status;
}

/* Nothing may be under way when the call returns; the first failure is returned. */
static zpp_status settle(zpp_optim_file *optim_file, const struct zpp_step_files *files, zpp_status status,
                         struct zpp_aio_fault *fault, struct zpp_err *err) {
    for (unsigned i = 0; i < optim_file->options.buffers; i++) {
        status = optim_file_finish(optim_file, status, &optim_file->buffers[i].read, fault, err);
        status = optim_file_finish(optim_file, status, &optim_file->buffers[i].write, fault, err);
    }
    return zpp_unit_file_settle(files, status, fault, err);
}

zpp_status zpp_optim_file_step(zpp_optim_file *optim_file, const struct zpp_optim_file_piece *pieces,
                               size_t pieces_count,
                               const struct zpp_step_files *files, float grad_scale, zpp_pool *pool,
                               struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (optim_file->inconsistent || !optim_file->sealed)
        return zpp_fail(err, ZPP_STATE, "tier: the states in %s are %s", optim_file->file.path,
                        optim_file->inconsistent ? "inconsistent after a step that failed; load a checkpoint first"
                                         : "not sealed yet");
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
    struct step_run run = { optim_file, &plan, grad_scale, pool };
    status = settle(optim_file, files, run_windows(&run, fault, err), fault, err);
    optim_file_plan_drop(&plan);
    optim_file->inconsistent = status != ZPP_OK;
    optim_file->steps++;
    optim_file->step_ns += zpp_now_ns() - began_ns;
    return status;
}
