/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of 0/1 Adam's step: the arithmetic, stated once for the scalar C version, the ends of the vector versions
 * and the CUDA kernel. The vector versions repeat it operation by operation; tests hold all of them to the same bits.
 */
#ifndef ZPP_OPS_ZERO_ONE_BODY_H
#define ZPP_OPS_ZERO_ONE_BODY_H

#include "../frozen/frozen_body.h"

/* What is equal for all elements of a segment, computed in double and rounded once (zero_one.c). */
struct zpp_zero_one_consts {
    float grad_scale;
    float beta1, one_minus_beta1;
    struct zpp_frozen_consts walk;
};

/* m' */
ZPP_FN float zpp_zero_one_momentum(const struct zpp_zero_one_consts *c, float grad, float m) {
    return ZPP_ADD(ZPP_MUL(c->beta1, m), ZPP_MUL(c->one_minus_beta1, ZPP_MUL(grad, c->grad_scale)));
}

/* u', of the new m; p' is zpp_frozen_moved's. */
ZPP_FN float zpp_zero_one_moved(const struct zpp_zero_one_consts *c, float moved, float m) {
    return ZPP_ADD(moved, ZPP_MUL(c->walk.step_size, m));
}

/* a' */
ZPP_FN float zpp_zero_one_anchor(const struct zpp_zero_one_consts *c, float anchor) {
    return ZPP_MUL(anchor, c->walk.keep);
}

#endif
