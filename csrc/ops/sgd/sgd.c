/* SPDX-License-Identifier: Apache-2.0
 *
 * SGD over many segments: the constants of each, and the version for this CPU; list_step.h does the rest.
 */
#include "sgd.h"

#include "kernels.h"

static zpp_sgd_kernel list_kernel_of(enum zpp_cpu_level level) {
    switch (level) {
#define ZPP_SGD_VARIANT(needs, function) \
    case needs: return function;
#include "variants.def"
#undef ZPP_SGD_VARIANT
    default: return NULL;
    }
}

struct zpp_sgd_consts zpp_sgd_consts_of(const struct zpp_sgd_segment *s, float grad_scale) {
    return (struct zpp_sgd_consts){
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .l2 = (float)s->weight_decay,
        .use_l2 = s->weight_decay != 0.0,
        .momentum = (float)s->momentum,
        .one_minus_dampening = (float)(1.0 - s->dampening),
        .lr = (float)s->lr,
        .first = s->first,
        .nesterov = s->nesterov,
    };
}

#define LIST_SEGMENT struct zpp_sgd_segment
#define LIST_CONSTS struct zpp_sgd_consts
#define LIST_KERNEL zpp_sgd_kernel
#define LIST_STATE momentum_buffer
#define LIST_WHICH ZPP_MOMENT_FIRST
#define list_consts_of zpp_sgd_consts_of
#include "../list_step.h"

void zpp_sgd_step(const struct zpp_sgd_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool) {
    list_step(segments, segments_count, grad_scale, pool);
}

bool zpp_sgd_step_at(enum zpp_cpu_level level, const struct zpp_sgd_segment *segments, size_t segments_count,
                      float grad_scale, zpp_pool *pool) {
    return list_step_at(level, segments, segments_count, grad_scale, pool);
}
