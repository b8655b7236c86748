/* SPDX-License-Identifier: Apache-2.0
 *
 * Stochastic gradient descent with momentum (Sutskever et al. 2013, in torch.optim.SGD's form), fused: one pass over
 * memory does unscale, momentum, update, and the copy back in low precision. Per element:
 *
 *   g  = grad * grad_scale                     (clip factor and loss scale, multiplied once in fp32)
 *   g  = g + weight_decay * p
 *   b  = g                                     where step is 1;
 *        momentum * b + (1 - dampening) * g    on later ones
 *   d  = b;  nesterov: d = g + momentum * b;   without momentum_buffer: d = g
 *   p  = p - lr * d
 *   maximize: g = -g first
 *
 * Bytes touched per parameter: fp32 20 with momentum (p, b read and written, gradient read), 12 without; bf16 gradient
 * and copy-out: the same.
 */
#ifndef ZPP_OPS_OPTIM_SGD_H
#define ZPP_OPS_OPTIM_SGD_H

#include <stdint.h>
#include "lanes.h"

enum { ZPP_SGD_MOMENTUM = 0x1, ZPP_SGD_L2 = 0x10, ZPP_SGD_FIRST = 0x20, ZPP_SGD_NESTEROV = 0x40 }; /* options */

struct zpp_sgd_consts {
    uint32_t options;
    float grad_scale; /* negated for maximize: the sign of a product is exact */
    float l2;         /* weight_decay */
    float momentum, one_minus_dampening;
    float lr;
};

/* x: b. */
LANES_FN lanes zpp_sgd_update(const struct zpp_sgd_consts *c, lanes g, lanes p, lanes *x, const uint32_t options) {
    g = lanes_mul(g, lanes_set(c->grad_scale));
    if (options & ZPP_SGD_L2) g = lanes_add(g, lanes_mul(lanes_set(c->l2), p));
    if (options & ZPP_SGD_MOMENTUM) {
        x[0] = options & ZPP_SGD_FIRST ? g
                                       : lanes_add(lanes_mul(lanes_set(c->momentum), x[0]),
                                                   lanes_mul(lanes_set(c->one_minus_dampening), g));
        g = options & ZPP_SGD_NESTEROV ? lanes_add(g, lanes_mul(lanes_set(c->momentum), x[0])) : x[0];
    }
    return lanes_sub(p, lanes_mul(lanes_set(c->lr), g));
}

#ifndef __CUDACC__
#include "optim.h"

static inline struct zpp_sgd_consts zpp_sgd_consts_of(const struct zpp_optim_segment *s, float grad_scale,
                                                      uint32_t states) {
    return (struct zpp_sgd_consts){
        .options = states | (s->weight_decay != 0.0 ? ZPP_SGD_L2 : 0u) | (s->step == 1 ? ZPP_SGD_FIRST : 0u) |
                   (s->nesterov ? ZPP_SGD_NESTEROV : 0u),
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .l2 = (float)s->weight_decay,
        .momentum = (float)s->momentum,
        .one_minus_dampening = (float)(1.0 - s->dampening),
        .lr = (float)s->lr,
    };
}
#endif

#endif
