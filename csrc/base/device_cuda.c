/* SPDX-License-Identifier: Apache-2.0
 *
 * The device cuda: device.h over the CUDA driver API (cuda_api.h), in the primary context of its ordinal, which is also
 * torch's. Memory, streams and events therefore work with torch's, and its current stream can be adopted.
 */
#include <stdio.h>
#include <stdlib.h>

#include "device_cuda_internal.h"
#include "mem.h"

/* cuMemAlloc aligns to 256 bytes, and device.h promises a page: a block is larger, and keeps its true start here. */
struct zpp_cuda_block {
    struct zpp_cuda_block *next;
    uintptr_t aligned;
    CUdeviceptr start;
    size_t bytes;
};

/* --- memory ------------------------------------------------------------------------------------------------------- */
static struct zpp_cuda_block *take_block(struct zpp_cuda_device *cuda, struct zpp_cuda_block **link) {
    struct zpp_cuda_block *block = *link;
    *link = block->next;
    cuda->held_bytes[ZPP_CUDA_BLOCKS] -= block->bytes;
    return block;
}

/* Without the lock: cuMemFree waits for streams, which may wait for what another thread has still to enqueue. */
static void free_block(const struct zpp_cuda_device *cuda, struct zpp_cuda_block *block) {
    cuda->api->cuMemFree(block->start);
    free(block);
}

static zpp_status cuda_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    struct zpp_cuda_block *block = malloc(sizeof *block);
    if (!block) return zpp_fail(err, ZPP_NOMEM, "device cuda: no memory for a block's record");
    block->bytes = bytes + ZPP_BLOCK_BYTES;
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (!status) {
        const CUresult result = cuda->api->cuMemAlloc(&block->start, block->bytes);
        if (result) status = zpp_cuda_fail_alloc(cuda, result, "a block of memory", bytes, err);
        zpp_cuda_leave(cuda, pushed);
    }
    if (status) {
        free(block);
        return status;
    }
    block->aligned = (uintptr_t)(block->start + ZPP_BLOCK_BYTES - 1) & ~(uintptr_t)(ZPP_BLOCK_BYTES - 1);
    pthread_mutex_lock(&cuda->lock);
    block->next = cuda->blocks;
    cuda->blocks = block;
    cuda->held_bytes[ZPP_CUDA_BLOCKS] += block->bytes;
    pthread_mutex_unlock(&cuda->lock);
    *out = (void *)block->aligned;
    return ZPP_OK;
}

static void cuda_free(zpp_device *device, void *memory, size_t bytes) {
    (void)bytes;
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    if (zpp_cuda_enter(cuda, &pushed, NULL)) return; /* the context was destroyed, and its memory with it */
    pthread_mutex_lock(&cuda->lock);
    struct zpp_cuda_block **link = &cuda->blocks;
    while (*link && (*link)->aligned != (uintptr_t)memory) link = &(*link)->next;
    struct zpp_cuda_block *block = *link ? take_block(cuda, link) : NULL;
    pthread_mutex_unlock(&cuda->lock);
    if (block) free_block(cuda, block);
    zpp_cuda_leave(cuda, pushed);
}

/* --- host memory -------------------------------------------------------------------------------------------------- */
zpp_status zpp_cuda_host_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuMemHostAlloc(out, bytes ? bytes : 1, ZPP_CU_HOST_ALLOC_PORTABLE);
    if (result) {
        char what[96];
        snprintf(what, sizeof what, "device cuda: %zu bytes of page-locked host memory", bytes);
        status = zpp_cuda_fail(cuda->api, result, err, what);
    }
    zpp_cuda_leave(cuda, pushed);
    return status;
}

void zpp_cuda_host_free(zpp_device *device, void *memory) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    if (!memory || zpp_cuda_enter(cuda, &pushed, NULL)) return;
    cuda->api->cuMemFreeHost(memory);
    zpp_cuda_leave(cuda, pushed);
}

/* Streams get the host's address of a counter, so the GPU has to see the memory there. */
static zpp_status check_same_address(struct zpp_cuda_device *cuda, void *memory, size_t bytes, struct zpp_err *err) {
    CUdeviceptr seen = 0;
    const CUresult result = cuda->api->cuMemHostGetDevicePointer(&seen, memory, 0);
    if (result) return zpp_cuda_fail(cuda->api, result, err, "device cuda: the GPU's address of page-locked memory");
    if (seen == (CUdeviceptr)(uintptr_t)memory) return ZPP_OK;
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "device cuda:%d: the GPU sees %zu bytes of page-locked host memory at another address than the "
                    "CPU; wanted unified addresses, which 64-bit Linux on x86 and ARM servers has",
                    cuda->ordinal, bytes);
}

