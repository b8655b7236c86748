/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/adagrad: what a CPU version of the kernel looks like, and the table of them (variants.def).
 */
#ifndef ZPP_OPS_ADAGRAD_KERNELS_H
#define ZPP_OPS_ADAGRAD_KERNELS_H

#include "adagrad.h"
#include "adagrad_body.h"

/* Elements [begin, end) of one segment; thread-free, no alignment asked for. A caller may cut a segment anywhere. */
typedef void (*zpp_adagrad_kernel)(const struct zpp_adagrad_segment *segment, const struct zpp_adagrad_consts *consts,
                                   size_t begin, size_t end);

#define ZPP_ADAGRAD_VARIANT(level, function)                                                                      \
    void function(const struct zpp_adagrad_segment *segment, const struct zpp_adagrad_consts *consts, size_t begin, \
                  size_t end);
#include "variants.def"
#undef ZPP_ADAGRAD_VARIANT

struct zpp_adagrad_consts zpp_adagrad_consts_of(const struct zpp_adagrad_segment *segment, float grad_scale);

struct zpp_adagrad_cuda_batch;
/* Packs as many segments as one launch takes; returns how many. For adagrad_cuda.c and its test. */
size_t zpp_adagrad_cuda_fill(const struct zpp_adagrad_segment *segments, size_t segments_count, float grad_scale,
                             struct zpp_adagrad_cuda_batch *batch, unsigned int *blocks);

struct zpp_adagrad_low_cuda_batch; /* the same for states that are not fp32 */
size_t zpp_adagrad_low_cuda_fill(const struct zpp_adagrad_segment *segments, size_t segments_count, float grad_scale,
                                 struct zpp_adagrad_low_cuda_batch *batch, unsigned int *blocks);

#endif
