/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of an optimizer file: shards are placed on record streams, these are cut in records, the file is made; and
 * copies in and out, for checkpoints and first values. See optim_file.h for the picture.
 */
#include "optim_file.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../../base/mem.h"
#include "optim_file_internal.h"

enum {
    SHARD_ALIGN_ELEMS = 16,     /* AVX-512 */
    LARGE_SHARD_ELEMS = 65536,  /* from here on a shard begins at a page, and has records of its own */
    CHUNK_ELEMS = 512 * 1024,   /* 2 MiB a kind: large enough for the disk, small enough to overlap */
    LEAST_CHUNKS = 8,           /* fewer, and the first read and the last write would not be hidden */
    BUFFERS = 4,                /* one stepped, one written, two read */
};

zpp_status zpp_optim_file_create(const struct zpp_optim_file_options *options, zpp_optim_file **out,
                                 struct zpp_err *err) {
    if (!(options->fraction > 0.0 && options->fraction <= 1.0))
        return zpp_fail(err, ZPP_INVALID, "tier: fraction is %g, wanted above 0 and at most 1", options->fraction);
    if (options->chunk_elems % TIER_PAGE_ELEMS || (options->buffers && options->buffers < 3))
        return zpp_fail(err, ZPP_INVALID, "tier: chunk_elems %zu and buffers %u, wanted a multiple of %d, 3 or more",
                        options->chunk_elems, options->buffers, TIER_PAGE_ELEMS);
    zpp_optim_file *optim_file = calloc(1, sizeof *optim_file);
    if (!optim_file) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for a tier");
    optim_file->options = *options;
    const zpp_status status = zpp_scratch_file_open(&optim_file->file, &options->file, err);
    optim_file->options.file.folders = NULL; /* borrowed */
    if (status != ZPP_OK) {
        zpp_optim_file_destroy(optim_file);
        return status;
    }
    *out = optim_file;
    return ZPP_OK;
}

void zpp_optim_file_destroy(zpp_optim_file *optim_file) {
    if (!optim_file) return;
    optim_file_backward_step_forget(optim_file); /* a read ahead of a step that will not come */
    optim_file_backward_step_drop(optim_file);
    zpp_aio_arena *arena = optim_file->file.aio ? zpp_aio_get_arena(optim_file->file.aio) : NULL;
    for (unsigned i = 0; optim_file->buffers && i < optim_file->options.buffers; i++)
        if (optim_file->buffers[i].memory) zpp_aio_arena_free(arena, optim_file->buffers[i].memory);
    zpp_scratch_file_close(&optim_file->file);
    for (int i = 0; i < 2; i++) {
        struct record_stream *stream = &optim_file->streams[i];
        free(stream->begins);
        free(stream->stepped);
        zpp_mem_free(stream->held, stream->planes * stream->held_elems * sizeof(float));
    }
    free(optim_file->buffers);
    free(optim_file->shards);
    free(optim_file);
}

zpp_status zpp_optim_file_add(zpp_optim_file *optim_file, size_t elems, bool master, int *shard, struct zpp_err *err) {
    if (optim_file->sealed) return zpp_fail(err, ZPP_STATE, "tier: a shard of %zu elements comes after seal", elems);
    struct optim_file_shard *shards = zpp_array_reserve(optim_file->shards, (size_t)optim_file->shards_count,
                                                        &optim_file->shards_capacity, sizeof *shards);
    if (!shards) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for shard %d", optim_file->shards_count);
    optim_file->shards = shards;
    const int which = master ? 0 : 1;
    struct record_stream *stream = &optim_file->streams[which];
    const size_t begin =
        zpp_round_up(stream->elems, elems < LARGE_SHARD_ELEMS ? (size_t)SHARD_ALIGN_ELEMS : (size_t)TIER_PAGE_ELEMS);
    shards[optim_file->shards_count] = (struct optim_file_shard){ .stream = which, .begin_elems = begin,
                                                                 .elems = elems };
    /* What comes after a large shard begins at a page, too, so that a record may end there. */
    stream->elems = begin + (elems < LARGE_SHARD_ELEMS ? elems : zpp_round_up(elems, TIER_PAGE_ELEMS));
    stream->used_elems += elems;
    *shard = optim_file->shards_count++;
    return ZPP_OK;
}

void zpp_optim_file_hold(zpp_optim_file *optim_file) {
    for (int i = 0; i < 2; i++) {
        struct record_stream *stream = &optim_file->streams[i];
        stream->hold_elems = stream->elems = zpp_round_up(stream->elems, TIER_PAGE_ELEMS);
    }
}

