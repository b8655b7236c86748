/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2), fused: one pass over memory
 * does unscale, update, momentum, and the copy back in low precision. Per element:
 *
 *   g  = grad * grad_scale                     (clip factor and loss scale, multiplied once in fp32)
 *   p  = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
 *   m  = beta2 * m + (1 - beta2) * g
 *   maximize: g = -g first
 *
 * sign(0) = 0 and sign(NaN) = NaN, as torch.sign. What does not depend on the element is computed in double and rounded
 * to fp32 once; every operation on elements rounds once, in the order of lion_body.h. So every CPU level, split and
 * number of threads gives the same bits (a NaN is a NaN: its payload is not promised).
 *
 * Bytes touched per parameter: fp32 20 (p, m read and written, gradient read); bf16 gradient and copy-out: 20 as well.
 */
#ifndef ZPP_OPS_LION_H
#define ZPP_OPS_LION_H

#include <stdbool.h>
#include <stddef.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"
#include "../moments/moments.h"

/* One tensor, or one piece of a shard. Pointers need element alignment only. No two segments overlap. */
struct zpp_lion_segment {
    float *param;     /* fp32 master, read and written */
    const void *grad; /* F32, BF16 or F16 (grad_dtype); read */
    float *exp_avg;   /* momentum */
    void *param_out;  /* copy of the new param written (F32, BF16 or F16: out_dtype), or NULL */
    size_t elems;
    zpp_dtype grad_dtype, out_dtype;
    double lr, beta1, beta2, weight_decay;
    bool maximize;
    struct zpp_moments how; /* all zero: exp_avg is fp32. Else that is NULL, and it is here: */
    struct zpp_moment moment; /* a first moment */
};

/* All segments in one call, split over the threads of `pool` (NULL: this thread only). grad_scale multiplies every
 * gradient. Never fails. */
void zpp_lion_step(const struct zpp_lion_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool);

/* The same with the version of one level, for tests and benchmarks; false, and nothing done, where this machine or
 * build lacks it. */
bool zpp_lion_step_at(enum zpp_cpu_level level, const struct zpp_lion_segment *segments, size_t segments_count,
                      float grad_scale, zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream). States of all
 * segments are of one kind. Same bits. NOT_BUILT without the kernel, DEVICE if a launch fails. */
zpp_status zpp_lion_step_cuda(zpp_device *device, void *native, const struct zpp_lion_segment *segments,
                              size_t segments_count, float grad_scale, struct zpp_err *err);

#endif
