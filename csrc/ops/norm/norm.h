/* SPDX-License-Identifier: Apache-2.0
 *
 * Sum of squares of gradients, for the global norm (clipping) and the overflow check, in one pass over memory:
 *
 *   sum(s)       = sum over i of x[i]^2, in double          (x[i] of fp32, bf16 or fp16 has an exact square in double;
 *                                                            that of fp64 is rounded once)
 *   nonfinite(s) = how many x[i] are infinite or NaN
 *
 * The order of the additions is a property of the data alone: a segment is cut in blocks of ZPP_NORM_BLOCK_ELEMS from
 * its first element; in a block, lane l of 32 adds the elements i = l (mod 32) in rising order; lanes are added as a
 * tree (l + (l + 16), then 8, 4, 2, 1), blocks one after the other. So the bits depend neither on threads nor on the
 * CPU level nor on how many segments are given at once. (Squares being exact, a fused multiply-add changes nothing.)
 *
 * A segment with a non-finite element has a non-finite sum; the finite ones cannot overflow a double, but for fp64
 * beyond 1e154, whose norm is infinite as torch's is.
 */
#ifndef ZPP_OPS_NORM_H
#define ZPP_OPS_NORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"

enum { ZPP_NORM_BLOCK_ELEMS = 4096, ZPP_NORM_LANES = 32 };

struct zpp_norm_segment {
    const void *data; /* read; element alignment is enough */
    zpp_dtype dtype;  /* F32, BF16, F16 or F64 */
    size_t elems;     /* 0 gives a sum of 0 */
};

/* Both results have `segments_count` elements and are overwritten; nonfinite_per_segment may be NULL. Never fails,
 * allocates nothing. */
void zpp_norm_squares(const struct zpp_norm_segment *segments, size_t segments_count, double *sum_per_segment,
                      uint64_t *nonfinite_per_segment, zpp_pool *pool);

/* The same with the version of one level, for tests and benchmarks; false, and nothing done, where this machine or
 * build lacks it. */
bool zpp_norm_squares_at(enum zpp_cpu_level level, const struct zpp_norm_segment *segments, size_t segments_count,
                         double *sum_per_segment, uint64_t *nonfinite_per_segment, zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream). Same bits.
 * `work` has zpp_norm_cuda_work_elems(...) doubles. NOT_BUILT without the kernels, DEVICE if a launch fails. */
size_t zpp_norm_cuda_work_elems(const struct zpp_norm_segment *segments, size_t segments_count);
zpp_status zpp_norm_squares_cuda(zpp_device *device, void *native, const struct zpp_norm_segment *segments,
                                 size_t segments_count, double *work, double *sum_per_segment,
                                 uint64_t *nonfinite_per_segment, struct zpp_err *err);

#endif
