/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of a tier: slices are laid on lines, lines are cut in records, the file is made; and copies in and out, for
 * checkpoints and first values. See tier.h for the picture.
 */
#include "tier.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../base/mem.h"
#include "tier_internal.h"

enum {
    SLICE_ALIGN_ELEMS = 16,     /* AVX-512 */
    LARGE_SLICE_ELEMS = 65536,  /* from here on a slice begins at a page: its first values are written directly */
    CHUNK_ELEMS = 512 * 1024,   /* 2 MiB a kind: large enough for the disk, small enough to overlap */
    LEAST_CHUNKS = 8,           /* fewer, and the first read and the last write would not be hidden */
    BUFFERS = 4,                /* one stepped, one written, two read */
    DEPTH = 32,
    BLOCK_BYTES = 1 << 20,
    FLIGHT_BYTES = 8 << 20,     /* as unit_file.c: what is stepped first is read first */
};

static size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static zpp_status start_engine(zpp_tier *tier, struct zpp_err *err) {
    const struct zpp_tier_options *options = &tier->options;
    const unsigned disks = options->folders_count ? options->folders_count : 1;
    const struct zpp_aio_config config = {
        .depth = options->depth ? options->depth : DEPTH * disks,
        .block_bytes = options->block_bytes ? options->block_bytes : (size_t)BLOCK_BYTES,
        .flight_bytes = (size_t)FLIGHT_BYTES * disks,
        .stripes = options->folders,
        .stripes_count = options->folders_count,
        .stripe_bytes = options->stripe_bytes ? options->stripe_bytes : (size_t)ZPP_AIO_STRIPE_BYTES,
        .direct = true,
        .checksums = options->checksums,
        .backend = ZPP_AIO_AUTO,
        .log = options->log,
        .log_ctx = options->log_ctx,
        .sys = &tier->sys,
    };
    return zpp_aio_create(&config, &tier->aio, err);
}

zpp_status zpp_tier_create(const struct zpp_tier_options *options, zpp_tier **out, struct zpp_err *err) {
    if (!(options->fraction > 0.0 && options->fraction <= 1.0))
        return zpp_fail(err, ZPP_INVALID, "tier: fraction is %g, wanted above 0 and at most 1", options->fraction);
    if (options->chunk_elems % TIER_PAGE_ELEMS || (options->buffers && options->buffers < 3))
        return zpp_fail(err, ZPP_INVALID, "tier: chunk_elems %zu and buffers %u, wanted a multiple of %d, 3 or more",
                        options->chunk_elems, options->buffers, TIER_PAGE_ELEMS);
    zpp_tier *tier = calloc(1, sizeof *tier);
    if (!tier) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for a tier");
    tier->options = *options;
    tier->sys = options->sys ? *options->sys : *zpp_aio_sys_real();
    tier->path = strdup(options->path);
    zpp_status status = tier->path ? ZPP_OK : zpp_fail(err, ZPP_NOMEM, "tier: no memory for the path");
    if (status == ZPP_OK) status = start_engine(tier, err);
    tier->options.folders = NULL; /* borrowed */
    if (status != ZPP_OK) {
        zpp_tier_destroy(tier);
        return status;
    }
    *out = tier;
    return ZPP_OK;
}

void zpp_tier_destroy(zpp_tier *tier) {
    if (!tier) return;
    tier_backward_step_forget(tier); /* a read ahead of a step that will not come */
    tier_backward_step_drop(tier);
    zpp_aio_arena *arena = tier->aio ? zpp_aio_get_arena(tier->aio) : NULL;
    for (unsigned i = 0; tier->buffers && i < tier->options.buffers; i++)
        if (tier->buffers[i].memory) zpp_aio_arena_free(arena, tier->buffers[i].memory);
    zpp_aio_destroy(tier->aio);
    for (int i = 0; i < 2; i++) {
        struct tier_line *line = &tier->lines[i];
        free(line->stepped);
        zpp_mem_free(line->held, line->planes * line->held_elems * sizeof(float));
    }
    free(tier->buffers);
    free(tier->slices);
    free(tier->path);
    free(tier);
}

