/* SPDX-License-Identifier: Apache-2.0
 *
 * Adagrad over many segments: the constants of each, and the version for this CPU; list_step.h does the rest.
 */
#include "adagrad.h"

#include <assert.h>

#include "kernels.h"

static zpp_adagrad_kernel list_kernel_of(enum zpp_cpu_level level) {
    switch (level) {
#define ZPP_ADAGRAD_VARIANT(needs, function) \
    case needs: return function;
#include "variants.def"
#undef ZPP_ADAGRAD_VARIANT
    default: return NULL;
    }
}

struct zpp_adagrad_consts zpp_adagrad_consts_of(const struct zpp_adagrad_segment *s, float grad_scale) {
    assert(s->elems == 0 || s->sum || s->moment.codes);
    assert(s->step >= 1);
    return (struct zpp_adagrad_consts){
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .l2 = (float)s->weight_decay,
        .use_l2 = s->weight_decay != 0.0,
        .eps = (float)s->eps,
        .step_size = (float)(s->lr / (1.0 + (double)(s->step - 1) * s->lr_decay)),
    };
}

#define LIST_SEGMENT struct zpp_adagrad_segment
#define LIST_CONSTS struct zpp_adagrad_consts
#define LIST_KERNEL zpp_adagrad_kernel
#define LIST_STATE sum
#define LIST_WHICH ZPP_MOMENT_SECOND
#define list_consts_of zpp_adagrad_consts_of
#include "../list_step.h"

void zpp_adagrad_step(const struct zpp_adagrad_segment *segments, size_t segments_count, float grad_scale,
                      zpp_pool *pool) {
    list_step(segments, segments_count, grad_scale, pool);
}

bool zpp_adagrad_step_at(enum zpp_cpu_level level, const struct zpp_adagrad_segment *segments, size_t segments_count,
                      float grad_scale, zpp_pool *pool) {
    return list_step_at(level, segments, segments_count, grad_scale, pool);
}
