/* SPDX-License-Identifier: Apache-2.0
 *
 * Stochastic gradient descent with momentum (Sutskever et al. 2013, in torch.optim.SGD's form), fused: one pass over
 * memory does unscale, momentum, update, and the copy back in low precision. Per element:
 *
 *   g  = grad * grad_scale                     (clip factor and loss scale, multiplied once in fp32)
 *   g  = g + weight_decay * p
 *   b  = g                                     on the first update of this tensor;
 *        momentum * b + (1 - dampening) * g    on later ones
 *   d  = b;  nesterov: d = g + momentum * b;   without momentum: d = g
 *   p  = p - lr * d
 *   maximize: g = -g first
 *
 * What does not depend on the element is computed in double and rounded to fp32 once; every operation on elements
 * rounds once, in the order of sgd_body.h. So every CPU level, split and number of threads gives the same bits (a NaN
 * is a NaN: its payload is not promised).
 *
 * Bytes touched per parameter: fp32 20 with momentum (p, b read and written, gradient read), 12 without; bf16 gradient
 * and copy-out: the same.
 */
#ifndef ZPP_OPS_SGD_H
#define ZPP_OPS_SGD_H

#include <stdbool.h>
#include <stddef.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"
#include "../moments/moments.h"

/* One tensor, or one piece of a shard. Pointers need element alignment only. No two segments overlap. */
struct zpp_sgd_segment {
    float *param;     /* fp32 master, read and written */
    const void *grad; /* F32, BF16 or F16 (grad_dtype); read */
    float *momentum_buffer; /* NULL: no momentum */
    void *param_out;  /* copy of the new param written (F32, BF16 or F16: out_dtype), or NULL */
    size_t elems;
    zpp_dtype grad_dtype, out_dtype;
    double lr, momentum, dampening, weight_decay;
    bool nesterov, maximize;
    bool first;       /* momentum_buffer is written, not read */
    struct zpp_moments how; /* all zero: momentum_buffer is fp32. Else that is NULL, and it is here: */
    struct zpp_moment moment; /* a first moment; codes NULL: none */
};

/* All segments in one call, split over the threads of `pool` (NULL: this thread only). grad_scale multiplies every
 * gradient. Never fails. */
void zpp_sgd_step(const struct zpp_sgd_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool);

/* The same with the version of one level, for tests and benchmarks; false, and nothing done, where this machine or
 * build lacks it. */
bool zpp_sgd_step_at(enum zpp_cpu_level level, const struct zpp_sgd_segment *segments, size_t segments_count,
                     float grad_scale, zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream). States of all
 * segments are of one kind. Same bits. NOT_BUILT without the kernel, DEVICE if a launch fails. */
zpp_status zpp_sgd_step_cuda(zpp_device *device, void *native, const struct zpp_sgd_segment *segments,
                             size_t segments_count, float grad_scale, struct zpp_err *err);

#endif
