/* SPDX-License-Identifier: Apache-2.0
 *
 * 0/1 Adam's step over many segments: the constants of each, and the version for this CPU; lists.c splits the segments
 * over threads.
 */
#include "zero_one.h"

#include <assert.h>
#include <math.h>

#include "../element.h"
#include "../lists.h"
#include "kernels.h"

struct job {
    const struct zpp_zero_one_segment *segments;
    float grad_scale;
    zpp_zero_one_kernel kernel;
};

static zpp_zero_one_kernel kernel_of(enum zpp_cpu_level level) {
    switch (level) {
#define ZPP_ZERO_ONE_VARIANT(needs, function) \
    case needs: return function;
#include "variants.def"
#undef ZPP_ZERO_ONE_VARIANT
    default: return NULL;
    }
}

struct zpp_zero_one_consts zpp_zero_one_consts_of(const struct zpp_zero_one_segment *s, float grad_scale) {
    assert(s->variance_step >= 1);
    return (struct zpp_zero_one_consts){
        .grad_scale = grad_scale,
        .beta1 = (float)s->beta1,
        .one_minus_beta1 = (float)(1.0 - s->beta1),
        .walk = { .keep = (float)(1.0 - s->decay),
                  .step_size = (float)s->step_size,
                  .root_scale = (float)(1.0 / sqrt(1.0 - pow(s->beta2, (double)s->variance_step))),
                  .eps = (float)s->eps },
    };
}

static bool moves_anchor(const struct zpp_zero_one_segment *s) { return s->anchor && s->decay != 0.0; }

static struct zpp_list_item item_of(size_t index, const void *arg) {
    const struct zpp_zero_one_segment *s = &((const struct job *)arg)->segments[index];
    assert(s->elems == 0 || (s->param && s->exp_avg && s->exp_avg_sq && s->grad));
    assert(zpp_element_is_float(s->grad_dtype) && (!s->param_out || zpp_element_is_float(s->out_dtype)));
    return (struct zpp_list_item){
        .elems = s->elems,
        .elem_bytes = (5 + (s->moved ? 2 : 0) + (moves_anchor(s) ? 2 : 0)) * sizeof(float) +
                      zpp_dtype_bytes(s->grad_dtype) + (s->param_out ? zpp_dtype_bytes(s->out_dtype) : 0),
    };
}

static void run(size_t index, size_t begin_elems, size_t end_elems, const void *arg) {
    const struct job *job = arg;
    struct zpp_zero_one_segment segment = job->segments[index];
    const struct zpp_zero_one_consts consts = zpp_zero_one_consts_of(&segment, job->grad_scale);
    if (!moves_anchor(&segment)) segment.anchor = NULL;
    job->kernel(&segment, &consts, begin_elems, end_elems);
}

bool zpp_zero_one_step_at(enum zpp_cpu_level level, const struct zpp_zero_one_segment *segments, size_t segments_count,
                          float grad_scale, zpp_pool *pool) {
    const struct job job = { segments, grad_scale, kernel_of(level) };
    if (!job.kernel || level > zpp_cpu_detected()) return false;
    zpp_list_run(segments_count, item_of, run, &job, pool);
    return true;
}

void zpp_zero_one_step(const struct zpp_zero_one_segment *segments, size_t segments_count, float grad_scale,
                       zpp_pool *pool) {
    zpp_zero_one_step_at(zpp_cpu_level(), segments, segments_count, grad_scale, pool);
}
