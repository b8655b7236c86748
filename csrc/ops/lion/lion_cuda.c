/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches Lion on CUDA (lion_cuda.cu).
 */
#include "lion_cuda.h"

#include "kernels.h"

#define LAUNCH_KERNEL "zpp_lion_cuda"
#define LAUNCH_LOW_KERNEL "zpp_lion_low_cuda"
#define LAUNCH_SEGMENT struct zpp_lion_segment
#define LAUNCH_CONSTS struct zpp_lion_consts
#define LAUNCH_STATE exp_avg
#define LAUNCH_WHICH ZPP_MOMENT_FIRST
#define launch_consts_of zpp_lion_consts_of
#include "../list_launch_cuda.h"

size_t zpp_lion_cuda_fill(const struct zpp_lion_segment *segments, size_t segments_count, float grad_scale,
                          struct zpp_lion_cuda_batch *batch, unsigned int *blocks) {
    return launch_fill(segments, segments_count, grad_scale, batch, blocks);
}

size_t zpp_lion_low_cuda_fill(const struct zpp_lion_segment *segments, size_t segments_count, float grad_scale,
                              struct zpp_lion_low_cuda_batch *batch, unsigned int *blocks) {
    return launch_low_fill(segments, segments_count, grad_scale, batch, blocks);
}

zpp_status zpp_lion_step_cuda(zpp_device *device, void *native, const struct zpp_lion_segment *segments,
                              size_t segments_count, float grad_scale, struct zpp_err *err) {
    return launch_step(device, native, segments, segments_count, grad_scale, err);
}
