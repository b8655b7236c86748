/* SPDX-License-Identifier: Apache-2.0
 *
 * The step with a frozen variance over many segments: the constants of each, and the version for this CPU; lists.c
 * splits the segments over threads.
 */
#include "frozen.h"

#include <assert.h>
#include <math.h>

#include "../element.h"
#include "../lists.h"
#include "kernels.h"

struct job {
    const struct zpp_frozen_segment *segments;
    zpp_frozen_kernel kernel;
};

static zpp_frozen_kernel kernel_of(enum zpp_cpu_level level) {
    switch (level) {
#define ZPP_FROZEN_VARIANT(needs, function) \
    case needs: return function;
#include "variants.def"
#undef ZPP_FROZEN_VARIANT
    default: return NULL;
    }
}

struct zpp_frozen_consts zpp_frozen_consts_of(const struct zpp_frozen_segment *s) {
    assert(s->variance_step >= 1);
    return (struct zpp_frozen_consts){
        .keep = (float)(1.0 - s->decay),
        .step_size = (float)s->step_size,
        .root_scale = (float)(1.0 / sqrt(1.0 - pow(s->beta2, (double)s->variance_step))),
        .eps = (float)s->eps,
    };
}

static struct zpp_list_item item_of(size_t index, const void *arg) {
    const struct zpp_frozen_segment *s = &((const struct job *)arg)->segments[index];
    assert(s->elems == 0 || (s->param && s->exp_avg && s->exp_avg_sq));
    assert(!s->param_out || zpp_element_is_float(s->out_dtype));
    return (struct zpp_list_item){
        .elems = s->elems,
        .elem_bytes = 4 * sizeof(float) + (s->param_out ? zpp_dtype_bytes(s->out_dtype) : 0),
    };
}

static void run(size_t index, size_t begin_elems, size_t end_elems, const void *arg) {
    const struct job *job = arg;
    const struct zpp_frozen_consts consts = zpp_frozen_consts_of(&job->segments[index]);
    job->kernel(&job->segments[index], &consts, begin_elems, end_elems);
}

bool zpp_frozen_step_at(enum zpp_cpu_level level, const struct zpp_frozen_segment *segments, size_t segments_count,
                        zpp_pool *pool) {
    const struct job job = { segments, kernel_of(level) };
    if (!job.kernel || level > zpp_cpu_detected()) return false;
    zpp_list_run(segments_count, item_of, run, &job, pool);
    return true;
}

void zpp_frozen_step(const struct zpp_frozen_segment *segments, size_t segments_count, zpp_pool *pool) {
    zpp_frozen_step_at(zpp_cpu_level(), segments, segments_count, pool);
}
