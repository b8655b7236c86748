/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the device cuda share: its context, its counts of bytes, what its driver can do.
 *
 * Every call makes the context current for its own duration only, and not at all where it is current already, because
 * the thread belongs to torch.
 */
#include <stdio.h>

#include "device_cuda_internal.h"

zpp_status zpp_cuda_enter(const struct zpp_cuda_device *cuda, bool *pushed, struct zpp_err *err) {
    CUcontext current = NULL;
    *pushed = false;
    if (cuda->api->cuCtxGetCurrent(&current) == ZPP_CU_SUCCESS && current == cuda->context) return ZPP_OK;
    const CUresult result = cuda->api->cuCtxPushCurrent(cuda->context);
    if (result) return zpp_cuda_fail(cuda->api, result, err, "device cuda: entering its context");
    *pushed = true;
    return ZPP_OK;
}

void zpp_cuda_leave(const struct zpp_cuda_device *cuda, bool pushed) {
    CUcontext ours;
    if (pushed) cuda->api->cuCtxPopCurrent(&ours);
}

void zpp_cuda_count(struct zpp_cuda_device *cuda, enum zpp_cuda_use use, ptrdiff_t bytes) {
    pthread_mutex_lock(&cuda->lock);
    cuda->held_bytes[use] += (size_t)bytes;
    pthread_mutex_unlock(&cuda->lock);
}

zpp_status zpp_cuda_fail_alloc(struct zpp_cuda_device *cuda, CUresult result, const char *what, size_t bytes,
                               struct zpp_err *err) {
    size_t free_bytes = 0, total_bytes = 0;
    if (result != ZPP_CU_OUT_OF_MEMORY || cuda->api->cuMemGetInfo(&free_bytes, &total_bytes) != ZPP_CU_SUCCESS) {
        char text[128];
        snprintf(text, sizeof text, "device cuda:%d: %.90s", cuda->ordinal, what);
        return zpp_cuda_fail(cuda->api, result, err, text);
    }
    pthread_mutex_lock(&cuda->lock);
    const size_t blocks = cuda->held_bytes[ZPP_CUDA_BLOCKS], wrapped = cuda->held_bytes[ZPP_CUDA_WRAPPED];
    const size_t shared = cuda->held_bytes[ZPP_CUDA_SHARED];
    pthread_mutex_unlock(&cuda->lock);
    return zpp_fail(err, ZPP_NOMEM,
                    "device cuda:%d: no room for %zu bytes (%s), %zu of %zu bytes are free; zeropp holds %zu bytes in "
                    "blocks, %zu for gathered units and %zu that ranks share, and torch or other processes hold the "
                    "rest; offload a tier, lower prefetch_bytes, or call torch.cuda.empty_cache()",
                    cuda->ordinal, bytes, what, free_bytes, total_bytes, blocks, wrapped, shared);
}

zpp_status zpp_cuda_check_attribute(const struct zpp_cuda_device *cuda, CUdevice_attribute attribute, const char *lacks,
                                    struct zpp_err *err) {
    int has = 0;
    const CUresult result = cuda->api->cuDeviceGetAttribute(&has, attribute, cuda->device);
    if (result) return zpp_cuda_fail(cuda->api, result, err, "device cuda: asking what the device can do");
    return has ? ZPP_OK : zpp_fail(err, ZPP_NOT_BUILT, "device cuda:%d: the driver %s", cuda->ordinal, lacks);
}

zpp_status zpp_cuda_grain(zpp_device *device, bool exported, size_t *bytes, struct zpp_err *err) {
    const struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    const CUmemAllocationProp properties = zpp_cuda_properties(cuda, exported);
    bool pushed;
    const zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result =
        cuda->api->cuMemGetAllocationGranularity(bytes, &properties, ZPP_CU_MEM_GRANULARITY_MINIMUM);
    zpp_cuda_leave(cuda, pushed);
    return result ? zpp_cuda_fail(cuda->api, result, err, "device cuda: the granularity of memory") : ZPP_OK;
}

CUmemAllocationProp zpp_cuda_properties(const struct zpp_cuda_device *cuda, bool exported) {
    return (CUmemAllocationProp){.type = ZPP_CU_MEM_PINNED,
                                 .requestedHandleTypes = exported ? ZPP_CU_MEM_POSIX_HANDLE : 0,
                                 .location = {ZPP_CU_MEM_ON_DEVICE, cuda->device}};
}

CUmemAccessDesc zpp_cuda_access(const struct zpp_cuda_device *cuda) {
    return (CUmemAccessDesc){{ZPP_CU_MEM_ON_DEVICE, cuda->device}, ZPP_CU_MEM_READ_WRITE};
}
