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
 * Everything in parentheses that does not depend on the element is computed in double and rounded to fp32 once; every
 * operation on elements rounds once to fp32, in the order that adam_body.h states. So every CPU level gives the same
 * bits as the scalar version, for any split and any number of threads (a NaN is a NaN: its payload is not promised),
 * and fp32 agrees with torch.optim.AdamW within a few ulp per step (bound and its derivation:
 * tests/ops/test_adam.py).
 *
 * Bytes touched per parameter: fp32 28 (p, m, v read and written, gradient read); bf16 gradient and copy-out: 28 as
 * well; amsgrad 8 more. With moments in bf16 20, in 8 bits 16 (csrc/ops/moments): the same arithmetic, on moments that
 * are decoded before and encoded after it.
 */
#ifndef ZPP_OPS_ADAM_H
#define ZPP_OPS_ADAM_H

#include <stdbool.h>
#include <stddef.h>
#include "../../base/cpu.h"
#include "../../base/dtype.h"
#include "../../base/device.h"
#include "../../base/pool.h"
#include "../optim/optim.h"

/* All segments in one call, split over the threads of `pool` (NULL: this thread only) in pieces of equal bytes; the
 * bits do not depend on the number of threads. grad_scale multiplies every gradient. Never fails. */
void zpp_adam_step(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool);

/* The same with the version of one level, for tests and benchmarks; false, and nothing done, where this machine or
 * build lacks it. */
bool zpp_adam_step_at(enum zpp_cpu_level level, const struct zpp_optim_segment *segments, size_t segments_count,
                      float grad_scale, zpp_pool *pool);

/* One tensor whose parameter, gradient and moments are float64: every operation rounds once, to float64. */
struct zpp_adam_f64_segment {
    struct zpp_optim_segment rates; /* elems, step, lr and what follows it; its pointers are not read */
    double *param;
    const double *grad;
    double *exp_avg, *exp_avg_sq;
    double *max_exp_avg_sq; /* amsgrad only, else NULL */
};
void zpp_adam_step_f64(const struct zpp_adam_f64_segment *segments, size_t segments_count, double grad_scale,
                       zpp_pool *pool);

/* zpp_adam_step on a GPU: enqueues on the driver's stream `native` and returns; pointers are device memory, which must
 * live until the stream has passed. Same bits as on the CPU. NOT_BUILT without kernels in this build. */
zpp_status zpp_adam_step_cuda(zpp_device *device, void *native, const struct zpp_optim_segment *segments,
                              size_t segments_count, float grad_scale, struct zpp_err *err);

#endif
