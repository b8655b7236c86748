/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on moments in bf16 or 8 bits on CUDA: the argument of the kernel, shared by adam_low_cuda.cu and the launcher
 * adam_low_cuda.c.
 */
#ifndef ZPP_OPS_ADAM_LOW_CUDA_H
#define ZPP_OPS_ADAM_LOW_CUDA_H

#include "../moments/low_cuda.h"
#include "adam_body.h"

struct zpp_adam_low_cuda_batch {
    struct zpp_low_cuda_segments list;
    struct zpp_adam_consts consts[ZPP_LOW_CUDA_SEGMENTS];
};

#ifndef __CUDACC__
#include "adam.h"

/* Packs the next segments for one launch: how many it took, and the blocks of the grid (0: all were empty). */
size_t zpp_adam_low_cuda_fill(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale,
                              struct zpp_adam_low_cuda_batch *batch, unsigned int *blocks);

/* zpp_adam_step_cuda for segments whose moments are not fp32. */
zpp_status zpp_adam_low_step_cuda(zpp_device *device, void *native, const struct zpp_optim_segment *segments,
                                  size_t segments_count, float grad_scale, struct zpp_err *err);
#endif

#endif
