/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_cuda.h: finds the kernel and enqueues it.
 */
#include "launch_cuda.h"

#include "../base/device_cuda.h"

zpp_status zpp_launch_cuda(zpp_device *device, void *native, const struct zpp_launch_cuda *launch,
                           const void *argument, struct zpp_err *err) {
    if (launch->blocks == 0) return ZPP_OK;
    if (launch->blocks > INT32_MAX) {
        return zpp_fail(err, ZPP_INVALID, "%s: %llu blocks of work, at most 2^31 - 1 fit one launch: pass smaller "
                        "tensors", launch->kernel, (unsigned long long)launch->blocks);
    }
    CUfunction kernel;
    const zpp_status status = zpp_cuda_kernel(device, launch->kernel, &kernel, err);
    if (status != ZPP_OK) return status;
    const struct zpp_cuda_grid grid = { { (unsigned int)launch->blocks, 1, 1 }, { launch->threads, 1, 1 },
                                        launch->shared_bytes };
    void *args[] = { (void *)(uintptr_t)argument };
    return zpp_cuda_launch(device, kernel, &grid, native, args, err);
}

zpp_status zpp_launch_cuda_list(zpp_device *device, void *native, const struct zpp_launch_cuda_list *list,
                                struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (size_t done = 0; done < list->count && status == ZPP_OK;) {
        unsigned int blocks;
        done += list->fill(list->arg, done, list->batch, &blocks);
        const struct zpp_launch_cuda launch = { list->kernel, blocks, list->threads, 0 };
        status = zpp_launch_cuda(device, native, &launch, list->batch, err);
    }
    return status;
}
