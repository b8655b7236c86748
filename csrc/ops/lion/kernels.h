/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/lion: what a CPU version of the kernel looks like, and the table of them (variants.def).
 */
#ifndef ZPP_OPS_LION_KERNELS_H
#define ZPP_OPS_LION_KERNELS_H

#include "lion.h"
#include "lion_body.h"

/* Elements [begin, end) of one segment; thread-free, no alignment asked for. A caller may cut a segment anywhere. */
typedef void (*zpp_lion_kernel)(const struct zpp_lion_segment *segment, const struct zpp_lion_consts *consts,
                                size_t begin, size_t end);

#define ZPP_LION_VARIANT(level, function)                                                                      \
    void function(const struct zpp_lion_segment *segment, const struct zpp_lion_consts *consts, size_t begin, \
                  size_t end);
#include "variants.def"
#undef ZPP_LION_VARIANT

struct zpp_lion_consts zpp_lion_consts_of(const struct zpp_lion_segment *segment, float grad_scale);

struct zpp_lion_cuda_batch;
/* Packs as many segments as one launch takes; returns how many. For lion_cuda.c and its test. */
size_t zpp_lion_cuda_fill(const struct zpp_lion_segment *segments, size_t segments_count, float grad_scale,
                          struct zpp_lion_cuda_batch *batch, unsigned int *blocks);

struct zpp_lion_low_cuda_batch; /* the same for states that are not fp32 */
size_t zpp_lion_low_cuda_fill(const struct zpp_lion_segment *segments, size_t segments_count, float grad_scale,
                              struct zpp_lion_low_cuda_batch *batch, unsigned int *blocks);

#endif
