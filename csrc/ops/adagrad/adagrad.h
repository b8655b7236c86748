/* SPDX-License-Identifier: Apache-2.0
 *
 * Adagrad (Duchi, Hazan & Singer 2011, the diagonal form) as torch.optim.Adagrad has it, fused: one pass over memory
 * does unscale, sum of squares, update, and the copy back in low precision. Per element, t counted from 1:
 *
 *   g  = grad * grad_scale                     (clip factor and loss scale, multiplied once in fp32)
 *   g  = g + weight_decay * p
 *   s  = s + g * g
 *   p  = p - (lr / (1 + (t - 1) * lr_decay)) * g / (sqrt(s) + eps)
 *   maximize: g = -g first
 *
 * What does not depend on the element is computed in double and rounded to fp32 once; every operation on elements
 * rounds once, in the order of adagrad_body.h. So every CPU level, split and number of threads gives the same bits (a
 * NaN is a NaN: its payload is not promised).
 *
 * Bytes touched per parameter: fp32 20 (p, s read and written, gradient read); bf16 gradient and copy-out: 20 as well.
 */
#ifndef ZPP_OPS_ADAGRAD_H
#define ZPP_OPS_ADAGRAD_H

#include <stdbool.h>
#include <stddef.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"
#include "../moments/moments.h"

/* One tensor, or one piece of a shard. Pointers need element alignment only. No two segments overlap. */
struct zpp_adagrad_segment {
    float *param;     /* fp32 master, read and written */
    const void *grad; /* F32, BF16 or F16 (grad_dtype); read */
    float *sum;       /* sum of squares */
    void *param_out;  /* copy of the new param written (F32, BF16 or F16: out_dtype), or NULL */
    size_t elems;
    zpp_dtype grad_dtype, out_dtype;
    uint64_t step;    /* t of this update, from 1 */
    double lr, lr_decay, eps, weight_decay;
    bool maximize;
    struct zpp_moments how; /* all zero: sum is fp32. Else that is NULL, and it is here: */
    struct zpp_moment moment; /* a second moment */
};

/* All segments in one call, split over the threads of `pool` (NULL: this thread only). grad_scale multiplies every
 * gradient. Never fails. */
void zpp_adagrad_step(const struct zpp_adagrad_segment *segments, size_t segments_count, float grad_scale,
                      zpp_pool *pool);

/* The same with the version of one level, for tests and benchmarks; false, and nothing done, where this machine or
 * build lacks it. */
bool zpp_adagrad_step_at(enum zpp_cpu_level level, const struct zpp_adagrad_segment *segments, size_t segments_count,
                         float grad_scale, zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream). States of all
 * segments are of one kind. Same bits. NOT_BUILT without the kernel, DEVICE if a launch fails. */
zpp_status zpp_adagrad_step_cuda(zpp_device *device, void *native, const struct zpp_adagrad_segment *segments,
                                 size_t segments_count, float grad_scale, struct zpp_err *err);

#endif
