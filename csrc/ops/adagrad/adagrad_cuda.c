/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches Adagrad on CUDA (adagrad_cuda.cu).
 */
#include "adagrad_cuda.h"

#include "kernels.h"

#define LAUNCH_KERNEL "zpp_adagrad_cuda"
#define LAUNCH_LOW_KERNEL "zpp_adagrad_low_cuda"
#define LAUNCH_SEGMENT struct zpp_adagrad_segment
#define LAUNCH_CONSTS struct zpp_adagrad_consts
#define LAUNCH_STATE sum
#define LAUNCH_WHICH ZPP_MOMENT_SECOND
#define launch_consts_of zpp_adagrad_consts_of
#include "../list_launch_cuda.h"

size_t zpp_adagrad_cuda_fill(const struct zpp_adagrad_segment *segments, size_t segments_count, float grad_scale,
                             struct zpp_adagrad_cuda_batch *batch, unsigned int *blocks) {
    return launch_fill(segments, segments_count, grad_scale, batch, blocks);
}

size_t zpp_adagrad_low_cuda_fill(const struct zpp_adagrad_segment *segments, size_t segments_count, float grad_scale,
                                 struct zpp_adagrad_low_cuda_batch *batch, unsigned int *blocks) {
    return launch_low_fill(segments, segments_count, grad_scale, batch, blocks);
}

zpp_status zpp_adagrad_step_cuda(zpp_device *device, void *native, const struct zpp_adagrad_segment *segments,
                                 size_t segments_count, float grad_scale, struct zpp_err *err) {
    return launch_step(device, native, segments, segments_count, grad_scale, err);
}
