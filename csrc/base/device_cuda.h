/* SPDX-License-Identifier: Apache-2.0
 *
 * What the device cuda offers beyond device.h: kernels of the embedded images, and pinned host memory.
 */
#ifndef ZPP_BASE_DEVICE_CUDA_H
#define ZPP_BASE_DEVICE_CUDA_H

#include "cuda_api.h"
#include "device.h"

/* A kernel (extern "C" __global__) of any embedded image, loaded into this device's context when first asked for. Valid
 * until the device is destroyed. NOT_BUILT where the library was built without nvcc, or the driver is too old for its
 * kernels. Threads: any. */
zpp_status zpp_cuda_kernel(zpp_device *device, const char *name, CUfunction *out, struct zpp_err *err);

/* Enqueue it. `native` is what an operation is given (torch's stream, or one of ours); `args` points at each
 * argument. */
struct zpp_cuda_grid {
    unsigned int blocks[3], threads[3], shared_bytes;
};
zpp_status zpp_cuda_launch(zpp_device *device, CUfunction function, const struct zpp_cuda_grid *grid, void *native,
                           void **args, struct zpp_err *err);

/* Page-locked host memory, which copies to and from the device without a detour. New; free with zpp_cuda_host_free. */
zpp_status zpp_cuda_host_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err);
void zpp_cuda_host_free(zpp_device *device, void *memory);

/* Version of the installed driver's CUDA, such as 13000 for 13.0. Initialises nothing. */
zpp_status zpp_cuda_driver_version(int *version, struct zpp_err *err);

#endif
