/* SPDX-License-Identifier: Apache-2.0
 *
 * The step unit by unit, inside the backward (docs/design/0032). Buffers are a write-back cache of records:
 *
 *   FREE --read, ahead or when needed--> CLEAN --stepped--> DIRTY --its last shard was stepped--> WRITING --> FREE
 *
 * Shards are expected from the last to the first, as a backward meets them, so their records are read in descending
 * order of the record stream, as far ahead as buffers go; a record that two shards share is the last of one and the
 * first of the next. Where another order comes, what was read ahead gives way, and what had changed is written and read
 * again.
 *
 * After a failure nothing is under way and nothing is cached.
 */
#include <stdlib.h>
#include <string.h>

#include "../../base/wait.h"
#include "optim_file_internal.h"

enum { MOST_BUFFERS = 64, LEAST_BUFFERS = 4 };

/* The chunks that a shard has a part of; false: none, all of it is held. */
static bool chunks_of(const zpp_optim_file *optim_file, const struct optim_file_shard *shard, size_t *first,
                      size_t *last) {
    const struct record_stream *stream = &optim_file->streams[shard->stream];
    const size_t end = shard->begin_elems + shard->elems;
    if (!shard->elems || end <= stream->held_elems) return false;
    const size_t begin = shard->begin_elems > stream->held_elems ? shard->begin_elems : stream->held_elems;
    size_t inside;
    *first = optim_file_chunk_at(stream, begin, &inside);
    *last = optim_file_chunk_at(stream, end - 1, &inside);
    return true;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static size_t most_chunks(const zpp_optim_file *optim_file) {
    size_t most = 0, first, last;
    for (int i = 0; i < optim_file->shards_count; i++)
        if (chunks_of(optim_file, &optim_file->shards[i], &first, &last)
            && last - first + 1 > most) most = last - first + 1;
    return most;
}

/* How many shards have a part of each record. */
static void count_shards(const zpp_optim_file *optim_file, size_t *const counts[2]) {
    size_t first, last;
    for (int i = 0; i < 2; i++) memset(counts[i], 0, optim_file->streams[i].chunks * sizeof *counts[i]);
    for (int i = 0; i < optim_file->shards_count; i++) {
        const struct optim_file_shard *shard = &optim_file->shards[i];
        if (!chunks_of(optim_file, shard, &first, &last)) continue;
        for (size_t chunk = first; chunk <= last; chunk++) counts[shard->stream][chunk]++;
    }
}

/* One shard that is stepped and written while the next one is read. */
void optim_file_backward_step_choose_buffers(zpp_optim_file *optim_file) {
    const size_t records = optim_file->streams[0].chunks + optim_file->streams[1].chunks;
    size_t buffers = 2 * most_chunks(optim_file) + 2;
    if (buffers > records) buffers = records;
    if (buffers > MOST_BUFFERS) buffers = MOST_BUFFERS;
    optim_file->options.buffers = buffers < LEAST_BUFFERS ? LEAST_BUFFERS : (unsigned)buffers;
}

zpp_status optim_file_backward_step_seal(zpp_optim_file *optim_file, struct zpp_err *err) {
    struct optim_file_backward_step *backward_step = &optim_file->backward_step;
    size_t capacity = 1, first, last;
    if (!optim_file->options.backward_step) return ZPP_OK;
    for (int i = 0; i < optim_file->shards_count; i++)
        if (chunks_of(optim_file, &optim_file->shards[i], &first, &last)) capacity += last - first + 1;
    backward_step->order = calloc(capacity, sizeof *backward_step->order);
    bool memory = backward_step->order;
    for (int i = 0; i < 2; i++) {
        backward_step->left[i] = calloc(optim_file->streams[i].chunks + 1, sizeof *backward_step->left[i]);
        backward_step->expected[i] = calloc(optim_file->streams[i].chunks + 1, sizeof *backward_step->expected[i]);
        memory = memory && backward_step->left[i] && backward_step->expected[i];
    }
    if (!memory) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for the order of %zu records", capacity);
    count_shards(optim_file, backward_step->expected);
    size_t before[2] = { SIZE_MAX, SIZE_MAX };
    for (int i = optim_file->shards_count - 1; i >= 0; i--) {
        const struct optim_file_shard *shard = &optim_file->shards[i];
        if (!chunks_of(optim_file, shard, &first, &last)) continue;
        for (size_t chunk = last + 1; chunk-- > first;) {
            if (chunk == before[shard->stream]) continue;
            backward_step->order[backward_step->order_count++] = (struct optim_file_record){ shard->stream, chunk };
            before[shard->stream] = chunk;
        }
    }
    return ZPP_OK;
}

void optim_file_backward_step_drop(zpp_optim_file *optim_file) {
    free(optim_file->backward_step.order);
    for (int i = 0; i < 2; i++) {
        free(optim_file->backward_step.left[i]);
        free(optim_file->backward_step.expected[i]);
    }
}

void optim_file_backward_step_forget(zpp_optim_file *optim_file) {
    for (unsigned i = 0; optim_file->buffers && i < optim_file->options.buffers; i++) {
        struct zpp_err ignored = ZPP_ERR_INIT;
        struct optim_file_buffer *buffer = &optim_file->buffers[i];
        (void)zpp_scratch_finish(&buffer->read, NULL, &ignored);
        (void)zpp_scratch_finish(&buffer->write, NULL, &ignored);
        buffer->state = BUFFER_FREE;
    }
    optim_file->backward_step.next = 0;
}

/* --- buffers ------------------------------------------------------------------------------------------------------ */

static void set_state(zpp_optim_file *optim_file, struct optim_file_buffer *buffer,
                      enum optim_file_buffer_state state) {
    buffer->state = state;
    buffer->since = ++optim_file->backward_step.clock;
}

static struct optim_file_buffer *find(zpp_optim_file *optim_file, int stream, size_t chunk) {
    for (unsigned i = 0; i < optim_file->options.buffers; i++) {
        struct optim_file_buffer *buffer = &optim_file->buffers[i];
        if (buffer->state != BUFFER_FREE && buffer->stream == stream && buffer->chunk == chunk) return buffer;
    }
    return NULL;
}

/* Moments that were never written are zeros, and not read. */
static zpp_status begin_read(zpp_optim_file *optim_file, struct optim_file_buffer *buffer, int which, size_t chunk,
                             struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct record_stream *stream = &optim_file->streams[which];
    const size_t stride = optim_file_chunk_elems(stream, chunk), master = stream->plane[ZPP_TIER_MASTER] >= 0;
    const size_t planes = stream->stepped[chunk] ? stream->planes : master;
    zpp_status status = ZPP_OK;
    memset(buffer->memory + planes * stride, 0, (stream->planes - planes) * stride * sizeof(float));
    if (planes)
        status = zpp_scratch_submit(&optim_file->file, optim_file_record_offset(stream, chunk), buffer->memory,
                                   planes * stride * sizeof(float), false, &buffer->read, fault, err);
    if (status != ZPP_OK) return status;
    buffer->stream = which;
    buffer->chunk = chunk;
    set_state(optim_file, buffer, BUFFER_CLEAN);
    return ZPP_OK;
}

static zpp_status begin_write(zpp_optim_file *optim_file, struct optim_file_buffer *buffer, struct zpp_aio_fault *fault,
                              struct zpp_err *err) {
    struct record_stream *stream = &optim_file->streams[buffer->stream];
    const size_t bytes = stream->planes * optim_file_chunk_elems(stream, buffer->chunk) * sizeof(float);
    const zpp_status status = zpp_scratch_submit(&optim_file->file, optim_file_record_offset(stream, buffer->chunk),
                                                buffer->memory, bytes, true, &buffer->write, fault, err);
    if (status != ZPP_OK) return status;
    stream->stepped[buffer->chunk] = true;
    set_state(optim_file, buffer, BUFFER_WRITING);
    return ZPP_OK;
}

static zpp_status finish_write(zpp_optim_file *optim_file, struct optim_file_buffer *buffer,
                               struct zpp_aio_fault *fault, struct zpp_err *err) {
    const zpp_status status = optim_file_finish(optim_file, ZPP_OK, &buffer->write, fault, err);
    buffer->state = BUFFER_FREE;
    return status;
}

/* Return the buffer that has been in a state for the shortest time (`newest`), or for the longest; NULL: none. */
static struct optim_file_buffer *choose(zpp_optim_file *optim_file, enum optim_file_buffer_state state, bool newest) {
    struct optim_file_buffer *best = NULL;
    for (unsigned i = 0; i < optim_file->options.buffers; i++) {
        struct optim_file_buffer *buffer = &optim_file->buffers[i];
        if (buffer->state == state && (!best || (buffer->since > best->since) == newest)) best = buffer;
    }
    return best;
}

/* Read the records that are expected next, as many as there are buffers for, without waiting. */
static zpp_status read_ahead(zpp_optim_file *optim_file, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct optim_file_backward_step *backward_step = &optim_file->backward_step;
    while (backward_step->next < backward_step->order_count) {
        const struct optim_file_record *record = &backward_step->order[backward_step->next];
        const bool expected = backward_step->expected[record->stream][record->chunk];
        if (expected && !find(optim_file, record->stream, record->chunk)) {
            struct optim_file_buffer *buffer = choose(optim_file, BUFFER_FREE, false);
            if (!buffer) buffer = choose(optim_file, BUFFER_WRITING, false);
            if (!buffer || (buffer->write && !zpp_aio_done(buffer->write))) return ZPP_OK;
            zpp_status status = finish_write(optim_file, buffer, fault, err);
            if (status == ZPP_OK) status = begin_read(optim_file, buffer, record->stream, record->chunk, fault, err);
            if (status != ZPP_OK) return status;
        }
        backward_step->next++;
    }
    return ZPP_OK;
}

/* Take a free buffer, else empty one: that of the write that began first, else of the record that is expected last of
 * those read ahead, else of the record that was changed longest ago. */
static zpp_status take_empty(zpp_optim_file *optim_file, struct optim_file_buffer **out, struct zpp_aio_fault *fault,
                             struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    struct optim_file_buffer *buffer = choose(optim_file, BUFFER_FREE, false);
    if (!buffer) buffer = choose(optim_file, BUFFER_WRITING, false);
    if (!buffer) buffer = choose(optim_file, BUFFER_CLEAN, true); /* expected last of those read ahead */
    if (!buffer) {
        buffer = choose(optim_file, BUFFER_DIRTY, false);
        status = begin_write(optim_file, buffer, fault, err);
    }
    if (status == ZPP_OK) status = optim_file_finish(optim_file, ZPP_OK, &buffer->read, fault, err);
    if (status == ZPP_OK) status = finish_write(optim_file, buffer, fault, err);
    if (status == ZPP_OK) *out = buffer;
    return status;
}

/* The buffer that has the record, whole, and may be changed. */
static zpp_status take(zpp_optim_file *optim_file, int stream, size_t chunk, struct optim_file_buffer **out,
                       struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct optim_file_buffer *buffer = find(optim_file, stream, chunk);
    zpp_status status = ZPP_OK;
    if (!buffer) {
        status = take_empty(optim_file, &buffer, fault, err);
        if (status == ZPP_OK) status = begin_read(optim_file, buffer, stream, chunk, fault, err);
    }
    if (status == ZPP_OK) status = optim_file_finish(optim_file, ZPP_OK, &buffer->read, fault, err);
    if (status == ZPP_OK) status = optim_file_finish(optim_file, ZPP_OK, &buffer->write, fault, err);
    if (status == ZPP_OK) *out = buffer;
    return status;
}

/* --- the calls ---------------------------------------------------------------------------------------------------- */

static zpp_status fail(zpp_optim_file *optim_file, zpp_status status) {
    if (status == ZPP_OK) return status;
    optim_file->inconsistent = true;
    optim_file->backward_step.open = false;
    optim_file_backward_step_forget(optim_file);
    return status;
}

static const char *why_not(const zpp_optim_file *optim_file) {
    if (optim_file->inconsistent) return "inconsistent after a step that failed; load a checkpoint first";
    if (!optim_file->sealed) return "not sealed yet";
    if (optim_file->backward_step.open) return "in the middle of a step";
    return optim_file->options.backward_step ? NULL : "not made for steps inside a backward";
}

zpp_status zpp_optim_file_backward_step_begin(zpp_optim_file *optim_file, struct zpp_aio_fault *fault,
                                              struct zpp_err *err) {
    const char *refusal = why_not(optim_file);
    if (refusal) return zpp_fail(err, ZPP_STATE, "tier: the states in %s are %s", optim_file->file.path, refusal);
    count_shards(optim_file, optim_file->backward_step.left);
    optim_file->backward_step.open = true;
    /* A read that fails changes nothing: no state was stepped. */
    const zpp_status status = read_ahead(optim_file, fault, err);
    if (status != ZPP_OK) {
        optim_file->backward_step.open = false;
        optim_file_backward_step_forget(optim_file);
    }
    return status;
}

static zpp_status step_visit(zpp_optim_file *optim_file, struct optim_file_plan *plan,
                             const struct optim_file_visit *visit, float grad_scale,
                             zpp_pool *pool, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct optim_file_buffer *buffer = NULL;
    zpp_status status = take(optim_file, visit->stream, visit->chunk, &buffer, fault, err);
    if (status != ZPP_OK) return status;
    optim_file_plan_bind(optim_file, plan, visit, buffer->memory);
    zpp_optim_step(plan->segments, visit->cuts, grad_scale, pool);
    set_state(optim_file, buffer, BUFFER_DIRTY);
    if (--optim_file->backward_step.left[visit->stream][visit->chunk] == 0)
        status = begin_write(optim_file, buffer, fault, err);
    return status == ZPP_OK ? read_ahead(optim_file, fault, err) : status;
}

zpp_status zpp_optim_file_backward_step_unit(zpp_optim_file *optim_file, const struct zpp_optim_file_piece *pieces,
                                             size_t pieces_count,
                                             float grad_scale, zpp_pool *pool, struct zpp_aio_fault *fault,
                                             struct zpp_err *err) {
    if (!optim_file->backward_step.open)
        return zpp_fail(err, ZPP_STATE, "tier: a shard is stepped in %s before the step has begun",
                        optim_file->file.path);
    const uint64_t began_ns = zpp_now_ns();
    struct optim_file_plan plan = { 0 };
    zpp_status status = optim_file_plan_make(optim_file, pieces, pieces_count, &plan, err);
    if (status == ZPP_OK) zpp_optim_step(plan.segments, plan.held_count, grad_scale, pool);
    for (size_t i = plan.visits_count; i-- > 0 && status == ZPP_OK;)
        status = step_visit(optim_file, &plan, &plan.visits[i], grad_scale, pool, fault, err);
    optim_file_plan_drop(&plan);
    optim_file->step_ns += zpp_now_ns() - began_ns;
    return fail(optim_file, status);
}

zpp_status zpp_optim_file_backward_step_poll(zpp_optim_file *optim_file, struct zpp_aio_fault *fault,
                                             struct zpp_err *err) {
    return optim_file->backward_step.open ? fail(optim_file, read_ahead(optim_file, fault, err)) : ZPP_OK;
}

void zpp_optim_file_backward_step_expect(zpp_optim_file *optim_file, int index, bool expected) {
    struct optim_file_shard *shard = &optim_file->shards[index];
    size_t first, last;
    if (!optim_file->options.backward_step || shard->unexpected == !expected) return;
    shard->unexpected = !expected;
    if (!chunks_of(optim_file, shard, &first, &last)) return;
    size_t *counts = optim_file->backward_step.expected[shard->stream];
    for (size_t chunk = first; chunk <= last; chunk++) counts[chunk] += expected ? 1 : (size_t)-1;
}

zpp_status zpp_optim_file_backward_step_end(zpp_optim_file *optim_file, struct zpp_aio_fault *fault,
                                            struct zpp_err *err) {
    if (!optim_file->backward_step.open) return ZPP_OK;
    const uint64_t began_ns = zpp_now_ns();
    zpp_status status = ZPP_OK;
    /* Records that a shard without gradients has a part of. */
    for (unsigned i = 0; i < optim_file->options.buffers && status == ZPP_OK; i++)
        if (optim_file->buffers[i].state == BUFFER_DIRTY)
            status = begin_write(optim_file, &optim_file->buffers[i], fault, err);
    for (unsigned i = 0; i < optim_file->options.buffers && status == ZPP_OK; i++)
        if (optim_file->buffers[i].state == BUFFER_WRITING)
            status = finish_write(optim_file, &optim_file->buffers[i], fault, err);
    optim_file->backward_step.open = false;
    optim_file->backward_step.next = 0;
    optim_file->steps++;
    optim_file->step_ns += zpp_now_ns() - began_ns;
    return fail(optim_file, status);
}

void zpp_optim_file_backward_step_ahead(zpp_optim_file *optim_file) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    if (optim_file->inconsistent || optim_file->backward_step.open) return;
    if (read_ahead(optim_file, &fault, &ignored) != ZPP_OK) optim_file_backward_step_forget(optim_file);
}
