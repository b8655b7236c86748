/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion over many segments: the constants of each, and the version for this CPU; lists.c splits them over threads.
 */
#include "lion.h"

#include <assert.h>

#include "../element.h"
#include "../lists.h"
#include "kernels.h"

static zpp_lion_kernel kernel_of(enum zpp_cpu_level level) {
    switch (level) {
#define ZPP_LION_VARIANT(needs, function) \
    case needs: return function;
#include "variants.def"
#undef ZPP_LION_VARIANT
    default: return NULL;
    }
}

struct zpp_lion_consts zpp_lion_consts_of(const struct zpp_lion_segment *s, float grad_scale) {
    return (struct zpp_lion_consts){
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .keep = (float)(1.0 - s->lr * s->weight_decay),
        .lr = (float)s->lr,
        .beta1 = (float)s->beta1,
        .one_minus_beta1 = (float)(1.0 - s->beta1),
        .beta2 = (float)s->beta2,
        .one_minus_beta2 = (float)(1.0 - s->beta2),
    };
}

struct job {
    const struct zpp_lion_segment *segments;
    float grad_scale;
    zpp_lion_kernel kernel;
};

static struct zpp_list_item item_of(size_t index, const void *arg) {
    const struct job *job = arg;
    const struct zpp_lion_segment *s = &job->segments[index];
    assert(s->elems == 0 || (s->param && s->grad && s->exp_avg));
    assert(zpp_element_is_float(s->grad_dtype) && (!s->param_out || zpp_element_is_float(s->out_dtype)));
    assert(s->lr >= 0.0); /* the vector versions give it a sign */
    return (struct zpp_list_item){
        .elems = s->elems,
        .elem_bytes = 4 * sizeof(float) + zpp_dtype_bytes(s->grad_dtype) +
                      (s->param_out ? zpp_dtype_bytes(s->out_dtype) : 0),
    };
}

static void run(size_t index, size_t begin_elems, size_t end_elems, const void *arg) {
    const struct job *job = arg;
    const struct zpp_lion_consts consts = zpp_lion_consts_of(&job->segments[index], job->grad_scale);
    job->kernel(&job->segments[index], &consts, begin_elems, end_elems);
}

void zpp_lion_step(const struct zpp_lion_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool) {
    const struct job job = { segments, grad_scale, kernel_of(zpp_cpu_level()) };
    zpp_list_run(segments_count, item_of, run, &job, pool);
}

bool zpp_lion_step_at(enum zpp_cpu_level level, const struct zpp_lion_segment *segments, size_t segments_count,
                      float grad_scale, zpp_pool *pool) {
    const struct job job = { segments, grad_scale, kernel_of(level) };
    if (!job.kernel || level > zpp_cpu_detected()) return false;
    zpp_list_run(segments_count, item_of, run, &job, pool);
    return true;
}