/* --- seal --------------------------------------------------------------------------------------------------------- */

/* Cut the record stream in chunks of equal length, from where the last one ends to an element. Their length is as near
 * to `wanted_elems` as it can be: halves of what is a little longer would cost the disk two requests. */
static bool cut_chunks(struct record_stream *stream, size_t until, size_t wanted_elems) {
    const size_t end = until > stream->held_elems ? until - stream->held_elems : 0;
    size_t at = stream->chunks ? stream->begins[stream->chunks] : 0;
    if (end <= at) return true;
    const size_t rounded = (end - at + wanted_elems / 2) / wanted_elems, count = rounded ? rounded : 1;
    const size_t length = zpp_round_up((end - at + count - 1) / count, TIER_PAGE_ELEMS);
    if (length > stream->chunk_elems) stream->chunk_elems = length;
    for (; at < end; at = at + length < end ? at + length : end) {
        size_t *begins =
            zpp_array_reserve(stream->begins, stream->chunks + 1, &stream->begins_capacity, sizeof *begins);
        if (!begins) return false;
        stream->begins = begins;
        begins[stream->chunks++] = at;
        begins[stream->chunks] = end;
    }
    return true;
}

/* A large shard has chunks of its own: a step moves no states of a unit that it does not step (a layer that was left
 * out, an expert without tokens). */
static bool cut_stream(zpp_optim_file *optim_file, int which, size_t wanted_elems) {
    struct record_stream *stream = &optim_file->streams[which];
    for (int i = 0; i < optim_file->shards_count; i++) {
        const struct optim_file_shard *shard = &optim_file->shards[i];
        if (shard->stream != which || shard->elems < LARGE_SHARD_ELEMS) continue;
        const size_t end = shard->begin_elems + zpp_round_up(shard->elems, TIER_PAGE_ELEMS);
        if (!cut_chunks(stream, shard->begin_elems, wanted_elems)) return false;
        if (!cut_chunks(stream, end, wanted_elems)) return false;
    }
    return cut_chunks(stream, stream->elems, wanted_elems);
}

static zpp_status lay_out_stream(zpp_optim_file *optim_file, int which, struct zpp_err *err) {
    struct record_stream *stream = &optim_file->streams[which];
    for (int kind = 0; kind < ZPP_TIER_KINDS; kind++) {
        const bool has = kind == ZPP_TIER_MASTER ? which == 0
            : optim_file->options.moments >> (kind - ZPP_TIER_EXP_AVG) & 1;
        stream->plane[kind] = has ? (int)stream->planes : -1;
        if (has) stream->kinds[stream->planes++] = kind;
    }
    const double moving_elems = (double)(stream->elems - stream->hold_elems);
    stream->held_elems = stream->hold_elems + (size_t)((1.0 - optim_file->options.fraction) * moving_elems) /
                         TIER_PAGE_ELEMS * TIER_PAGE_ELEMS;
    stream->elems = zpp_round_up(stream->elems, TIER_PAGE_ELEMS);
    if (!stream->planes) stream->held_elems = stream->elems; /* no record has anything: nothing is to be read */
    const size_t on_disk_elems = stream->elems - stream->held_elems;
    size_t wanted_elems = optim_file->options.chunk_elems;
    if (!wanted_elems) wanted_elems = zpp_round_up(on_disk_elems / LEAST_CHUNKS + 1, TIER_PAGE_ELEMS);
    if (!optim_file->options.chunk_elems && wanted_elems > CHUNK_ELEMS) wanted_elems = CHUNK_ELEMS;
    if (!cut_stream(optim_file, which, wanted_elems))
        return zpp_fail(err, ZPP_NOMEM, "tier: no memory for the records of %zu elements", on_disk_elems);
    stream->offset_bytes = optim_file->file_bytes;
    optim_file->file_bytes += (uint64_t)on_disk_elems * stream->planes * sizeof(float);
    return ZPP_OK;
}

static zpp_status make_stream_memory(struct record_stream *stream, struct zpp_err *err) {
    stream->stepped = calloc(stream->chunks + 1, sizeof *stream->stepped);
    if (!stream->stepped) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for %zu chunks", stream->chunks);
    if (!stream->held_elems || !stream->planes) return ZPP_OK;
    void *memory = NULL;
    const zpp_status status =
        zpp_mem_alloc(stream->planes * stream->held_elems * sizeof(float), zpp_page_bytes(), &memory, err);
    stream->held = memory;
    return status;
}

