/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/adam: what a CPU version of the kernel looks like, and the table of them (variants.def).
 */
#ifndef ZPP_OPS_ADAM_KERNELS_H
#define ZPP_OPS_ADAM_KERNELS_H

#include "../../base/cpu.h"
#include "adam.h"
#include "adam_body.h"

/* Elements [begin, end) of one segment; thread-free, no alignment asked for. A caller may cut a segment anywhere. */
typedef void (*zpp_adam_kernel)(const struct zpp_optim_segment *segment, const struct zpp_adam_consts *consts,
                                size_t begin, size_t end);

#define ZPP_ADAM_VARIANT(level, function)                                                                     \
    void function(const struct zpp_optim_segment *segment, const struct zpp_adam_consts *consts, size_t begin, \
                  size_t end);
#include "variants.def"
#undef ZPP_ADAM_VARIANT

/* The version of a level; NULL where this build has none. */
zpp_adam_kernel zpp_adam_kernel_of(enum zpp_cpu_level level);

/* The same of a segment whose moments are not fp32: tile after tile through a version of the kernel. begin and end are
 * where zpp_moments_cut may cut. */
void zpp_adam_low(const struct zpp_optim_segment *segment, const struct zpp_adam_consts *consts, zpp_adam_kernel kernel,
                  const struct zpp_moments_kernels *moments, size_t begin, size_t end);

/* Packs the next segments for one launch on CUDA: how many it took, and the blocks of the grid (0: all were empty). */
struct zpp_adam_cuda_batch;
size_t zpp_adam_cuda_fill(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale,
                          struct zpp_adam_cuda_batch *batch, unsigned int *blocks);

struct zpp_adam_consts zpp_adam_consts_of(const struct zpp_optim_segment *segment, float grad_scale);

#endif
