/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam in float64 for one element, in C and in CUDA. It takes torch's operations in torch's order, so the two differ
 * only where torch's lerp is a fused multiply-add.
 */
#ifndef ZPP_OPS_ADAM_F64_H
#define ZPP_OPS_ADAM_F64_H

#include <stdint.h>

#include "../grad_scale.h"
#include "../round.h"

/* What is equal for all elements of a segment. */
struct zpp_adam_f64_consts {
    double grad_scale, keep, l2, lerp, lerp_far, beta2, one_minus_beta2, root, eps, step_size;
    uint32_t use_l2, use_far;
};

/* `top`: NULL without amsgrad. */
ZPP_FN void zpp_adam_f64_update(const struct zpp_adam_f64_consts *c, double grad, double *param, double *exp_avg,
                                double *exp_avg_sq, double *top) {
    const double p = *param, m0 = *exp_avg, v0 = *exp_avg_sq;
    const double scaled = ZPP_MUL64(grad, c->grad_scale), kept = ZPP_MUL64(p, c->keep);
    const double g = c->use_l2 ? ZPP_ADD64(scaled, ZPP_MUL64(c->l2, p)) : scaled;
    const double away = ZPP_SUB64(g, m0);
    const double m =
        c->use_far ? ZPP_SUB64(g, ZPP_MUL64(away, c->lerp_far)) : ZPP_ADD64(m0, ZPP_MUL64(c->lerp, away));
    const double v =
        ZPP_ADD64(ZPP_MUL64(c->beta2, v0), ZPP_MUL64(ZPP_MUL64(c->one_minus_beta2, g), g));
    double second = v;
    if (top) {
        if (v > *top || v != v) *top = v; /* a NaN on either side stays */
        second = *top;
    }
    *exp_avg = m;
    *exp_avg_sq = v;
    const double below = ZPP_ADD64(ZPP_DIV64(ZPP_SQRT64(second), c->root), c->eps);
    *param = ZPP_SUB64(kept, ZPP_DIV64(ZPP_MUL64(c->step_size, m), below));
}

/* The argument of the kernel of optim_cuda.cu. A block works on one chunk of one segment. */
enum {
    ZPP_ADAM_F64_CUDA_SEGMENTS = 28, /* a launch: what fits the 4096 bytes that kernel arguments may have */
    ZPP_ADAM_F64_CUDA_THREADS = 256,
    ZPP_ADAM_F64_CUDA_CHUNK_ELEMS = 16 * 1024,
};

struct zpp_adam_f64_cuda_segment {
    double *param;
    const double *grad;
    double *exp_avg, *exp_avg_sq, *max_exp_avg_sq; /* the last one: NULL without amsgrad */
    uint64_t elems;
    struct zpp_adam_f64_consts consts;
    uint32_t first_block; /* the block of the grid that has this segment's first chunk */
};

struct zpp_adam_f64_cuda_batch {
    struct zpp_grad_scale_f64 scale;
    uint32_t count;
    struct zpp_adam_f64_cuda_segment at[ZPP_ADAM_F64_CUDA_SEGMENTS];
};

#endif
