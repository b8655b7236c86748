/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that wraps (wrap.h) on CUDA: cuMemMap takes whole handles only, so R bytes are a handle a grain (2 MiB), and
 * grain i of the addresses is mapped to handle i modulo their number. A write through one mapping and a read through
 * another are ordered by streams and events, as the CUDA programming guide defines for aliases.
 */
#include <stdlib.h>

#include "device_cuda_internal.h"

zpp_status zpp_cuda_map_grain(zpp_device *device, size_t *bytes, struct zpp_err *err) {
    const zpp_status status =
        zpp_cuda_check_attribute(zpp_cuda_of(device), ZPP_CU_ATTRIBUTE_VIRTUAL_MEMORY,
                                 "maps no memory at several addresses (cuMemMap), as for some virtual GPUs; wanted one "
                                 "that does; use stage 0, 1 or 2 on it",
                                 err);
    return status ? status : zpp_cuda_grain(device, false, bytes, err);
}

static CUresult make_handles(const struct zpp_cuda_device *cuda, struct zpp_mapping *mapping, size_t *made) {
    const CUmemAllocationProp properties = zpp_cuda_properties(cuda, false);
    const size_t grains = mapping->memory_bytes / mapping->grain_bytes;
    CUresult result = ZPP_CU_SUCCESS;
    for (*made = 0; *made < grains; ++*made) {
        CUmemGenericAllocationHandle handle;
        result = cuda->api->cuMemCreate(&handle, mapping->grain_bytes, &properties, 0);
        if (result) break;
        mapping->handles[*made] = handle;
    }
    return result;
}

static CUresult map_handles(const struct zpp_cuda_device *cuda, const struct zpp_mapping *mapping, size_t *mapped) {
    const CUdeviceptr base = (CUdeviceptr)(uintptr_t)mapping->base;
    const size_t grain = mapping->grain_bytes, grains = mapping->memory_bytes / grain;
    for (*mapped = 0; *mapped < mapping->address_bytes; *mapped += grain) {
        const CUmemGenericAllocationHandle handle = mapping->handles[*mapped / grain % grains];
        const CUresult result = cuda->api->cuMemMap(base + *mapped, grain, 0, handle, 0);
        if (result) return result;
    }
    const CUmemAccessDesc access = zpp_cuda_access(cuda);
    return cuda->api->cuMemSetAccess(base, mapping->address_bytes, &access, 1);
}

static void undo(const struct zpp_cuda_device *cuda, struct zpp_mapping *mapping, size_t made, size_t mapped) {
    const CUdeviceptr base = (CUdeviceptr)(uintptr_t)mapping->base;
    for (size_t at = 0; at < mapped; at += mapping->grain_bytes) {
        cuda->api->cuMemUnmap(base + at, mapping->grain_bytes);
    }
    while (made) cuda->api->cuMemRelease(mapping->handles[--made]);
    if (base) cuda->api->cuMemAddressFree(base, mapping->address_bytes);
    free(mapping->handles);
}

/* In the context. */
static zpp_status map_all(struct zpp_cuda_device *cuda, struct zpp_mapping *mapping, struct zpp_err *err) {
    CUdeviceptr base = 0;
    size_t made = 0, mapped = 0;
    CUresult result = make_handles(cuda, mapping, &made);
    if (!result) result = cuda->api->cuMemAddressReserve(&base, mapping->address_bytes, 0, 0, 0);
    mapping->base = (void *)(uintptr_t)base;
    if (!result) result = map_handles(cuda, mapping, &mapped);
    if (!result) return ZPP_OK;
    undo(cuda, mapping, made, mapped);
    return zpp_cuda_fail_alloc(cuda, result, "memory of gathered units", mapping->memory_bytes, err);
}

zpp_status zpp_cuda_map_wrapped(zpp_device *device, size_t address_bytes, size_t memory_bytes, struct zpp_mapping *out,
                                struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    struct zpp_mapping mapping = {.address_bytes = address_bytes, .memory_bytes = memory_bytes};
    zpp_status status = zpp_cuda_map_grain(device, &mapping.grain_bytes, err);
    if (status) return status;
    mapping.handles = calloc(memory_bytes / mapping.grain_bytes, sizeof *mapping.handles);
    if (!mapping.handles) return zpp_fail(err, ZPP_NOMEM, "device cuda: no memory for a list of mapped memory");
    bool pushed;
    status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) {
        free(mapping.handles);
        return status;
    }
    status = map_all(cuda, &mapping, err);
    zpp_cuda_leave(cuda, pushed);
    if (status) return status;
    zpp_cuda_count(cuda, ZPP_CUDA_WRAPPED, (ptrdiff_t)memory_bytes);
    *out = mapping;
    return ZPP_OK;
}

void zpp_cuda_unmap_wrapped(zpp_device *device, struct zpp_mapping *mapping) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    if (zpp_cuda_enter(cuda, &pushed, NULL)) {
        free(mapping->handles);
        return;
    }
    undo(cuda, mapping, mapping->memory_bytes / mapping->grain_bytes, mapping->address_bytes);
    zpp_cuda_leave(cuda, pushed);
    zpp_cuda_count(cuda, ZPP_CUDA_WRAPPED, -(ptrdiff_t)mapping->memory_bytes);
}
