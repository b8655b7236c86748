/* SPDX-License-Identifier: Apache-2.0
 *
 * Additions of the device cuda to device.h: kernels of the embedded images, and pinned host memory.
 */
#ifndef ZPP_BASE_DEVICE_CUDA_H
#define ZPP_BASE_DEVICE_CUDA_H

#include "cuda_api.h"
#include "device.h"

/* Find a kernel (extern "C" __global__) of any embedded image. The first call loads it into this device's context; it
 * is valid until the device is destroyed. Return NOT_BUILT where the library was built without nvcc, or the driver is
 * too old for its kernels. Threads: any. */
zpp_status zpp_cuda_kernel(zpp_device *device, const char *name, CUfunction *out, struct zpp_err *err);

/* Enqueue the kernel. `native` is that of the operation (torch's stream, or one of ours); `args` points at each
 * argument. */
struct zpp_cuda_grid {
    unsigned int blocks[3], threads[3], shared_bytes;
};
zpp_status zpp_cuda_launch(zpp_device *device, CUfunction function, const struct zpp_cuda_grid *grid, void *native,
                           void **args, struct zpp_err *err);

/* Allocate page-locked host memory, which the device copies directly. New; free with zpp_cuda_host_free. */
zpp_status zpp_cuda_host_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err);
void zpp_cuda_host_free(zpp_device *device, void *memory);

/* Return the CUDA version of the installed driver, such as 13000 for 13.0. Initialises nothing. */
zpp_status zpp_cuda_driver_version(int *version, struct zpp_err *err);

#endif
