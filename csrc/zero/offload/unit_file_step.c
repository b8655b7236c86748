/* SPDX-License-Identifier: Apache-2.0
 *
 * The step over parameters, or gradients, in a file. Segments are moved to windows: buffers in which the neighbours of
 * the file lie together, at the same place in a page as in the file, so that what is between the first and the last
 * page moves without a copy. Window k+1 .. k+3 are read and k-1 is written while k is stepped. Gradients are only read.
 *
 * Between two parameters of a unit lie fewer than 64 bytes, which no parameter has: they are written as zeros. A gap of
 * 64 or more is a parameter that is not stepped, and is left alone. A step into next copies carries it over.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "unit_file_internal.h"

enum { GAP_BYTES = 64, WINDOW_ELEMS = 512 * 1024, CARRY_BYTES = 1 << 20 };

/* The part of a segment that is in the file. */
enum part { GRAD, PARAM, PARAM_OUT };
struct place {
    size_t offset_bytes, bytes;
    enum part part;
};

static bool place_of(const zpp_unit_file *unit_file, const struct zpp_optim_segment *segment, struct place *out) {
    const struct {
        const void *at;
        zpp_dtype dtype;
    } parts[] = { [GRAD] = { segment->grad, segment->grad_dtype },
                  [PARAM] = { segment->param, ZPP_F32 },
                  [PARAM_OUT] = { segment->param_out, segment->out_dtype } };
    for (enum part part = GRAD; part <= PARAM_OUT; part++) {
        if (!unit_file_in_mapping(unit_file, parts[part].at)) continue;
        *out = (struct place){ .offset_bytes = (size_t)((const unsigned char *)parts[part].at - unit_file->mapping),
                               .bytes = segment->elems * zpp_dtype_bytes(parts[part].dtype), .part = part };
        return out->offset_bytes >= unit_file->resident_bytes;
    }
    return false;
}

static struct zpp_optim_segment *segment_at(struct zpp_optim_segment *first, size_t index, size_t stride_bytes) {
    return (struct zpp_optim_segment *)(void *)((unsigned char *)first + index * stride_bytes);
}

/* Copies of two units do not lie together. */
static bool continues(const zpp_unit_file *unit_file, const struct unit_file_run *run, const struct place *place) {
    const size_t end = run->offset_bytes + run->bytes;
    return run->reads == (place->part != PARAM_OUT) && place->offset_bytes >= end &&
           place->offset_bytes - end < GAP_BYTES &&
           (!unit_file->keeps_two ||
            unit_file_unit_at(unit_file, run->offset_bytes) == unit_file_unit_at(unit_file, place->offset_bytes));
}

/* One more piece of the window: a longer run, or a new one. */
static bool add_place(const zpp_unit_file *unit_file, struct unit_file_window *window, const struct place *place,
                      size_t *used_bytes) {
    struct unit_file_run *last = window->runs_count ? &window->runs[window->runs_count - 1] : NULL;
    if (last && continues(unit_file, last, place)) {
        last->bytes = place->offset_bytes + place->bytes - last->offset_bytes;
        *used_bytes = last->at_bytes + last->bytes;
        return true;
    }
    struct unit_file_run *runs =
        zpp_array_reserve(window->runs, window->runs_count, &window->runs_capacity, sizeof *runs);
    if (!runs) return false;
    window->runs = runs;
    const size_t at = zpp_round_up(*used_bytes, ZPP_BLOCK_BYTES) + place->offset_bytes % ZPP_BLOCK_BYTES;
    window->runs[window->runs_count++] = (struct unit_file_run){
        .offset_bytes = place->offset_bytes, .bytes = place->bytes, .at_bytes = at,
        .reads = place->part != PARAM_OUT };
    *used_bytes = at + place->bytes;
    return true;
}

