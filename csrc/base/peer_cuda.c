/* SPDX-License-Identifier: Apache-2.0
 *
 * peer_cuda.h: cuMemCreate with a POSIX handle, which is exported, imported and mapped like memory that wraps.
 */
#include "peer_cuda.h"

#include "device_cuda_internal.h"

zpp_status zpp_peer_cuda_grain(zpp_device *device, size_t *bytes, struct zpp_err *err) {
    const zpp_status status =
        zpp_cuda_check_attribute(zpp_cuda_of(device), ZPP_CU_ATTRIBUTE_POSIX_HANDLES,
                                 "exports no memory to other processes (POSIX file descriptors), as in some containers "
                                 "and for virtual GPUs; wanted one that does; use NCCL's collectives",
                                 err);
    return status ? status : zpp_cuda_grain(device, true, bytes, err);
}

/* Map the handle at new addresses. In the context; the handle is released if that fails. */
static CUresult map_handle(const struct zpp_cuda_device *cuda, struct zpp_peer_memory *memory) {
    CUdeviceptr base = 0;
    const CUmemAccessDesc access = zpp_cuda_access(cuda);
    CUresult result = cuda->api->cuMemAddressReserve(&base, memory->bytes, 0, 0, 0);
    if (!result) {
        result = cuda->api->cuMemMap(base, memory->bytes, 0, memory->handle, 0);
        const bool mapped = !result;
        if (mapped) result = cuda->api->cuMemSetAccess(base, memory->bytes, &access, 1);
        if (result && mapped) cuda->api->cuMemUnmap(base, memory->bytes);
        if (result) cuda->api->cuMemAddressFree(base, memory->bytes);
    }
    if (result) cuda->api->cuMemRelease(memory->handle);
    else memory->base = (void *)(uintptr_t)base;
    return result;
}

static void unmap(struct zpp_cuda_device *cuda, struct zpp_peer_memory *memory) {
    const CUdeviceptr base = (CUdeviceptr)(uintptr_t)memory->base;
    cuda->api->cuMemUnmap(base, memory->bytes);
    cuda->api->cuMemAddressFree(base, memory->bytes);
    cuda->api->cuMemRelease(memory->handle);
    memory->base = NULL;
}

/* In the context. */
static zpp_status create(struct zpp_cuda_device *cuda, struct zpp_peer_memory *memory, int *fd, struct zpp_err *err) {
    const CUmemAllocationProp properties = zpp_cuda_properties(cuda, true);
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = cuda->api->cuMemCreate(&handle, memory->bytes, &properties, 0);
    memory->handle = handle;
    if (!result) result = map_handle(cuda, memory);
    if (result) return zpp_cuda_fail_alloc(cuda, result, "memory that ranks share", memory->bytes, err);
    result = cuda->api->cuMemExportToShareableHandle(fd, handle, ZPP_CU_MEM_POSIX_HANDLE, 0);
    if (!result) return ZPP_OK;
    unmap(cuda, memory);
    return zpp_cuda_fail(cuda->api, result, err, "device cuda: exporting memory to the ranks of this host");
}

zpp_status zpp_peer_cuda_create(zpp_device *device, size_t bytes, struct zpp_peer_memory *out, int *fd,
                                struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    struct zpp_peer_memory memory = {.bytes = bytes, .own = true};
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    status = create(cuda, &memory, fd, err);
    zpp_cuda_leave(cuda, pushed);
    if (status) return status;
    zpp_cuda_count(cuda, ZPP_CUDA_SHARED, (ptrdiff_t)bytes);
    *out = memory;
    return ZPP_OK;
}

static zpp_status cannot_reach(const struct zpp_cuda_device *cuda, CUresult result, size_t bytes,
                               struct zpp_err *err) {
    struct zpp_err cause = ZPP_ERR_INIT;
    zpp_cuda_fail(cuda->api, result, &cause, "the driver says");
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "device cuda:%d: %zu bytes of another rank's GPU cannot be mapped (%.200s); wanted GPUs that reach "
                    "each other (`nvidia-smi topo -p2p r`), in one container; use NCCL's collectives",
                    cuda->ordinal, bytes, cause.text);
}

zpp_status zpp_peer_cuda_import(zpp_device *device, int fd, size_t bytes, struct zpp_peer_memory *out,
                                struct zpp_err *err) {
    const struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    struct zpp_peer_memory memory = {.bytes = bytes};
    CUmemGenericAllocationHandle handle = 0;
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    CUresult result =
        cuda->api->cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd, ZPP_CU_MEM_POSIX_HANDLE);
    memory.handle = handle;
    if (!result) result = map_handle(cuda, &memory);
    if (result) status = cannot_reach(cuda, result, bytes, err);
    else *out = memory;
    zpp_cuda_leave(cuda, pushed);
    return status;
}

void zpp_peer_cuda_unmap(zpp_device *device, struct zpp_peer_memory *memory) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    if (!memory->base || zpp_cuda_enter(cuda, &pushed, NULL)) return;
    unmap(cuda, memory);
    zpp_cuda_leave(cuda, pushed);
    if (memory->own) zpp_cuda_count(cuda, ZPP_CUDA_SHARED, -(ptrdiff_t)memory->bytes);
}
