/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2) over lists of tensors. Per tensor:
 *
 *   g = grad * grad_scale                                          (maximize: g = -g)
 *   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g g
 *   u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
 *   r = |p| / |u|, held within [trust_least, trust_most]; 1 where either norm is 0 (or not finite)
 *   p = p - lr r u                                                 (then the copy-out)
 *
 * A tensor's norms are those of the whole tensor, so a segment is a whole tensor, never a piece of one. It takes two
 * passes: moments and norms, then the step, which computes u again from m, v and p instead of storing it: 40 bytes a
 * parameter in fp32 (24 and 16), and the second pass finds small tensors in the cache. With moments in bf16 (8 bits)
 * the second pass makes m and v again, too, and encodes them: 12 and 20 (10 and 16) bytes; both have the same u.
 *
 * Norms: squares are rounded to fp32 and added in sixteen lanes (element i in lane i % 16) within blocks of
 * ZPP_LAMB_BLOCK_ELEMS, blocks in double and in order. So every CPU level and number of threads gives the same bits (a
 * NaN is a NaN).
 */
#ifndef ZPP_OPS_LAMB_H
#define ZPP_OPS_LAMB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"
#include "../grad_scale.h"
#include "../moments/moments.h"

enum { ZPP_LAMB_BLOCK_ELEMS = 4096 };

/* One tensor. Pointers need element alignment only. No two segments overlap. */
struct zpp_lamb_segment {
    float *param;     /* fp32 master, read and written */
    const void *grad; /* F32, BF16 or F16 (grad_dtype); read */
    float *exp_avg, *exp_avg_sq;
    void *param_out;  /* copy of the new param written (F32, BF16 or F16: out_dtype), or NULL */
    size_t elems;
    zpp_dtype grad_dtype, out_dtype;
    uint64_t step; /* t of this update, from 1 */
    double lr, beta1, beta2, eps, weight_decay, trust_least, trust_most;
    bool maximize;
    struct zpp_moments how; /* all zero: moments in fp32, in the arrays above. Else those are NULL, they are here: */
    struct zpp_moment moments[2]; /* the first and the second; how.first_elems is 0 */
};

/* All segments in one call, split over the threads of `pool` (NULL: this thread only). trust [segments_count] receives
 * each r; NULL: not wanted. NOMEM: nothing was written. */
zpp_status zpp_lamb_step(const struct zpp_lamb_segment *segments, size_t segments_count, float grad_scale, float *trust,
                         zpp_pool *pool, struct zpp_err *err);

/* The same with the version of one level, for tests; INVALID where this machine or build lacks it. */
zpp_status zpp_lamb_step_at(enum zpp_cpu_level level, const struct zpp_lamb_segment *segments, size_t segments_count,
                            float grad_scale, float *trust, zpp_pool *pool, struct zpp_err *err);

/* The first pass alone, for tensors in pieces, whose norms are sums over all pieces: moments, and sums
 * [segments_count][2] of the squares of p and of u. Moments in fp32; lr, trust and param_out have no meaning. The step
 * is then that of optim/frozen.h, p (1 - rate weight_decay) - rate m / (...): only what was never seen, v = 0, differs
 * by more than roundings. NOMEM: nothing was written. */
zpp_status zpp_lamb_norms(const struct zpp_lamb_segment *segments, size_t segments_count, float grad_scale,
                          double *sums, zpp_pool *pool, struct zpp_err *err);
zpp_status zpp_lamb_norms_at(enum zpp_cpu_level level, const struct zpp_lamb_segment *segments, size_t segments_count,
                             float grad_scale, double *sums, zpp_pool *pool, struct zpp_err *err);

/* The same on CUDA, where all pointers but `segments` itself are device memory: enqueued on `native` (torch's current
 * stream). Moments of all segments are of one kind. Same bits. `work`: device memory of zpp_lamb_cuda_work_bytes,
 * aligned to 8. A step that `scale` skips has sums of 0. NOT_BUILT without the kernels, DEVICE if a launch fails. */
size_t zpp_lamb_cuda_work_bytes(const struct zpp_lamb_segment *segments, size_t segments_count);
zpp_status zpp_lamb_step_cuda(zpp_device *device, void *native, const struct zpp_lamb_segment *segments,
                              size_t segments_count, struct zpp_grad_scale scale, void *work,
                              struct zpp_err *err);
zpp_status zpp_lamb_norms_cuda(zpp_device *device, void *native, const struct zpp_lamb_segment *segments,
                               size_t segments_count, struct zpp_grad_scale scale, double *sums, void *work,
                               struct zpp_err *err);

#endif
