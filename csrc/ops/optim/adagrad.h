/* SPDX-License-Identifier: Apache-2.0
 *
 * Adagrad (Duchi, Hazan & Singer 2011, the diagonal form) as torch.optim.Adagrad has it, fused: one pass over memory
 * does unscale, sum of squares, update, and the copy back in low precision. Per element, t counted from 1:
 *
 *   g  = grad * grad_scale                     (clip factor and loss scale, multiplied once in fp32)
 *   g  = g + weight_decay * p
 *   s  = s + g * g                             (init_sum: s = initial_sum first where t = 1)
 *   p  = p - (lr / (1 + (t - 1) * lr_decay)) * g / (sqrt(s) + eps)
 *   maximize: g = -g first
 *
 * Bytes touched per parameter: fp32 20 (p, s read and written, gradient read); bf16 gradient and copy-out: 20 as well.
 */
#ifndef ZPP_OPS_OPTIM_ADAGRAD_H
#define ZPP_OPS_OPTIM_ADAGRAD_H

#include <stdint.h>
#include "lanes.h"

enum { ZPP_ADAGRAD_L2 = 0x10, ZPP_ADAGRAD_INIT = 0x20 }; /* options */

struct zpp_adagrad_consts {
    uint32_t options;
    float grad_scale; /* negated for maximize: the sign of a product is exact */
    float l2;         /* weight_decay */
    float initial;    /* initial_sum */
    float eps;
    float step_size;  /* lr / (1 + (t - 1) * lr_decay) */
};

/* x: s. */
LANES_FN lanes zpp_adagrad_update(const struct zpp_adagrad_consts *c, lanes g, lanes p, lanes *x,
                                  const uint32_t options) {
    g = lanes_mul(g, lanes_set(c->grad_scale));
    if (options & ZPP_ADAGRAD_L2) g = lanes_add(g, lanes_mul(lanes_set(c->l2), p));
    if (options & ZPP_ADAGRAD_INIT) x[0] = lanes_set(c->initial);
    x[0] = lanes_add(x[0], lanes_mul(g, g));
    const lanes denominator = lanes_add(lanes_sqrt(x[0]), lanes_set(c->eps));
    return lanes_sub(p, lanes_div(lanes_mul(lanes_set(c->step_size), g), denominator));
}

#ifndef __CUDACC__
#include <assert.h>
#include "optim.h"

static inline struct zpp_adagrad_consts zpp_adagrad_consts_of(const struct zpp_optim_segment *s, float grad_scale,
                                                              uint32_t states) {
    assert(s->step >= 1);
    return (struct zpp_adagrad_consts){
        .options = states | (s->weight_decay != 0.0 ? ZPP_ADAGRAD_L2 : 0u) |
                   (s->init_sum && s->step == 1 ? ZPP_ADAGRAD_INIT : 0u),
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .l2 = (float)s->weight_decay,
        .initial = (float)s->initial_sum,
        .eps = (float)s->eps,
        .step_size = (float)(s->lr / (1.0 + (double)(s->step - 1) * s->lr_decay)),
    };
}
#endif

#endif
