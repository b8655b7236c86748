/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU driver of the element-wise optimizers: the constants of each segment, the loops for this CPU, and the split
 * over threads.
 *
 * All segments together are one line of bytes, cut in equal pieces whatever the segments' lengths, so that a thousand
 * small tensors and one large one are both one call. A cut falls on a multiple of 32 elements of its segment (a turn
 * of the vector loops), or at a block of its moments. Elements know nothing of those beyond, so neither the cuts nor
 * the number of threads show in the bits.
 */
#include "optim.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../element.h"
#include "../moments/tile.h"
#include "optim_kernels.h"

enum {
    PIECE_BYTES = 64 * 1024, /* no piece is smaller: below, a hand-over costs more than the work */
    STARTS_ON_STACK = 256,
};

const struct zpp_optim_shape zpp_optim_shapes[ZPP_OPTIMIZERS] = {
#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) \
    [ZPP_OPTIM_##NAME] = { first, states, written },
#include "optimizers.def"
#undef ZPP_OPTIMIZER
};

/* Bit k: the segment has its optimizer's k-th state. */
static uint32_t states_of(const struct zpp_optim_segment *s) {
    const struct zpp_optim_shape *shape = &zpp_optim_shapes[s->optimizer];
    const bool low = s->how.kind != ZPP_MOMENTS_F32;
    uint32_t states = 0;
    for (int k = 0; k < shape->states; ++k) {
        const bool has = low ? s->moments[shape->first + k].codes != NULL : s->state[shape->first + k] != NULL;
        states |= (uint32_t)has << k;
    }
    return states;
}

union zpp_optim_consts zpp_optim_consts_of(const struct zpp_optim_segment *s, float grad_scale) {
    union zpp_optim_consts consts = { 0 };
    switch ((enum zpp_optimizer)s->optimizer) {
#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) \
    case ZPP_OPTIM_##NAME: consts.name = zpp_##name##_consts_of(s, grad_scale, states_of(s)); break;
#include "optimizers.def"
#undef ZPP_OPTIMIZER
    default: assert(!"an optimizer of the table");
    }
    return consts;
}

/* The constants of both are the same. */
static bool same_consts(const struct zpp_optim_segment *a, const struct zpp_optim_segment *b) {
    const size_t rates_at = offsetof(struct zpp_optim_segment, step);
    const size_t rates_end = offsetof(struct zpp_optim_segment, how);
    return a->optimizer == b->optimizer && a->maximize == b->maximize && a->decoupled_decay == b->decoupled_decay &&
           a->nesterov == b->nesterov && a->init_sum == b->init_sum && states_of(a) == states_of(b) &&
           memcmp((const char *)a + rates_at, (const char *)b + rates_at, rates_end - rates_at) == 0;
}

/* Bytes that one element moves: what the split balances. */
static size_t elem_bytes(const struct zpp_optim_segment *s) {
    const struct zpp_optim_shape *shape = &zpp_optim_shapes[s->optimizer];
    const uint32_t states = states_of(s);
    size_t moved = 0;
    for (int k = 0; k < shape->states; ++k) moved += (states >> k & 1) * (shape->written >> k & 1 ? 2 : 1);
    return 2 * sizeof(float) + (s->grad ? zpp_dtype_bytes(s->grad_dtype) : 0) +
           (s->param_out ? zpp_dtype_bytes(s->out_dtype) : 0) + moved * zpp_moments_elem_bytes(s->how.kind);
}

struct job {
    const struct zpp_optim_segment *segments;
    const size_t *starts; /* [segments_count + 1]: where each segment begins on the line of bytes */
    size_t segments_count;
    float grad_scale;
    const struct zpp_optim_kernels *kernels;
    const struct zpp_moments_kernels *moments;
};

/* The first segment that ends after `at`. */
static size_t segment_at(const struct job *job, size_t at) {
    size_t low = 0, high = job->segments_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (job->starts[middle + 1] > at) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* The element of segment k at which a cut at byte `at` of the line falls. */
static size_t cut_elems(const struct job *job, size_t k, size_t at) {
    const struct zpp_optim_segment *s = &job->segments[k];
    if (at <= job->starts[k]) return 0;
    if (at >= job->starts[k + 1]) return s->elems;
    return zpp_moments_cut(&s->how, (at - job->starts[k]) / elem_bytes(s));
}

/* A step on states that are not fp32: a tile of them after the other, decoded. */
struct tile_job {
    const struct zpp_optim_segment *segment;
    const union zpp_optim_consts *consts;
    zpp_optim_kernel kernel;
};

static void step_tile(size_t begin, size_t end, float *const values[3], const void *arg) {
    const struct tile_job *job = arg;
    struct zpp_optim_segment tile = *job->segment;
    const struct zpp_optim_shape *shape = &zpp_optim_shapes[tile.optimizer];
    ZPP_MOMENTS_CROP(&tile, begin, end);
    for (int k = 0; k < shape->states && k < 3; ++k) {
        tile.state[shape->first + k] = job->consts->options >> k & 1 ? values[k] : NULL;
    }
    job->kernel(&tile, job->consts, 0, tile.elems);
}

static void step_tiles(const struct job *job, const struct tile_job *tile, size_t first, size_t last) {
    const struct zpp_optim_segment *s = tile->segment;
    const int from = zpp_optim_shapes[s->optimizer].first;
    const size_t count = (size_t)__builtin_popcount(states_of(s));
    if (count == 0) { /* SGD without a momentum */
        tile->kernel(s, tile->consts, first, last);
        return;
    }
    const struct zpp_moments_held held = { job->moments, &s->how, s->moments + from, count,
                                           (enum zpp_moments_which)from, false };
    zpp_moments_each_tile(&held, first, last, step_tile, tile);
}

static void run_piece(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    union zpp_optim_consts consts = { 0 };
    const struct zpp_optim_segment *made_for = NULL;
    for (size_t k = segment_at(job, begin); k < job->segments_count && job->starts[k] < end; ++k) {
        const struct zpp_optim_segment *s = &job->segments[k];
        if (!made_for || !same_consts(made_for, s)) consts = zpp_optim_consts_of(s, job->grad_scale);
        made_for = s;
        const size_t first = cut_elems(job, k, begin), last = cut_elems(job, k, end);
        if (first >= last) continue;
        const struct tile_job tile = { s, &consts, job->kernels->step[s->optimizer] };
        if (s->how.kind == ZPP_MOMENTS_F32) tile.kernel(s, &consts, first, last);
        else step_tiles(job, &tile, first, last);
    }
}

struct zpp_optim_segment zpp_optim_part(const struct zpp_optim_segment *whole, size_t begin, size_t elems) {
    struct zpp_optim_segment part = *whole;
    part.elems = elems;
    part.grad = (const char *)whole->grad + begin * zpp_dtype_bytes(whole->grad_dtype);
    if (whole->param) part.param = whole->param + begin;
    if (whole->param_out) part.param_out = (char *)whole->param_out + begin * zpp_dtype_bytes(whole->out_dtype);
    return part;
}

struct zpp_optim_segment zpp_optim_part_with_states(const struct zpp_optim_segment *whole, size_t begin, size_t elems) {
    struct zpp_optim_segment part = zpp_optim_part(whole, begin, elems);
    const size_t code_bytes = zpp_moments_elem_bytes(whole->how.kind);
    for (int k = 0; k < ZPP_OPTIM_STATES; ++k)
        if (whole->how.kind == ZPP_MOMENTS_F32 && whole->state[k]) part.state[k] = whole->state[k] + begin;
    if (whole->how.kind == ZPP_MOMENTS_F32) return part;
    part.how.first_elems += begin;
    for (int k = 0; k < 3; ++k) {
        const struct zpp_moment *moment = &whole->moments[k];
        if (moment->codes) part.moments[k].codes = (char *)moment->codes + begin * code_bytes;
        if (moment->scales && begin)
            part.moments[k].scales = moment->scales + zpp_moments_scales(whole->how.first_elems, begin);
    }
    return part;
}

static void check_segment(const struct zpp_optim_segment *s) {
    assert(s->optimizer < ZPP_OPTIMIZERS);
    assert(s->elems == 0 || s->param);
    assert(s->elems == 0 || s->grad || s->optimizer == ZPP_OPTIM_FROZEN);
    assert(!s->grad || zpp_element_is_float(s->grad_dtype));
    assert(!s->param_out || zpp_element_is_float(s->out_dtype));
    (void)s;
}

static void step_at_level(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale,
                          zpp_pool *pool, enum zpp_cpu_level level) {
    size_t on_stack[STARTS_ON_STACK + 1];
    size_t *allocated = NULL;
    if (segments_count > STARTS_ON_STACK) allocated = malloc((segments_count + 1) * sizeof *allocated);
    size_t *const starts = allocated ? allocated : on_stack;
    /* Without memory for the table the segments go in groups that fit the stack: same bits, only more calls. */
    const size_t capacity = allocated ? segments_count : STARTS_ON_STACK;
    for (size_t done = 0; done < segments_count; done += capacity) {
        const size_t count = segments_count - done < capacity ? segments_count - done : capacity;
        starts[0] = 0;
        for (size_t k = 0; k < count; ++k) {
            check_segment(&segments[done + k]);
            starts[k + 1] = starts[k] + segments[done + k].elems * elem_bytes(&segments[done + k]);
        }
        struct job job = { segments + done, starts, count, grad_scale, ZPP_ISA_AT(level, zpp_optim),
                           zpp_moments_kernels_of(level) };
        zpp_pool_run(pool, starts[count], PIECE_BYTES, run_piece, &job);
    }
    free(allocated);
}

void zpp_optim_step(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool) {
    step_at_level(segments, segments_count, grad_scale, pool, zpp_cpu_level());
}

bool zpp_optim_step_at(enum zpp_cpu_level level, const struct zpp_optim_segment *segments, size_t segments_count,
                       float grad_scale, zpp_pool *pool) {
    if (level > zpp_cpu_detected()) return false;
    step_at_level(segments, segments_count, grad_scale, pool, level);
    return true;
}