static void choose_buffers(zpp_optim_file *optim_file) {
    if (!optim_file->options.buffers
        && optim_file->options.backward_step) optim_file_backward_step_choose_buffers(optim_file);
    if (!optim_file->options.buffers) optim_file->options.buffers = BUFFERS;
    for (int i = 0; i < 2; i++) {
        const struct record_stream *stream = &optim_file->streams[i];
        const size_t bytes = stream->chunk_elems * stream->planes * sizeof(float);
        if (bytes > optim_file->record_bytes) optim_file->record_bytes = bytes;
    }
}

static zpp_status make_buffers(zpp_optim_file *optim_file, struct zpp_err *err) {
    optim_file->buffers = calloc(optim_file->options.buffers, sizeof *optim_file->buffers);
    if (!optim_file->buffers) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for %u buffers",
                                              optim_file->options.buffers);
    for (unsigned i = 0; optim_file->record_bytes && i < optim_file->options.buffers; i++) {
        void *memory = NULL;
        const zpp_status status = zpp_aio_arena_alloc(zpp_aio_get_arena(optim_file->file.aio), optim_file->record_bytes,
                                                      &memory, err);
        if (status != ZPP_OK) return status;
        optim_file->buffers[i].memory = memory;
    }
    return ZPP_OK;
}

zpp_status zpp_optim_file_seal(zpp_optim_file *optim_file, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (optim_file->sealed) return zpp_fail(err, ZPP_STATE, "tier: sealed twice");
    zpp_status status = ZPP_OK;
    for (int i = 0; i < 2 && status == ZPP_OK; i++) status = lay_out_stream(optim_file, i, err);
    if (status != ZPP_OK) return status;
    choose_buffers(optim_file);
    /* At its full length: what was never written reads as zeros, and a full disk is found before training. */
    status = zpp_aio_make(optim_file->file.aio, optim_file->file.path, optim_file->file_bytes, fault, err);
    for (int i = 0; i < 2 && status == ZPP_OK; i++) status = make_stream_memory(&optim_file->streams[i], err);
    if (status == ZPP_OK) status = optim_file_backward_step_seal(optim_file, err);
    if (status == ZPP_OK) status = make_buffers(optim_file, err);
    if (status == ZPP_OK) optim_file->sealed = true;
    return status;
}

