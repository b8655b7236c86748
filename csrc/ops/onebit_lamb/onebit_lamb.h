/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB (Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
 * Convergence Speed", algorithm 1) once its variance is frozen: what is learned from a momentum that was averaged at
 * one bit, and what each tensor's rate is made of, in one pass over memory. Per element, with v the frozen variance, v'
 * the fresh one, w the momentum of the step before, c the tensor's coefficient (m and w are c times the momentum):
 *
 *   g  = (m - beta1 w) / (c (1 - beta1))                   (the gradient that the mean momentum stands for)
 *   v' = beta2 v' + (1 - beta2) g g
 *   b  = sqrt(v / (1 - beta2^min(t, freeze_step))) + eps
 *   r  = b / (sqrt(v' / (1 - beta2^t)) + eps)
 *   a  = m / (c (1 - beta1^t)) / b,   u = a + weight_decay p
 *
 * and per tensor, or piece of one, the sums of a a and of u u, and the largest r. Where v is 0, a and r are 0: nothing
 * was ever seen. u itself is not stored: the step that follows, by rates that all pieces' sums give, makes it again
 * (optim/frozen.h: p (1 - rate weight_decay) - rate a).
 *
 * Squares are rounded to fp32 and added in sixteen lanes (element i in lane i % 16) within blocks of
 * ZPP_ONEBIT_LAMB_BLOCK_ELEMS, blocks in double and in order; a NaN is the largest of all. Every operation rounds once,
 * in the order of onebit_lamb_body.h. So every CPU level and number of threads gives the same bits (a NaN is a NaN).
 *
 * Bytes touched per parameter: 24 (m, w, v, v' and p read, v' written).
 */
#ifndef ZPP_OPS_ONEBIT_LAMB_H
#define ZPP_OPS_ONEBIT_LAMB_H

#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/pool.h"
#include "../../base/status.h"

enum { ZPP_ONEBIT_LAMB_BLOCK_ELEMS = 4096 };

/* One tensor, or one piece. Pointers need element alignment only. No `fresh_sq` overlaps anything else. */
struct zpp_onebit_lamb_segment {
    const float *param, *exp_avg, *before, *exp_avg_sq; /* p, m, w, v: read */
    float *fresh_sq;                                    /* v', read and written */
    size_t elems;
    uint64_t step, freeze_step; /* t of this update; v was frozen after that many: from 1 */
    double coefficient, beta1, beta2, eps, weight_decay;
};

/* All segments in one call, split over the threads of `pool` (NULL: this thread only). sums [segments_count][2]: of a
 * a, of u u. largest [segments_count]: of r, 0 of no elements. NOMEM: nothing was written. */
zpp_status zpp_onebit_lamb_fresh(const struct zpp_onebit_lamb_segment *segments, size_t segments_count, double *sums,
                                 float *largest, zpp_pool *pool, struct zpp_err *err);

/* The same with the version of one level, for tests; INVALID where this machine or build lacks it. */
zpp_status zpp_onebit_lamb_fresh_at(enum zpp_cpu_level level, const struct zpp_onebit_lamb_segment *segments,
                                    size_t segments_count, double *sums, float *largest, zpp_pool *pool,
                                    struct zpp_err *err);

/* The same on CUDA, where all pointers but `segments` itself are device memory: enqueued on `native` (torch's current
 * stream). Same bits. `work`: device memory of zpp_onebit_lamb_cuda_work_bytes, aligned to 8. NOT_BUILT without the
 * kernels, DEVICE if a launch fails. */
size_t zpp_onebit_lamb_cuda_work_bytes(const struct zpp_onebit_lamb_segment *segments, size_t segments_count);
zpp_status zpp_onebit_lamb_fresh_cuda(zpp_device *device, void *native, const struct zpp_onebit_lamb_segment *segments,
                                      size_t segments_count, double *sums, float *largest, void *work,
                                      struct zpp_err *err);

#endif