static zpp_status cuda_pin(zpp_device *device, void *memory, size_t bytes, struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const unsigned int flags = ZPP_CU_HOST_REGISTER_PORTABLE | ZPP_CU_HOST_REGISTER_DEVICEMAP;
    const CUresult result = cuda->api->cuMemHostRegister(memory, bytes, flags);
    if (result) {
        char what[160];
        snprintf(what, sizeof what,
                 "device cuda:%d: page-locking %zu bytes of host memory (is `ulimit -l` or the container's limit of "
                 "locked memory lower?)",
                 cuda->ordinal, bytes);
        status = zpp_cuda_fail(cuda->api, result, err, what);
    } else {
        status = check_same_address(cuda, memory, bytes, err);
        if (status) cuda->api->cuMemHostUnregister(memory);
    }
    zpp_cuda_leave(cuda, pushed);
    return status;
}

static void cuda_unpin(zpp_device *device, void *memory) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    if (zpp_cuda_enter(cuda, &pushed, NULL)) return;
    cuda->api->cuMemHostUnregister(memory);
    zpp_cuda_leave(cuda, pushed);
}

zpp_status zpp_cuda_driver_version(int *version, struct zpp_err *err) {
    const struct zpp_cuda_api *api;
    const zpp_status status = zpp_cuda_api(&api, err);
    if (status) return status;
    const CUresult result = api->cuDriverGetVersion(version);
    return result ? zpp_cuda_fail(api, result, err, "device cuda: the driver's version") : ZPP_OK;
}

/* --- the device --------------------------------------------------------------------------------------------------- */
static void cuda_destroy(zpp_device *device) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    if (!zpp_cuda_enter(cuda, &pushed, NULL)) {
        while (cuda->blocks) free_block(cuda, take_block(cuda, &cuda->blocks));
        zpp_cuda_forget_marks(cuda);
        zpp_cuda_forget_kernels(cuda);
        zpp_cuda_leave(cuda, pushed);
    }
    cuda->api->cuDevicePrimaryCtxRelease(cuda->device);
    zpp_host_device_fini(&cuda->queues);
    pthread_mutex_destroy(&cuda->lock);
    pthread_mutex_destroy(&cuda->kernels_lock);
    free(cuda);
}

static const struct zpp_device_fill cuda_fill = {
    .name = "cuda",
    .kind = ZPP_DEVICE_CUDA,
    .destroy = cuda_destroy,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .map_grain = zpp_cuda_map_grain,
    .map_wrapped = zpp_cuda_map_wrapped,
    .unmap_wrapped = zpp_cuda_unmap_wrapped,
    .stream_create = zpp_cuda_stream_create,
    .stream_destroy = zpp_cuda_stream_destroy,
    .stream_adopt = zpp_cuda_stream_adopt,
    .stream_follow = zpp_cuda_stream_follow,
    .launch = zpp_cuda_op,
    .copy = zpp_cuda_copy,
    .fill = zpp_cuda_fill,
    .signal = zpp_cuda_signal,
    .await = zpp_cuda_await,
    .await_all = zpp_cuda_await_all,
    .poll = zpp_cuda_poll,
    .event_create = zpp_cuda_event_create,
    .event_destroy = zpp_cuda_event_destroy,
    .record = zpp_cuda_record,
    .wait = zpp_cuda_wait,
    .sync = zpp_cuda_sync,
};

/* The table of `queues`, without functions: device_cuda_*.c call those of device_host.h directly. */
static const struct zpp_device_fill queue_fill = {.name = "cuda"};

static zpp_status open_ordinal(struct zpp_cuda_device *cuda, int ordinal, struct zpp_err *err) {
    const struct zpp_cuda_api *api = cuda->api;
    int count = 0;
    CUresult result = api->cuInit(0);
    if (!result) result = api->cuDeviceGetCount(&count);
    if (result) return zpp_cuda_fail(api, result, err, "device cuda: starting the driver");
    if (ordinal < 0 || ordinal >= count) {
        return zpp_fail(err, ZPP_INVALID, "device cuda: ordinal is %d, wanted 0 to %d: %d devices are visible", ordinal,
                        count - 1, count);
    }
    result = api->cuDeviceGet(&cuda->device, ordinal);
    if (!result) result = api->cuDevicePrimaryCtxRetain(&cuda->context, cuda->device);
    return result ? zpp_cuda_fail(api, result, err, "device cuda: opening the device") : ZPP_OK;
}

zpp_status zpp_device_cuda_create(int ordinal, zpp_device **out, struct zpp_err *err) {
    const struct zpp_cuda_api *api;
    zpp_status status = zpp_cuda_api(&api, err);
    if (status) return status;
    struct zpp_cuda_device *cuda = calloc(1, sizeof *cuda);
    if (!cuda) return zpp_fail(err, ZPP_NOMEM, "device cuda: no memory for its record");
    cuda->base.fill = &cuda_fill;
    cuda->api = api;
    cuda->ordinal = ordinal;
    status = open_ordinal(cuda, ordinal, err);
    if (status) {
        free(cuda);
        return status;
    }
    pthread_mutex_init(&cuda->lock, NULL);
    pthread_mutex_init(&cuda->kernels_lock, NULL);
    zpp_host_device_init(&cuda->queues, &queue_fill);
    cuda->queues.modes[ZPP_STREAM_QUEUE] = ZPP_HOST_DRIVEN;
    *out = &cuda->base;
    return ZPP_OK;
}