zpp_status zpp_optim_file_plan(const struct zpp_optim_file_options *options,
                               const struct zpp_optim_file_shard_plan *shards, size_t count,
                               struct zpp_optim_file_plan *out, struct zpp_err *err) {
    zpp_optim_file optim_file = { .options = *options };
    zpp_status status = ZPP_OK;
    int number;
    for (int held = 1; held >= 0; held--) {
        for (size_t i = 0; i < count && status == ZPP_OK; i++)
            if (shards[i].held == held)
                status = zpp_optim_file_add(&optim_file, shards[i].elems, shards[i].master, &number, err);
        if (held) zpp_optim_file_hold(&optim_file);
    }
    for (int i = 0; i < 2 && status == ZPP_OK; i++) status = lay_out_stream(&optim_file, i, err);
    choose_buffers(&optim_file);
    *out = (struct zpp_optim_file_plan){ .buffer_bytes = optim_file.record_bytes * optim_file.options.buffers };
    for (int i = 0; i < 2; i++) {
        if (optim_file.streams[i].chunk_elems > out->chunk_elems) out->chunk_elems = optim_file.streams[i].chunk_elems;
        free(optim_file.streams[i].begins);
    }
    free(optim_file.shards);
    return status;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* From `at` on the record stream: how many elements lie together, and where. *held NULL: in chunk *chunk, *inside of
 * it. */
static size_t run_at(const struct record_stream *stream, int plane, size_t at, float **held, size_t *chunk,
                     size_t *inside) {
    *held = NULL;
    if (at < stream->held_elems) {
        *held = stream->held + (size_t)plane * stream->held_elems + at;
        return stream->held_elems - at;
    }
    *chunk = optim_file_chunk_at(stream, at, inside);
    return optim_file_chunk_elems(stream, *chunk) - *inside;
}

static zpp_status copy_on_disk(zpp_optim_file *optim_file, struct record_stream *stream, int plane, size_t chunk,
                               size_t inside, size_t elems, float *memory, bool write, struct zpp_aio_fault *fault,
                               struct zpp_err *err) {
    const bool moment = stream->kinds[plane] != ZPP_TIER_MASTER;
    if (moment && !write && !stream->stepped[chunk]) {
        memset(memory, 0, elems * sizeof *memory);
        return ZPP_OK;
    }
    const size_t plane_elems = optim_file_chunk_elems(stream, chunk);
    const uint64_t at =
        optim_file_record_offset(stream, chunk) + ((size_t)plane * plane_elems + inside) * sizeof *memory;
    zpp_aio_request *request = NULL;
    zpp_status status =
        zpp_scratch_submit(&optim_file->file, at, memory, elems * sizeof *memory, write, &request, fault, err);
    if (status == ZPP_OK) status = zpp_scratch_finish(&request, fault, err);
    if (status == ZPP_OK && moment && write) stream->stepped[chunk] = true;
    return status;
}

static zpp_status check_copy(const zpp_optim_file *optim_file, int shard, enum zpp_optim_file_kind kind, size_t first,
                             size_t elems, struct zpp_err *err) {
    if (!optim_file->sealed || shard < 0 || shard >= optim_file->shards_count)
        return zpp_fail(err, ZPP_STATE, "tier: shard %d is copied, there are %d%s", shard, optim_file->shards_count,
                        optim_file->sealed ? "" : ", not sealed yet");
    const struct optim_file_shard *where = &optim_file->shards[shard];
    const bool has = optim_file->streams[where->stream].plane[kind] >= 0;
    if (has && first <= where->elems && elems <= where->elems - first) return ZPP_OK;
    return zpp_fail(err, ZPP_INVALID, "tier: elements %zu to %zu of kind %d are copied; shard %d has %zu%s", first,
                    first + elems, (int)kind, shard, where->elems, has ? "" : ", and none of that kind");
}

zpp_status zpp_optim_file_copy(zpp_optim_file *optim_file, int shard, enum zpp_optim_file_kind kind, size_t first,
                               size_t elems, float *memory, bool write, struct zpp_aio_fault *fault,
                               struct zpp_err *err) {
    zpp_status status = check_copy(optim_file, shard, kind, first, elems, err);
    if (status != ZPP_OK) return status;
    const size_t begin = optim_file->shards[shard].begin_elems + first;
    struct record_stream *stream = &optim_file->streams[optim_file->shards[shard].stream];
    if (write) optim_file_backward_step_forget(optim_file);
    for (size_t done = 0, run; done < elems && status == ZPP_OK; done += run, memory += run) {
        float *held;
        size_t chunk = 0, inside = 0;
        run = run_at(stream, stream->plane[kind], begin + done, &held, &chunk, &inside);
        if (run > elems - done) run = elems - done;
        if (held) memcpy(write ? held : memory, write ? memory : held, run * sizeof *memory);
        else
            status =
                copy_on_disk(optim_file, stream, stream->plane[kind], chunk, inside, run, memory, write, fault, err);
    }
    return status;
}

/* --- small answers ------------------------------------------------------------------------------------------------ */

bool zpp_optim_file_inconsistent(const zpp_optim_file *optim_file) {
    return optim_file->inconsistent;
}

void zpp_optim_file_recovered(zpp_optim_file *optim_file) {
    optim_file->inconsistent = false;
    optim_file->backward_step.open = false;
    optim_file_backward_step_forget(optim_file);
}

void zpp_optim_file_figures(const zpp_optim_file *optim_file, struct zpp_optim_file_figures *out) {
    struct zpp_aio_figures io;
    zpp_aio_figures(optim_file->file.aio, &io);
    *out = (struct zpp_optim_file_figures){
        .reserved_bytes = optim_file->file_bytes,
        .buffer_bytes = optim_file->record_bytes * optim_file->options.buffers,
        .read_bytes = io.read_bytes,
        .written_bytes = io.written_bytes,
        .checked_bytes = io.checked_bytes,
        .sums_bytes = io.checksums_bytes,
        .steps = optim_file->steps,
        .step_ns = optim_file->step_ns,
        .waited_ns = optim_file->waited_ns,
        .uring = io.uring,
    };
    for (int i = 0; i < 2; i++) {
        const struct record_stream *stream = &optim_file->streams[i];
        const size_t held = stream->held_elems < stream->used_elems ? stream->held_elems : stream->used_elems;
        for (size_t plane = 0; plane < stream->planes; plane++) {
            out->held_bytes[stream->kinds[plane]] += held * sizeof(float);
            out->file_bytes[stream->kinds[plane]] += (stream->used_elems - held) * sizeof(float);
        }
    }
}
