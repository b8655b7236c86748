/* SPDX-License-Identifier: Apache-2.0
 *
 * The step of Adam with a momentum and a variance that are there already, for optimizers that agree on their momentum
 * before they step: 1-bit Adam (Tang et al. 2021, algorithm 1), 0/1 Adam (Lu et al. 2022), 1-bit LAMB (Li et al. 2021),
 * whose variance is frozen. One pass over memory; per element:
 *
 *   p = p * (1 - decay) - step_size * m / (sqrt(v / (1 - beta2^variance_step)) + eps)      (then the copy-out)
 *
 * Where v is 0 nothing was ever seen, and p is not moved, only decayed: a momentum that went at one bit is +-scale
 * there too, and divided by eps that would be an explosion. (A NaN is not 0.)
 *
 * Not for a step that learns the variance: that is ops/adam. What does not depend on the element is computed in double
 * and rounded to fp32 once; every operation on elements rounds once, in the order of frozen_body.h. So every CPU level,
 * split and number of threads gives the same bits (a NaN is a NaN: its payload is not promised).
 *
 * Bytes touched per parameter: 16 (p read and written, m and v read), and those of the copy-out.
 */
#ifndef ZPP_OPS_FROZEN_H
#define ZPP_OPS_FROZEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"

/* One tensor, or one piece of a shard. Pointers need element alignment only. What is written overlaps nothing else. */
struct zpp_frozen_segment {
    float *param;                         /* fp32 master, read and written */
    const float *exp_avg, *exp_avg_sq;    /* m and v, read */
    void *param_out;                      /* copy of the new param written (F32, BF16 or F16: out_dtype), or NULL */
    size_t elems;
    zpp_dtype out_dtype;
    uint64_t variance_step;               /* how often v was updated, from 1 */
    double step_size, decay, beta2, eps;  /* step_size: lr / (1 - beta1^t), as a rule; decay: lr * weight_decay */
};

/* All segments in one call, split over the threads of `pool` (NULL: this thread only). Never fails. */
void zpp_frozen_step(const struct zpp_frozen_segment *segments, size_t segments_count, zpp_pool *pool);

/* The same with the version of one level, for tests and benchmarks; false, and nothing done, where this machine or
 * build lacks it. */
bool zpp_frozen_step_at(enum zpp_cpu_level level, const struct zpp_frozen_segment *segments, size_t segments_count,
                        zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream). Same bits.
 * NOT_BUILT without the kernel, DEVICE if a launch fails. */
zpp_status zpp_frozen_step_cuda(zpp_device *device, void *native, const struct zpp_frozen_segment *segments,
                                size_t segments_count, struct zpp_err *err);

#endif