zpp_status zpp_tier_add(zpp_tier *tier, size_t elems, bool master, int *slice, struct zpp_err *err) {
    if (tier->sealed) return zpp_fail(err, ZPP_STATE, "tier: a slice of %zu elements comes after seal", elems);
    if (tier->slices_count == tier->slices_room) {
        const int room = tier->slices_room ? 2 * tier->slices_room : 64;
        struct tier_slice *slices = realloc(tier->slices, (size_t)room * sizeof *slices);
        if (!slices) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for %d slices", room);
        tier->slices = slices;
        tier->slices_room = room;
    }
    const int which = master ? 0 : 1;
    struct tier_line *line = &tier->lines[which];
    const size_t begin =
        round_up(line->elems, elems < LARGE_SLICE_ELEMS ? (size_t)SLICE_ALIGN_ELEMS : (size_t)TIER_PAGE_ELEMS);
    tier->slices[tier->slices_count] = (struct tier_slice){ .line = which, .begin_elems = begin, .elems = elems };
    line->elems = begin + elems;
    line->used_elems += elems;
    *slice = tier->slices_count++;
    return ZPP_OK;
}

/* --- seal --------------------------------------------------------------------------------------------------------- */

static void lay_line(const zpp_tier *tier, struct tier_line *line, bool master, uint64_t *used_bytes) {
    for (int kind = 0; kind < ZPP_TIER_KINDS; kind++) {
        const bool has = kind == ZPP_TIER_MASTER ? master : tier->options.moments >> (kind - ZPP_TIER_EXP_AVG) & 1;
        line->plane[kind] = has ? (int)line->planes : -1;
        if (has) line->kinds[line->planes++] = kind;
    }
    line->held_elems = (size_t)((1.0 - tier->options.fraction) * (double)line->elems) / TIER_PAGE_ELEMS *
                       TIER_PAGE_ELEMS;
    line->elems = round_up(line->elems, TIER_PAGE_ELEMS);
    if (!line->planes) line->held_elems = line->elems; /* no record has anything: nothing is to be read */
    const size_t on_disk_elems = line->elems - line->held_elems;
    line->chunk_elems = tier->options.chunk_elems;
    if (!line->chunk_elems) line->chunk_elems = round_up(on_disk_elems / LEAST_CHUNKS + 1, TIER_PAGE_ELEMS);
    if (!tier->options.chunk_elems && line->chunk_elems > CHUNK_ELEMS) line->chunk_elems = CHUNK_ELEMS;
    line->chunks = (on_disk_elems + line->chunk_elems - 1) / line->chunk_elems;
    line->offset_bytes = *used_bytes;
    *used_bytes += (uint64_t)on_disk_elems * line->planes * sizeof(float);
}

static zpp_status make_line_memory(struct tier_line *line, struct zpp_err *err) {
    line->stepped = calloc(line->chunks + 1, sizeof *line->stepped);
    if (!line->stepped) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for %zu chunks", line->chunks);
    if (!line->held_elems || !line->planes) return ZPP_OK;
    void *memory = NULL;
    const zpp_status status =
        zpp_mem_alloc(line->planes * line->held_elems * sizeof(float), ZPP_PAGE_BYTES, &memory, err);
    line->held = memory;
    return status;
}

static void choose_buffers(zpp_tier *tier) {
    if (!tier->options.buffers && tier->options.backward_step) tier_backward_step_choose_buffers(tier);
    if (!tier->options.buffers) tier->options.buffers = BUFFERS;
    for (int i = 0; i < 2; i++) {
        const struct tier_line *line = &tier->lines[i];
        const size_t bytes = line->chunks ? tier_chunk_elems(line, 0) * line->planes * sizeof(float) : 0;
        if (bytes > tier->record_bytes) tier->record_bytes = bytes;
    }
}

