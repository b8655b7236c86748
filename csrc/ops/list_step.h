/* SPDX-License-Identifier: Apache-2.0
 *
 * A step over a list, of an optimizer with at most one state. Included once a file, after
 *
 *     LIST_SEGMENT, LIST_CONSTS, LIST_KERNEL             its structs, and the type of a version for a CPU
 *     LIST_STATE                                         the segment's field for the state in fp32
 *     LIST_WHICH                                         which moment the state is where it is not fp32
 *     LIST_CONSTS list_consts_of(const LIST_SEGMENT *, float grad_scale)
 *     static LIST_KERNEL list_kernel_of(enum zpp_cpu_level)   NULL where this build has none
 *
 * It gives list_step() and list_step_at(). lists.c splits the segments over threads; a state in fewer bits goes through
 * tiles (moments/tile.h).
 */
#ifndef ZPP_OPS_LIST_STEP_H
#define ZPP_OPS_LIST_STEP_H

#include <assert.h>

#include "element.h"
#include "lists.h"
#include "moments/tile.h"

struct list_job {
    const LIST_SEGMENT *segments;
    float grad_scale;
    LIST_KERNEL kernel;
    const struct zpp_moments_kernels *moments;
};

static struct zpp_list_item list_item_of(size_t index, const void *arg) {
    const struct list_job *job = arg;
    const LIST_SEGMENT *s = &job->segments[index];
    const bool low = s->how.kind != ZPP_MOMENTS_F32;
    assert(s->elems == 0 || (s->param && s->grad && (!low || s->moment.codes)));
    assert(zpp_element_is_float(s->grad_dtype) && (!s->param_out || zpp_element_is_float(s->out_dtype)));
    return (struct zpp_list_item){
        .elems = s->elems,
        .elem_bytes = 2 * sizeof(float) + (low || s->LIST_STATE ? 2 * zpp_moments_elem_bytes(s->how.kind) : 0) +
                      zpp_dtype_bytes(s->grad_dtype) + (s->param_out ? zpp_dtype_bytes(s->out_dtype) : 0),
        .how = s->how,
    };
}

struct list_tile {
    const LIST_SEGMENT *segment;
    const LIST_CONSTS *consts;
    LIST_KERNEL kernel;
};

static void list_step_tile(size_t begin, size_t end, float *const values[3], const void *arg) {
    const struct list_tile *job = arg;
    LIST_SEGMENT tile = *job->segment;
    ZPP_MOMENTS_CROP(&tile, begin, end);
    tile.LIST_STATE = values[0];
    job->kernel(&tile, job->consts, 0, tile.elems);
}

static void list_run(size_t index, size_t begin_elems, size_t end_elems, const void *arg) {
    const struct list_job *job = arg;
    const LIST_SEGMENT *s = &job->segments[index];
    const LIST_CONSTS consts = list_consts_of(s, job->grad_scale);
    if (s->how.kind == ZPP_MOMENTS_F32) {
        job->kernel(s, &consts, begin_elems, end_elems);
        return;
    }
    const struct list_tile tile = { s, &consts, job->kernel };
    const struct zpp_moments_held held = { job->moments, &s->how, &s->moment, 1, LIST_WHICH, false };
    zpp_moments_each_tile(&held, begin_elems, end_elems, list_step_tile, &tile);
}

static bool list_step_at(enum zpp_cpu_level level, const LIST_SEGMENT *segments, size_t segments_count,
                         float grad_scale, zpp_pool *pool) {
    const struct list_job job = { segments, grad_scale, list_kernel_of(level), zpp_moments_kernels_of(level) };
    if (!job.kernel || level > zpp_cpu_detected()) return false;
    zpp_list_run(segments_count, list_item_of, list_run, &job, pool);
    return true;
}

static void list_step(const LIST_SEGMENT *segments, size_t segments_count, float grad_scale, zpp_pool *pool) {
    list_step_at(zpp_cpu_level(), segments, segments_count, grad_scale, pool);
}

#endif
