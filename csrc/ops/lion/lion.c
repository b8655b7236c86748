/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion over many segments: the constants of each, and the version for this CPU; list_step.h does the rest.
 */
#include "lion.h"

#include <assert.h>

#include "kernels.h"

static zpp_lion_kernel list_kernel_of(enum zpp_cpu_level level) {
    switch (level) {
#define ZPP_LION_VARIANT(needs, function) \
    case needs: return function;
#include "variants.def"
#undef ZPP_LION_VARIANT
    default: return NULL;
    }
}

struct zpp_lion_consts zpp_lion_consts_of(const struct zpp_lion_segment *s, float grad_scale) {
    assert(s->elems == 0 || s->exp_avg || s->moment.codes);
    assert(s->lr >= 0.0); /* the vector versions give it a sign */
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

#define LIST_SEGMENT struct zpp_lion_segment
#define LIST_CONSTS struct zpp_lion_consts
#define LIST_KERNEL zpp_lion_kernel
#define LIST_STATE exp_avg
#define LIST_WHICH ZPP_MOMENT_FIRST
#define list_consts_of zpp_lion_consts_of
#include "../list_step.h"

void zpp_lion_step(const struct zpp_lion_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool) {
    list_step(segments, segments_count, grad_scale, pool);
}

bool zpp_lion_step_at(enum zpp_cpu_level level, const struct zpp_lion_segment *segments, size_t segments_count,
                      float grad_scale, zpp_pool *pool) {
    return list_step_at(level, segments, segments_count, grad_scale, pool);
}