static zpp_status make_capacity(zpp_unit_file *unit_file, struct unit_file_window *window, size_t bytes,
                            struct zpp_err *err) {
    if (bytes <= window->capacity_bytes) return ZPP_OK;
    zpp_aio_arena *arena = zpp_aio_get_arena(unit_file->file.aio);
    if (window->memory) zpp_aio_arena_free(arena, window->memory);
    window->memory = NULL;
    window->capacity_bytes = 0;
    void *memory = NULL;
    const zpp_status status = zpp_aio_arena_alloc(arena, zpp_round_up(bytes, ZPP_BLOCK_BYTES), &memory, err);
    if (status != ZPP_OK) return status;
    window->memory = memory;
    window->capacity_bytes = zpp_round_up(bytes, ZPP_BLOCK_BYTES);
    return ZPP_OK;
}

/* Let the segments point at the buffer for what they have in the file. */
static void move_segments(const zpp_unit_file *unit_file, const struct unit_file_window *window,
                          struct zpp_optim_segment *first, size_t count, size_t stride_bytes) {
    size_t at_run = 0, end = 0;
    for (size_t i = 0; i < count; i++) {
        struct zpp_optim_segment *segment = segment_at(first, i, stride_bytes);
        struct place place;
        if (!place_of(unit_file, segment, &place)) continue;
        const struct unit_file_run *run = &window->runs[at_run];
        while (place.offset_bytes < run->offset_bytes || place.offset_bytes >= run->offset_bytes + run->bytes) {
            run = &window->runs[++at_run];
            end = 0;
        }
        const size_t inside = place.offset_bytes - run->offset_bytes;
        unsigned char *run_memory = window->memory + run->at_bytes;
        if (end && !run->reads) memset(run_memory + end, 0, inside - end);
        end = inside + place.bytes;
        if (place.part == GRAD) segment->grad = run_memory + inside;
        else if (place.part == PARAM) segment->param = (float *)(void *)(run_memory + inside);
        else segment->param_out = run_memory + inside;
    }
}

/* Return `status` where it is a failure, else how the requests of the window ended. */
static zpp_status finish_runs(zpp_unit_file *unit_file, struct unit_file_window *window, zpp_status status,
                              struct zpp_aio_fault *fault, struct zpp_err *err) {
    const uint64_t began_ns = zpp_now_ns();
    for (size_t i = 0; i < window->runs_count; i++)
        status = zpp_scratch_finish_after(status, &window->runs[i].request, fault, err);
    unit_file->step_wait_ns += zpp_now_ns() - began_ns;
    return status;
}