static zpp_status make_buffers(zpp_tier *tier, struct zpp_err *err) {
    tier->buffers = calloc(tier->options.buffers, sizeof *tier->buffers);
    if (!tier->buffers) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for %u buffers", tier->options.buffers);
    for (unsigned i = 0; tier->record_bytes && i < tier->options.buffers; i++) {
        void *memory = NULL;
        const zpp_status status = zpp_aio_arena_alloc(zpp_aio_get_arena(tier->aio), tier->record_bytes, &memory, err);
        if (status != ZPP_OK) return status;
        tier->buffers[i].memory = memory;
    }
    return ZPP_OK;
}

zpp_status zpp_tier_seal(zpp_tier *tier, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (tier->sealed) return zpp_fail(err, ZPP_STATE, "tier: sealed twice");
    for (int i = 0; i < 2; i++) lay_line(tier, &tier->lines[i], i == 0, &tier->file_bytes);
    choose_buffers(tier);
    /* At its full length: what was never written reads as zeros, and a full disk is found before training. */
    zpp_status status = zpp_aio_make(tier->aio, tier->path, tier->file_bytes, fault, err);
    for (int i = 0; i < 2 && status == ZPP_OK; i++) status = make_line_memory(&tier->lines[i], err);
    if (status == ZPP_OK) status = tier_backward_step_seal(tier, err);
    if (status == ZPP_OK) status = make_buffers(tier, err);
    if (status == ZPP_OK) tier->sealed = true;
    return status;
}

zpp_status zpp_tier_plan(const struct zpp_tier_options *options, const struct zpp_tier_slice_plan *slices, size_t count,
                         struct zpp_tier_plan *out, struct zpp_err *err) {
    zpp_tier tier = { .options = *options };
    zpp_status status = ZPP_OK;
    int number;
    for (size_t i = 0; i < count && status == ZPP_OK; i++)
        status = zpp_tier_add(&tier, slices[i].elems, slices[i].master, &number, err);
    for (int i = 0; i < 2; i++) lay_line(&tier, &tier.lines[i], i == 0, &tier.file_bytes);
    choose_buffers(&tier);
    *out = (struct zpp_tier_plan){ .buffer_bytes = tier.record_bytes * tier.options.buffers };
    for (int i = 0; i < 2; i++)
        if (tier.lines[i].chunks && tier.lines[i].chunk_elems > out->chunk_elems)
            out->chunk_elems = tier.lines[i].chunk_elems;
    free(tier.slices);
    return status;
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

zpp_status tier_submit(zpp_tier *tier, uint64_t offset_bytes, void *memory, size_t bytes, bool write,
                       zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct zpp_aio_job job = {
        .path = tier->path, .memory = memory, .bytes = bytes, .offset_bytes = offset_bytes, .write = write };
    return zpp_aio_submit(tier->aio, &job, out, fault, err);
}

zpp_status tier_finish(zpp_aio_request **request, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!*request) return ZPP_OK;
    /* No time-out and no tick: the kernel ends every request on a file, and a step cannot stop half-way. */
    const struct zpp_wait patience = { 0, NULL, NULL };
    const zpp_status status = zpp_aio_wait(*request, &patience, err);
    const struct zpp_aio_fault *seen = zpp_aio_request_fault(*request);
    if (status == ZPP_TIER && seen && fault) *fault = *seen;
    zpp_aio_release(*request);
    *request = NULL;
    return status;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* From `at` on the line: how many elements lie together, and where. *held NULL: in chunk *chunk, *inside of it. */
static size_t run_at(const struct tier_line *line, int plane, size_t at, float **held, size_t *chunk, size_t *inside) {
    *held = NULL;
    if (at < line->held_elems) {
        *held = line->held + (size_t)plane * line->held_elems + at;
        return line->held_elems - at;
    }
    *chunk = (at - line->held_elems) / line->chunk_elems;
    *inside = (at - line->held_elems) % line->chunk_elems;
    return tier_chunk_elems(line, *chunk) - *inside;
}

static zpp_status copy_unit_file(zpp_tier *tier, struct tier_line *line, int plane, size_t chunk, size_t inside,
                                 size_t elems, float *memory, bool write, struct zpp_aio_fault *fault,
                                 struct zpp_err *err) {
    const bool moment = line->kinds[plane] != ZPP_TIER_MASTER;
    if (moment && !write && !line->stepped[chunk]) {
        memset(memory, 0, elems * sizeof *memory);
        return ZPP_OK;
    }
    const size_t plane_elems = tier_chunk_elems(line, chunk);
    const uint64_t at = tier_record_offset(line, chunk) + ((size_t)plane * plane_elems + inside) * sizeof *memory;
    zpp_aio_request *request = NULL;
    zpp_status status = tier_submit(tier, at, memory, elems * sizeof *memory, write, &request, fault, err);
    if (status == ZPP_OK) status = tier_finish(&request, fault, err);
    if (status == ZPP_OK && moment && write) line->stepped[chunk] = true;
    return status;
}

zpp_status zpp_tier_copy(zpp_tier *tier, int slice, enum zpp_tier_kind kind, size_t first, size_t elems, float *memory,
                         bool write, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!tier->sealed || slice < 0 || slice >= tier->slices_count)
        return zpp_fail(err, ZPP_STATE, "tier: slice %d is copied, there are %d%s", slice, tier->slices_count,
                        tier->sealed ? "" : ", not sealed yet");
    const struct tier_slice *where = &tier->slices[slice];
    struct tier_line *line = &tier->lines[where->line];
    if (line->plane[kind] < 0 || first > where->elems || elems > where->elems - first)
        return zpp_fail(err, ZPP_INVALID, "tier: elements %zu to %zu of kind %d are copied; slice %d has %zu%s", first,
                        first + elems, (int)kind, slice, where->elems,
                        line->plane[kind] < 0 ? ", and none of that kind" : "");
    if (write) tier_backward_step_forget(tier);
    for (size_t done = 0; done < elems;) {
        float *held;
        size_t chunk = 0, inside = 0;
        const size_t at = where->begin_elems + first + done;
        size_t run = run_at(line, line->plane[kind], at, &held, &chunk, &inside);
        if (run > elems - done) run = elems - done;
        if (held) {
            memcpy(write ? held : memory + done, write ? memory + done : held, run * sizeof *memory);
        } else {
            const zpp_status status = copy_unit_file(tier, line, line->plane[kind], chunk, inside, run, memory + done,
                                                     write, fault, err);
            if (status != ZPP_OK) return status;
        }
        done += run;
    }
    return ZPP_OK;
}

