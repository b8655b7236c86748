/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam in float64, parameters, gradients and moments: optim.h. One plain loop, which the compiler vectorises: it is for
 * models that need the precision, not for speed. It takes torch's operations in torch's order, so the two differ only
 * where torch's lerp is a fused multiply-add.
 */
#include <assert.h>
#include <math.h>

#include "optim.h"

enum { GRAIN_ELEMS = 4096 };

/* What is equal for all elements of a segment. */
struct consts {
    double grad_scale, keep, l2, lerp, lerp_far, beta2, one_minus_beta2, root, eps, step_size;
    bool use_l2, use_far;
};

struct job {
    const struct zpp_adam_f64_segment *segment;
    struct consts c;
};

static struct consts consts_of(const struct zpp_optim_segment *rates, double grad_scale) {
    const double t = (double)rates->step, lerp = 1.0 - rates->beta1;
    return (struct consts){
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

static void step_range(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    const struct zpp_adam_f64_segment *s = job->segment;
    const struct consts c = job->c;
    const double *grad = s->grad;
    double *param = s->param, *exp_avg = s->exp_avg, *exp_avg_sq = s->exp_avg_sq, *top = s->max_exp_avg_sq;
    for (size_t i = begin; i < end; i++) {
        double g = grad[i] * c.grad_scale;
        const double kept = param[i] * c.keep;
        if (c.use_l2) g = g + c.l2 * param[i];
        const double away = g - exp_avg[i];
        const double m = c.use_far ? g - away * c.lerp_far : exp_avg[i] + c.lerp * away;
        const double v = c.beta2 * exp_avg_sq[i] + c.one_minus_beta2 * g * g;
        double second = v;
        if (top) {
            if (v > top[i] || v != v) top[i] = v; /* a NaN on either side stays */
            second = top[i];
        }
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        param[i] = kept - c.step_size * m / (sqrt(second) / c.root + c.eps);
    }
}

void zpp_adam_step_f64(const struct zpp_adam_f64_segment *segments, size_t segments_count, double grad_scale,
                       zpp_pool *pool) {
    for (size_t k = 0; k < segments_count; k++) {
        const struct zpp_adam_f64_segment *s = &segments[k];
        assert(s->rates.step >= 1);
        assert(s->rates.elems == 0 || (s->param && s->grad && s->exp_avg && s->exp_avg_sq));
        struct job job = { s, consts_of(&s->rates, grad_scale) };
        zpp_pool_run(pool, s->rates.elems, GRAIN_ELEMS, step_range, &job);
    }
}
