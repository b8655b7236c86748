/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam over many segments: the constants of each, the version for this CPU, and the split over threads.
 *
 * All segments together are one line of bytes, cut in equal pieces whatever the segments' lengths, so that a thousand
 * small tensors and one large one are both one call. A cut falls on a multiple of 32 elements of its segment (a turn
 * of the vector versions), or at a block of its moments. Elements know nothing of those beyond, so neither the cuts nor
 * the number of threads show in the bits.
 */
#include "adam.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum {
    PIECE_BYTES = 64 * 1024,   /* no piece is smaller: below, a hand-over costs more than the work */
    STARTS_ON_STACK = 256,
};

zpp_adam_kernel zpp_adam_kernel_of(enum zpp_cpu_level level) {
    switch (level) {
#define ZPP_ADAM_VARIANT(needs, function) \
    case needs: return function;
#include "variants.def"
#undef ZPP_ADAM_VARIANT
    default: return NULL;
    }
}

struct zpp_adam_consts zpp_adam_consts_of(const struct zpp_optim_segment *s, float grad_scale) {
    const double correction1 = 1.0 - pow(s->beta1, (double)s->step), correction2 = 1.0 - pow(s->beta2, (double)s->step);
    const double lerp = 1.0 - s->beta1;
    return (struct zpp_adam_consts){
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .keep = s->decoupled_decay ? (float)(1.0 - s->lr * s->weight_decay) : 1.0f,
        .l2 = s->decoupled_decay ? 0.0f : (float)s->weight_decay,
        .use_l2 = !s->decoupled_decay && s->weight_decay != 0.0,
        .lerp = (float)lerp,
        .lerp_far = (float)(1.0 - lerp),
        .use_far = lerp >= 0.5,
        .beta2 = (float)s->beta2,
        .one_minus_beta2 = (float)(1.0 - s->beta2),
        .root_scale = (float)(1.0 / sqrt(correction2)),
        .eps = (float)s->eps,
        .step_size = (float)(s->lr / correction1),
    };
}

static bool same_consts(const struct zpp_optim_segment *a, const struct zpp_optim_segment *b) {
    return a->step == b->step && a->lr == b->lr && a->beta1 == b->beta1 && a->beta2 == b->beta2 && a->eps == b->eps &&
           a->weight_decay == b->weight_decay && a->decoupled_decay == b->decoupled_decay && a->maximize == b->maximize;
}

/* Bytes that one element moves: what the split balances. */
static size_t elem_bytes(const struct zpp_optim_segment *s) {
    const size_t moments = s->max_exp_avg_sq || s->moments[ZPP_MOMENT_MAX].codes ? 3 : 2;
    return 2 * sizeof(float) + zpp_dtype_bytes(s->grad_dtype) + (s->param_out ? zpp_dtype_bytes(s->out_dtype) : 0) +
           2 * moments * zpp_moments_elem_bytes(s->how.kind);
}

struct job {
    const struct zpp_optim_segment *segments;
    const size_t *starts; /* [segments_count + 1]: where each segment begins on the line of bytes */
    size_t segments_count;
    float grad_scale;
    zpp_adam_kernel kernel;
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

static void run_piece(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    struct zpp_adam_consts consts;
    const struct zpp_optim_segment *made_for = NULL;
    for (size_t k = segment_at(job, begin); k < job->segments_count && job->starts[k] < end; ++k) {
        const struct zpp_optim_segment *s = &job->segments[k];
        if (!made_for || !same_consts(made_for, s)) consts = zpp_adam_consts_of(s, job->grad_scale);
        made_for = s;
        const size_t first = cut_elems(job, k, begin), last = cut_elems(job, k, end);
        if (first >= last) continue;
        if (s->how.kind == ZPP_MOMENTS_F32) job->kernel(s, &consts, first, last);
        else zpp_adam_low(s, &consts, job->kernel, job->moments, first, last);
    }
}

static void check_segment(const struct zpp_optim_segment *s) {
    assert(s->elems == 0 || (s->param && s->grad));
    assert(s->elems == 0 || s->how.kind != ZPP_MOMENTS_F32 || (s->exp_avg && s->exp_avg_sq));
    assert(s->elems == 0 || s->how.kind == ZPP_MOMENTS_F32 || (s->moments[0].codes && s->moments[1].codes));
    assert(s->grad_dtype == ZPP_F32 || s->grad_dtype == ZPP_BF16 || s->grad_dtype == ZPP_F16);
    assert(!s->param_out || s->out_dtype == ZPP_F32 || s->out_dtype == ZPP_BF16 || s->out_dtype == ZPP_F16);
    assert(s->step >= 1);
    (void)s;
}

static void step_at_level(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale,
                          zpp_pool *pool, enum zpp_cpu_level level) {
    size_t on_stack[STARTS_ON_STACK + 1];
    size_t *allocated = NULL;
    if (segments_count > STARTS_ON_STACK) allocated = malloc((segments_count + 1) * sizeof *allocated);
    size_t *const starts = allocated ? allocated : on_stack;
    /* Without memory for the table the segments go in groups that fit the stack: same bits, only more calls. */
    const size_t room = allocated ? segments_count : STARTS_ON_STACK;
    for (size_t done = 0; done < segments_count; done += room) {
        const size_t count = segments_count - done < room ? segments_count - done : room;
        starts[0] = 0;
        for (size_t k = 0; k < count; ++k) {
            check_segment(&segments[done + k]);
            starts[k + 1] = starts[k] + segments[done + k].elems * elem_bytes(&segments[done + k]);
        }
        struct job job = { segments + done, starts, count, grad_scale, zpp_adam_kernel_of(level),
                           zpp_moments_kernels_of(level) };
        zpp_pool_run(pool, starts[count], PIECE_BYTES, run_piece, &job);
    }
    free(allocated);
}

void zpp_adam_step(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool) {
    step_at_level(segments, segments_count, grad_scale, pool, zpp_cpu_level());
}

bool zpp_adam_step_at(enum zpp_cpu_level level, const struct zpp_optim_segment *segments, size_t segments_count,
                      float grad_scale, zpp_pool *pool) {
    if (!zpp_adam_kernel_of(level) || level > zpp_cpu_detected()) return false;
    step_at_level(segments, segments_count, grad_scale, pool, level);
    return true;
}
