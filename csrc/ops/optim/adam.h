/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), fused: one pass over memory does unscale, moments,
 * update, and the copy back in low precision (the CPU Adam of ZeRO-Offload, section 5.1). Per element, t counted from
 * 1:
 *
 *   g  = grad * grad_scale                     (clip factor and loss scale, multiplied once in fp32)
 *   g  = g + weight_decay * p                  Adam;      AdamW: p = p * (1 - lr * weight_decay)
 *   m  = m + (1 - beta1) * (g - m)             torch's lerp; for beta1 <= 0.5 from the other end, as there
 *   v  = beta2 * v + (1 - beta2) * g * g
 *   p  = p - (lr / (1 - beta1^t)) * m / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)
 *   amsgrad: the running maximum of v stands in the place of v in the last line
 *   maximize: g = -g first
 *
 * fp32 agrees with torch.optim.AdamW within a few ulp per step (bound and its derivation: tests/ops/test_adam.py).
 *
 * Bytes touched per parameter: fp32 28 (p, m, v read and written, gradient read); bf16 gradient and copy-out: 28 as
 * well; amsgrad 8 more. With moments in bf16 20, in 8 bits 16 (csrc/ops/moments): the same arithmetic, on moments that
 * are decoded before and encoded after it.
 */
#ifndef ZPP_OPS_OPTIM_ADAM_H
#define ZPP_OPS_OPTIM_ADAM_H

#include <stdint.h>
#include "lanes.h"

enum { ZPP_ADAM_AMSGRAD = 0x4, ZPP_ADAM_L2 = 0x10, ZPP_ADAM_FAR = 0x20 }; /* options */

struct zpp_adam_consts {
    uint32_t options; /* FAR: 1 - beta1 >= 0.5, where torch's lerp starts from the other end */
    float grad_scale; /* negated for maximize: the sign of a product is exact */
    float keep;       /* AdamW: 1 - lr * weight_decay; else 1, which leaves p as it is */
    float l2;         /* Adam: weight_decay */
    float lerp;       /* 1 - beta1 */
    float lerp_far;   /* 1 - (1 - beta1) */
    float beta2, one_minus_beta2;
    float root_scale; /* 1 / sqrt(1 - beta2^t) */
    float eps;
    float step_size;  /* lr / (1 - beta1^t) */
};

/* x: m, v, and amsgrad's running maximum of v. */
LANES_FN lanes zpp_adam_update(const struct zpp_adam_consts *c, lanes g, lanes p, lanes *x, const uint32_t options) {
    g = lanes_mul(g, lanes_set(c->grad_scale));
    const lanes kept = lanes_mul(p, lanes_set(c->keep));
    if (options & ZPP_ADAM_L2) g = lanes_add(g, lanes_mul(lanes_set(c->l2), p));
    const lanes away = lanes_sub(g, x[0]);
    x[0] = options & ZPP_ADAM_FAR ? lanes_sub(g, lanes_mul(away, lanes_set(c->lerp_far)))
                                  : lanes_add(x[0], lanes_mul(lanes_set(c->lerp), away));
    x[1] = lanes_add(lanes_mul(lanes_set(c->beta2), x[1]), lanes_mul(lanes_mul(lanes_set(c->one_minus_beta2), g), g));
    if (options & ZPP_ADAM_AMSGRAD) x[2] = lanes_maximum(x[1], x[2]);
    const lanes second = options & ZPP_ADAM_AMSGRAD ? x[2] : x[1];
    const lanes denominator = lanes_add(lanes_mul(lanes_sqrt(second), lanes_set(c->root_scale)), lanes_set(c->eps));
    return lanes_sub(kept, lanes_div(lanes_mul(lanes_set(c->step_size), x[0]), denominator));
}

#ifndef __CUDACC__
#include "optim.h"

static inline struct zpp_adam_consts zpp_adam_consts_of(const struct zpp_optim_segment *s, float grad_scale,
                                                        uint32_t states) {
    const double correction1 = 1.0 - pow(s->beta1, (double)s->step), correction2 = 1.0 - pow(s->beta2, (double)s->step);
    const double lerp = 1.0 - s->beta1;
    const bool l2 = !s->decoupled_decay && s->weight_decay != 0.0;
    return (struct zpp_adam_consts){
        .options = states | (l2 ? ZPP_ADAM_L2 : 0u) | (lerp >= 0.5 ? ZPP_ADAM_FAR : 0u),
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .keep = s->decoupled_decay ? (float)(1.0 - s->lr * s->weight_decay) : 1.0f,
        .l2 = s->decoupled_decay ? 0.0f : (float)s->weight_decay,
        .lerp = (float)lerp,
        .lerp_far = (float)(1.0 - lerp),
        .beta2 = (float)s->beta2,
        .one_minus_beta2 = (float)(1.0 - s->beta2),
        .root_scale = (float)(1.0 / sqrt(correction2)),
        .eps = (float)s->eps,
        .step_size = (float)(s->lr / correction1),
    };
}
#endif

#endif
