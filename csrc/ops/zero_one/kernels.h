/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/zero_one: what a CPU version of the kernel looks like, and the table of them (variants.def).
 */
#ifndef ZPP_OPS_ZERO_ONE_KERNELS_H
#define ZPP_OPS_ZERO_ONE_KERNELS_H

#include "zero_one.h"
#include "zero_one_body.h"

/* Elements [begin, end) of one segment; thread-free, no alignment asked for. A caller may cut a segment anywhere. */
typedef void (*zpp_zero_one_kernel)(const struct zpp_zero_one_segment *segment,
                                    const struct zpp_zero_one_consts *consts, size_t begin, size_t end);

#define ZPP_ZERO_ONE_VARIANT(level, function)                                                             \
    void function(const struct zpp_zero_one_segment *segment, const struct zpp_zero_one_consts *consts,   \
                  size_t begin, size_t end);
#include "variants.def"
#undef ZPP_ZERO_ONE_VARIANT

struct zpp_zero_one_consts zpp_zero_one_consts_of(const struct zpp_zero_one_segment *segment, float grad_scale);

struct zpp_zero_one_cuda_batch;
/* Packs as many segments as one launch takes; returns how many. For zero_one_cuda.c and its test. */
size_t zpp_zero_one_cuda_fill(const struct zpp_zero_one_segment *segments, size_t segments_count, float grad_scale,
                              struct zpp_zero_one_cuda_batch *batch, unsigned int *blocks);

#endif