static zpp_status submit_runs(zpp_unit_file *unit_file, struct unit_file_window *window, bool write, bool next,
                              struct zpp_aio_fault *fault, struct zpp_err *err) {
    for (size_t i = 0; i < window->runs_count; i++) {
        struct unit_file_run *run = &window->runs[i];
        if (!write && !run->reads) continue;
        const zpp_status status = unit_file_submit(unit_file, run->offset_bytes, window->memory + run->at_bytes,
                                                   run->bytes, write, next, &run->request, fault, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

static zpp_status open_window(zpp_unit_file *unit_file, size_t index, struct zpp_optim_segment *first, size_t count,
                              size_t stride_bytes, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct unit_file_window *window = &unit_file->windows[index % ZPP_UNIT_FILE_WINDOWS];
    zpp_status status = finish_runs(unit_file, window, ZPP_OK, fault, err);
    window->runs_count = 0;
    if (status != ZPP_OK) return status;
    size_t used_bytes = 0;
    for (size_t i = 0; i < count; i++) {
        struct place place;
        if (!place_of(unit_file, segment_at(first, i, stride_bytes), &place)) continue;
        if (!add_place(unit_file, window, &place, &used_bytes))
            return zpp_fail(err, ZPP_NOMEM, "params: no memory for the %zu pieces of a step", count);
    }
    status = make_capacity(unit_file, window, used_bytes, err);
    if (status != ZPP_OK) {
        window->runs_count = 0;
        return status;
    }
    move_segments(unit_file, window, first, count, stride_bytes);
    return submit_runs(unit_file, window, false, false, fault, err);
}

zpp_status zpp_unit_file_window_open(const struct zpp_step_files *files, size_t index, struct zpp_optim_segment *first,
                                     size_t count, size_t stride_bytes, struct zpp_aio_fault *fault,
                                     struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (files->params) status = open_window(files->params, index, first, count, stride_bytes, fault, err);
    if (files->grads && status == ZPP_OK)
        status = open_window(files->grads, index, first, count, stride_bytes, fault, err);
    return status;
}

zpp_status zpp_unit_file_window_ready(const struct zpp_step_files *files, size_t index, struct zpp_aio_fault *fault,
                                      struct zpp_err *err) {
    const size_t at = index % ZPP_UNIT_FILE_WINDOWS;
    zpp_status status = ZPP_OK;
    if (files->params) status = finish_runs(files->params, &files->params->windows[at], ZPP_OK, fault, err);
    if (files->grads && status == ZPP_OK)
        status = finish_runs(files->grads, &files->grads->windows[at], ZPP_OK, fault, err);
    return status;
}

zpp_status zpp_unit_file_window_write(const struct zpp_step_files *files, size_t index, struct zpp_aio_fault *fault,
                                      struct zpp_err *err) {
    if (!files->params) return ZPP_OK;
    return submit_runs(files->params, &files->params->windows[index % ZPP_UNIT_FILE_WINDOWS], true, files->next, fault,
                       err);
}

static zpp_status settle(zpp_unit_file *unit_file, zpp_status status, struct zpp_aio_fault *fault,
                         struct zpp_err *err) {
    for (int i = 0; i < ZPP_UNIT_FILE_WINDOWS; i++) {
        status = finish_runs(unit_file, &unit_file->windows[i], status, fault, err);
        unit_file->windows[i].runs_count = 0;
    }
    return status;
}

zpp_status zpp_unit_file_settle(const struct zpp_step_files *files, zpp_status status, struct zpp_aio_fault *fault,
                                struct zpp_err *err) {
    if (files->params) status = settle(files->params, status, fault, err);
    return files->grads ? settle(files->grads, status, fault, err) : status;
}

void unit_file_drop_windows(zpp_unit_file *unit_file) {
    for (int i = 0; i < ZPP_UNIT_FILE_WINDOWS; i++) {
        struct unit_file_window *window = &unit_file->windows[i];
        if (window->memory) zpp_aio_arena_free(zpp_aio_get_arena(unit_file->file.aio), window->memory);
        free(window->runs);
        *window = (struct unit_file_window){ 0 };
    }
}

/* --- next copies -------------------------------------------------------------------------------------------------- */

zpp_status zpp_unit_file_carry(zpp_unit_file *unit_file, const void *address, size_t bytes, struct zpp_aio_fault *fault,
                               struct zpp_err *err) {
    const size_t offset = (size_t)((const unsigned char *)address - unit_file->mapping);
    if (!unit_file->file.aio) return zpp_fail(err, ZPP_STATE,
                                         "params: their file is closed with the model; prepare a new one");
    zpp_aio_arena *arena = zpp_aio_get_arena(unit_file->file.aio);
    const size_t most_bytes = bytes < CARRY_BYTES ? bytes : CARRY_BYTES;
    const size_t capacity_bytes = zpp_round_up(most_bytes, ZPP_BLOCK_BYTES) + ZPP_BLOCK_BYTES;
    void *memory = NULL;
    zpp_status status = zpp_aio_arena_alloc(arena, capacity_bytes, &memory, err);
    if (status != ZPP_OK) return status;
    for (size_t done = 0, run; done < bytes && status == ZPP_OK; done += run) {
        const size_t inside = (offset + done) % ZPP_BLOCK_BYTES; /* so that whole pages move directly */
        run = bytes - done < CARRY_BYTES - inside ? bytes - done : CARRY_BYTES - inside;
        unsigned char *at = (unsigned char *)memory + inside;
        status = unit_file_move(unit_file, offset + done, at, run, false, false, fault, err);
        if (status == ZPP_OK) status = unit_file_move(unit_file, offset + done, at, run, true, true, fault, err);
    }
    zpp_aio_arena_free(arena, memory);
    return status;
}

/* --- states in memory --------------------------------------------------------------------------------------------- */

/* Segments cut at the borders of windows; window w has parts[first[w] .. first[w + 1]). */
struct windows {
    struct zpp_optim_segment *parts;
    size_t *first;
    size_t parts_count, windows_count;
};

static bool cut_windows(const struct zpp_optim_segment *segments, size_t count, struct windows *out) {
    size_t elems = 0;
    for (size_t i = 0; i < count; i++) elems += segments[i].elems;
    const size_t windows = elems / WINDOW_ELEMS + 1;
    *out = (struct windows){ .parts = calloc(count + windows, sizeof *out->parts),
                             .first = calloc(windows + 1, sizeof *out->first) };
    if (!out->parts || !out->first) return false;
    size_t window_elems = 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t done = 0; done < segments[i].elems;) {
            if (!window_elems) {
                out->first[out->windows_count++] = out->parts_count;
                window_elems = WINDOW_ELEMS;
            }
            const size_t left = segments[i].elems - done, run = left < window_elems ? left : window_elems;
            out->parts[out->parts_count++] = zpp_optim_part_with_states(&segments[i], done, run);
            done += run;
            window_elems -= run;
        }
    }
    out->first[out->windows_count] = out->parts_count;
    return true;
}

/* The windows of the pipeline. */
struct step_run {
    const struct zpp_step_files *files;
    struct windows list;
    float grad_scale;
    zpp_pool *pool;
    bool *inconsistent;
};

static zpp_status read_window(void *ctx, size_t index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct step_run *run = ctx;
    const struct windows *list = &run->list;
    return zpp_unit_file_window_open(run->files, index, &list->parts[list->first[index]],
                                     list->first[index + 1] - list->first[index], sizeof *list->parts, fault, err);
}

static zpp_status step_window(void *ctx, size_t index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct step_run *run = ctx;
    const struct windows *list = &run->list;
    const zpp_status status = zpp_unit_file_window_ready(run->files, index, fault, err);
    if (status != ZPP_OK) return status;
    *run->inconsistent = true;
    zpp_optim_step(&list->parts[list->first[index]], list->first[index + 1] - list->first[index], run->grad_scale,
                   run->pool);
    return zpp_unit_file_window_write(run->files, index, fault, err);
}

static zpp_status run_windows(struct step_run *run, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_offload_pipeline pipeline = {
        .windows = run->list.windows_count, .buffers = ZPP_UNIT_FILE_WINDOWS, .ctx = run, .read = read_window,
        .step = step_window };
    zpp_status status = zpp_offload_fill(&pipeline, fault, err);
    if (status == ZPP_OK) status = zpp_offload_run(&pipeline, fault, err);
    return zpp_unit_file_settle(run->files, status, fault, err);
}

zpp_status zpp_unit_file_step(const struct zpp_step_files *files, struct zpp_optim_segment *segments, size_t count,
                              float grad_scale, zpp_pool *pool, bool *inconsistent, struct zpp_aio_fault *fault,
                              struct zpp_err *err) {
    struct step_run run = { .files = files, .grad_scale = grad_scale, .pool = pool, .inconsistent = inconsistent };
    *inconsistent = false;
    if (!files->params && !files->grads) {
        zpp_optim_step(segments, count, grad_scale, pool);
        return ZPP_OK;
    }
    zpp_status status = ZPP_OK;
    if (cut_windows(segments, count, &run.list)) status = run_windows(&run, fault, err);
    else status = zpp_fail(err, ZPP_NOMEM, "params: no memory for the windows of a step over %zu pieces", count);
    *inconsistent = *inconsistent && status != ZPP_OK;
    free(run.list.parts);
    free(run.list.first);
    return status;
}
