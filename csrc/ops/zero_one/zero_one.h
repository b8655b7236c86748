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
 * Where v is 0 nothing was ever seen, and p only decays (frozen/frozen.h). What does not depend on the element is
 * computed in double and rounded to fp32 once; every operation on elements rounds once, in the order of
 * zero_one_body.h. So every CPU level, split and number of threads gives the same bits (a NaN is a NaN).
 *
 * Bytes touched per parameter: 24 with gradients in fp32, 8 for each of u and a (a: only where it decays), and those of
 * the copy-out.
 */
#ifndef ZPP_OPS_ZERO_ONE_H
#define ZPP_OPS_ZERO_ONE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"

/* One tensor, or one piece of a shard. Pointers need element alignment only. What is written overlaps nothing else. */
struct zpp_zero_one_segment {
    float *param, *exp_avg;               /* p and m, read and written */
    float *moved, *anchor;                /* u and a, read and written, or NULL */
    const float *exp_avg_sq;              /* v, read */
    const void *grad;                     /* F32, BF16 or F16 (grad_dtype); read */
    void *param_out;                      /* copy of the new param written (F32, BF16 or F16: out_dtype), or NULL */
    size_t elems;
    zpp_dtype grad_dtype, out_dtype;
    uint64_t variance_step;               /* how often v was updated, from 1 */
    double step_size, decay, beta1, beta2, eps;
};

/* All segments in one call, split over the threads of `pool` (NULL: this thread only). grad_scale multiplies every
 * gradient. Never fails. */
void zpp_zero_one_step(const struct zpp_zero_one_segment *segments, size_t segments_count, float grad_scale,
                       zpp_pool *pool);

/* The same with the version of one level, for tests and benchmarks; false, and nothing done, where this machine or
 * build lacks it. */
bool zpp_zero_one_step_at(enum zpp_cpu_level level, const struct zpp_zero_one_segment *segments, size_t segments_count,
                          float grad_scale, zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream). Same bits.
 * NOT_BUILT without the kernel, DEVICE if a launch fails. */
zpp_status zpp_zero_one_step_cuda(zpp_device *device, void *native, const struct zpp_zero_one_segment *segments,
                                  size_t segments_count, float grad_scale, struct zpp_err *err);

#endif