/* --- small answers ------------------------------------------------------------------------------------------------ */

bool zpp_tier_torn(const zpp_tier *tier) {
    return tier->torn;
}

void zpp_tier_mend(zpp_tier *tier) {
    tier->torn = false;
    tier->backward_step.open = false;
    tier_backward_step_forget(tier);
}

void zpp_tier_figures(const zpp_tier *tier, struct zpp_tier_figures *out) {
    struct zpp_aio_figures io;
    zpp_aio_figures(tier->aio, &io);
    *out = (struct zpp_tier_figures){
        .reserved_bytes = tier->file_bytes,
        .buffer_bytes = tier->record_bytes * tier->options.buffers,
        .read_bytes = io.read_bytes,
        .written_bytes = io.written_bytes,
        .checked_bytes = io.checked_bytes,
        .sums_bytes = io.sums_bytes,
        .steps = tier->steps,
        .step_ns = tier->step_ns,
        .waited_ns = tier->waited_ns,
        .uring = io.uring,
    };
    for (int i = 0; i < 2; i++) {
        const struct tier_line *line = &tier->lines[i];
        const size_t held = line->held_elems < line->used_elems ? line->held_elems : line->used_elems;
        for (size_t plane = 0; plane < line->planes; plane++) {
            out->held_bytes[line->kinds[plane]] += held * sizeof(float);
            out->file_bytes[line->kinds[plane]] += (line->used_elems - held) * sizeof(float);
        }
    }
}
