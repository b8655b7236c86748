/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2), fused: one pass over memory
 * does unscale, update, momentum, and the copy back in low precision. Per element:
 *
 *   g  = grad * grad_scale                     (clip factor and loss scale, multiplied once in fp32)
 *   p  = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
 *   m  = beta2 * m + (1 - beta2) * g
 *   maximize: g = -g first
 *
 * sign(0) = 0 and sign(NaN) = NaN, as torch.sign. lr >= 0.
 *
 * Bytes touched per parameter: fp32 20 (p, m read and written, gradient read); bf16 gradient and copy-out: 20 as well.
 */
#ifndef ZPP_OPS_OPTIM_LION_H
#define ZPP_OPS_OPTIM_LION_H

#include <stdint.h>
#include "lanes.h"

struct zpp_lion_consts {
    uint32_t options;
    float grad_scale; /* negated for maximize: the sign of a product is exact */
    float keep;       /* 1 - lr * weight_decay */
    float lr;
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
};

/* x: m. */
LANES_FN lanes zpp_lion_update(const struct zpp_lion_consts *c, lanes g, lanes p, lanes *x, const uint32_t options) {
    (void)options;
    g = lanes_mul(g, lanes_set(c->grad_scale));
    const lanes direction =
        lanes_add(lanes_mul(lanes_set(c->beta1), x[0]), lanes_mul(lanes_set(c->one_minus_beta1), g));
    x[0] = lanes_add(lanes_mul(lanes_set(c->beta2), x[0]), lanes_mul(lanes_set(c->one_minus_beta2), g));
    return lanes_sub(lanes_mul(p, lanes_set(c->keep)), lanes_step(lanes_set(c->lr), direction));
}

#ifndef __CUDACC__
#include <assert.h>
#include "optim.h"

static inline struct zpp_lion_consts zpp_lion_consts_of(const struct zpp_optim_segment *s, float grad_scale,
                                                        uint32_t states) {
    assert(s->lr >= 0.0); /* lanes_step gives it a sign */
    return (struct zpp_lion_consts){
        .options = states,
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .keep = (float)(1.0 - s->lr * s->weight_decay),
        .lr = (float)s->lr,
        .beta1 = (float)s->beta1,
        .one_minus_beta1 = (float)(1.0 - s->beta1),
        .beta2 = (float)s->beta2,
        .one_minus_beta2 = (float)(1.0 - s->beta2),
    };
}
#endif

#endif
