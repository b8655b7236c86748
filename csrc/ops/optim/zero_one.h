/* SPDX-License-Identifier: Apache-2.0
 *
 * The step of 0/1 Adam (Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam",
 * algorithm 1) by a rank's own momentum, with a variance that is there, fused: unscale, momentum, what was moved since
 * the ranks last agreed, and the step, in one pass over memory. Per element:
 *
 *   g = grad * grad_scale
 *   m = beta1 m + (1 - beta1) g
 *   u = u + step_size m                                     (moved, where it is kept)
 *   p = p (1 - decay) - step_size m / (sqrt(v / (1 - beta2^variance_step)) + eps)          (then the copy-out)
 *   a = a (1 - decay)                                       (anchor, p of the last agreement, where it is kept)
 *
 * Where v is 0, no gradient was ever seen, and p only decays (frozen.h).
 *
 * Bytes touched per parameter: 24 with gradients in fp32, 8 for each of u and a (a: only where it decays), and those of
 * the copy-out.
 */
#ifndef ZPP_OPS_OPTIM_ZERO_ONE_H
#define ZPP_OPS_OPTIM_ZERO_ONE_H

#include "frozen.h"

enum { ZPP_ZERO_ONE_MOVED = 0x4, ZPP_ZERO_ONE_ANCHOR = 0x8 }; /* options */

struct zpp_zero_one_consts {
    uint32_t options;
    float grad_scale;
    float beta1, one_minus_beta1;
    struct zpp_frozen_consts walk;
};

/* x: m, v, u, a. */
LANES_FN lanes zpp_zero_one_update(const struct zpp_zero_one_consts *c, lanes g, lanes p, lanes *x,
                                   const uint32_t options) {
    g = lanes_mul(g, lanes_set(c->grad_scale));
    x[0] = lanes_add(lanes_mul(lanes_set(c->beta1), x[0]), lanes_mul(lanes_set(c->one_minus_beta1), g));
    const lanes step = lanes_mul(lanes_set(c->walk.step_size), x[0]);
    if (options & ZPP_ZERO_ONE_MOVED) x[2] = lanes_add(x[2], step);
    if (options & ZPP_ZERO_ONE_ANCHOR) x[3] = lanes_mul(x[3], lanes_set(c->walk.keep));
    return zpp_frozen_moved(&c->walk, p, step, x[1]);
}

#ifndef __CUDACC__
static inline struct zpp_zero_one_consts zpp_zero_one_consts_of(const struct zpp_optim_segment *s, float grad_scale,
                                                                uint32_t states) {
    return (struct zpp_zero_one_consts){
        .options = s->decay != 0.0 ? states : states & ~(uint32_t)ZPP_ZERO_ONE_ANCHOR,
        .grad_scale = grad_scale,
        .beta1 = (float)s->beta1,
        .one_minus_beta1 = (float)(1.0 - s->beta1),
        .walk = zpp_frozen_consts_of(s, grad_scale, 0),
    };
}
#endif

#endif
