/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of the step with a frozen variance: the arithmetic, stated once for the scalar C version, the ends of the
 * vector versions and the CUDA kernel. The vector versions repeat it operation by operation; tests hold all of them to
 * the same bits.
 */
#ifndef ZPP_OPS_FROZEN_BODY_H
#define ZPP_OPS_FROZEN_BODY_H

#include "../round.h"

/* What is equal for all elements of a segment, computed in double and rounded once (frozen.c). */
struct zpp_frozen_consts {
    float keep;       /* 1 - decay */
    float step_size;
    float root_scale; /* 1 / sqrt(1 - beta2^variance_step) */
    float eps;
};

/* The new p; the order of adam_body.h. */
ZPP_FN float zpp_frozen_moved(const struct zpp_frozen_consts *c, float p, float m, float v) {
    const float denominator = ZPP_ADD(ZPP_MUL(ZPP_SQRT(v), c->root_scale), c->eps);
    const float way = v == 0.0f ? 0.0f : ZPP_DIV(ZPP_MUL(c->step_size, m), denominator);
    return ZPP_SUB(ZPP_MUL(p, c->keep), way);
}

#endif
