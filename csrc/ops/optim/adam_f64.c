/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam in float64, parameters, gradients and moments: optim.h, with the arithmetic of adam_f64.h. On the CPU it is one
 * plain loop, which the compiler vectorises: it is for models that need the precision, not for speed. The launch on
 * CUDA is here, too (optim_cuda.cu).
 */
#include <assert.h>
#include <math.h>

#include "../launch_cuda.h"
#include "adam_f64.h"
#include "optim.h"

enum { GRAIN_ELEMS = 4096 };

_Static_assert(sizeof(struct zpp_adam_f64_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");

struct job {
    const struct zpp_adam_f64_segment *segment;
    struct zpp_adam_f64_consts c;
};

static struct zpp_adam_f64_consts consts_of(const struct zpp_optim_segment *rates, double grad_scale) {
    const double t = (double)rates->step, lerp = 1.0 - rates->beta1;
    return (struct zpp_adam_f64_consts){
        .grad_scale = rates->maximize ? -grad_scale : grad_scale,
        .keep = rates->decoupled_decay ? 1.0 - rates->lr * rates->weight_decay : 1.0,
        .l2 = rates->weight_decay,
        .use_l2 = !rates->decoupled_decay && rates->weight_decay != 0.0,
        .lerp = lerp,
        .lerp_far = 1.0 - lerp,
        .use_far = lerp >= 0.5,
        .beta2 = rates->beta2,
        .one_minus_beta2 = 1.0 - rates->beta2,
        .root = sqrt(1.0 - pow(rates->beta2, t)),
        .eps = rates->eps,
        .step_size = rates->lr / (1.0 - pow(rates->beta1, t)),
    };
}

static void check(const struct zpp_adam_f64_segment *s) {
    assert(s->rates.step >= 1);
    assert(s->rates.elems == 0 || (s->param && s->grad && s->exp_avg && s->exp_avg_sq));
    (void)s;
}

/* --- on the CPU --------------------------------------------------------------------------------------------------- */

static void step_range(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    const struct zpp_adam_f64_segment *s = job->segment;
    const struct zpp_adam_f64_consts c = job->c;
    const double *grad = s->grad;
    double *param = s->param, *exp_avg = s->exp_avg, *exp_avg_sq = s->exp_avg_sq, *top = s->max_exp_avg_sq;
    for (size_t i = begin; i < end; i++)
        zpp_adam_f64_update(&c, grad[i], &param[i], &exp_avg[i], &exp_avg_sq[i], top ? &top[i] : NULL);
}

void zpp_adam_step_f64(const struct zpp_adam_f64_segment *segments, size_t segments_count, double grad_scale,
                       zpp_pool *pool) {
    for (size_t k = 0; k < segments_count; k++) {
        const struct zpp_adam_f64_segment *s = &segments[k];
        check(s);
        struct job job = { s, consts_of(&s->rates, grad_scale) };
        zpp_pool_run(pool, s->rates.elems, GRAIN_ELEMS, step_range, &job);
    }
}

/* --- on CUDA ------------------------------------------------------------------------------------------------------ */

struct list {
    const struct zpp_adam_f64_segment *segments;
    size_t count;
    struct zpp_grad_scale_f64 scale;
};

static size_t fill(const void *arg, size_t begin, void *into, unsigned int *blocks) {
    const struct list *list = arg;
    struct zpp_adam_f64_cuda_batch *batch = into;
    size_t index = begin;
    *blocks = 0;
    *batch = (struct zpp_adam_f64_cuda_batch){ .scale = list->scale };
    for (; index < list->count && batch->count < ZPP_ADAM_F64_CUDA_SEGMENTS; index++) {
        const struct zpp_adam_f64_segment *s = &list->segments[index];
        if (s->rates.elems == 0) continue; /* the next one takes its place */
        check(s);
        batch->at[batch->count++] = (struct zpp_adam_f64_cuda_segment){
            .param = s->param, .grad = s->grad, .exp_avg = s->exp_avg, .exp_avg_sq = s->exp_avg_sq,
            .max_exp_avg_sq = s->max_exp_avg_sq, .elems = s->rates.elems, .first_block = *blocks,
            .consts = consts_of(&s->rates, list->scale.at ? 1.0 : list->scale.value) };
        *blocks += (unsigned int)((s->rates.elems - 1) / ZPP_ADAM_F64_CUDA_CHUNK_ELEMS + 1);
    }
    return index - begin;
}

zpp_status zpp_adam_step_f64_cuda(zpp_device *device, void *native, const struct zpp_adam_f64_segment *segments,
                                  size_t segments_count, struct zpp_grad_scale_f64 scale, struct zpp_err *err) {
    const struct list all = { segments, segments_count, scale };
    struct zpp_adam_f64_cuda_batch batch;
    const struct zpp_launch_cuda_list list = { "zpp_adam_f64_cuda", ZPP_ADAM_F64_CUDA_THREADS, segments_count, fill,
                                               &all, &batch };
    return zpp_launch_cuda_list(device, native, &list, err);
}
