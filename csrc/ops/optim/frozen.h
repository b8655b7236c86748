/* SPDX-License-Identifier: Apache-2.0
 *
 * The step of Adam with a momentum and a variance that are there already, for optimizers that agree on their momentum
 * before they step: 1-bit Adam (Tang et al. 2021, algorithm 1), 0/1 Adam (Lu et al. 2022), 1-bit LAMB (Li et al. 2021),
 * whose variance is frozen. One pass over memory, without a gradient; per element:
 *
 *   p = p * (1 - decay) - step_size * m / (sqrt(v / (1 - beta2^variance_step)) + eps)      (then the copy-out)
 *
 * Where v is 0, no gradient was ever seen, and p only decays: a momentum that was sent at one bit is +-scale there too,
 * and divided by eps it would explode. (A NaN is not 0.) A step that learns the variance is adam.h's.
 *
 * Bytes touched per parameter: 16 (p read and written, m and v read), and those of the copy-out.
 */
#ifndef ZPP_OPS_OPTIM_FROZEN_H
#define ZPP_OPS_OPTIM_FROZEN_H

#include <stdint.h>
#include "lanes.h"

struct zpp_frozen_consts {
    uint32_t options;
    float keep;       /* 1 - decay */
    float step_size;
    float root_scale; /* 1 / sqrt(1 - beta2^variance_step) */
    float eps;
};

/* The new p, from step_size * m; the order of adam.h. */
LANES_FN lanes zpp_frozen_moved(const struct zpp_frozen_consts *c, lanes p, lanes step, lanes v) {
    const lanes denominator = lanes_add(lanes_mul(lanes_sqrt(v), lanes_set(c->root_scale)), lanes_set(c->eps));
    const lanes way = lanes_zero_at_zero(lanes_div(step, denominator), v);
    return lanes_sub(lanes_mul(p, lanes_set(c->keep)), way);
}

/* x: m, v; g is not read. */
LANES_FN lanes zpp_frozen_update(const struct zpp_frozen_consts *c, lanes g, lanes p, lanes *x,
                                 const uint32_t options) {
    (void)g;
    (void)options;
    return zpp_frozen_moved(c, p, lanes_mul(lanes_set(c->step_size), x[0]), x[1]);
}

#ifndef __CUDACC__
#include <assert.h>
#include "optim.h"

static inline struct zpp_frozen_consts zpp_frozen_consts_of(const struct zpp_optim_segment *s, float grad_scale,
                                                            uint32_t states) {
    (void)grad_scale;
    assert(s->variance_step >= 1);
    return (struct zpp_frozen_consts){
        .options = states,
        .keep = (float)(1.0 - s->decay),
        .step_size = (float)s->step_size,
        .root_scale = (float)(1.0 / sqrt(1.0 - pow(s->beta2, (double)s->variance_step))),
        .eps = (float)s->eps,
    };
}
#endif

#endif
