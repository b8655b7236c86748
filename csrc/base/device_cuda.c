/* SPDX-License-Identifier: Apache-2.0
 *
 * The device cuda: device.h over the CUDA driver API (cuda_api.h), in the primary context of its ordinal, which is also
 * torch's. Memory, streams and events therefore work with torch's, and its current stream can be adopted.
 *
 * Every call makes the context current for its own duration only, and not at all where it is current already, because
 * the thread belongs to torch.
 *
 * Locks: `lock` of a device guards its list of blocks and its loaded kernels.
 */
#include "device_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda_images.h"
#include "device_fill.h"
#include "mem.h"

enum { NAME_BYTES = 32, SPIN_NS = 30000, SLEEP_NS = 50000, TICK_NS = 100000000 };

/* cuMemAlloc aligns to 256 bytes, and device.h promises a page: a block is larger, and keeps its true start here. */
struct block {
    struct block *next;
    uintptr_t aligned;
    CUdeviceptr start;
};

struct kernel {
    struct kernel *next;
    CUfunction function;
    char name[];
};

struct cuda_device {
    zpp_device base;
    const struct zpp_cuda_api *api;
    CUdevice device;
    CUcontext context;
    int ordinal;
    pthread_mutex_t lock;
    struct block *blocks;
    struct kernel *kernels;
    CUmodule *modules; /* one an image; NULL until the first kernel is loaded */
};

struct cuda_stream {
    zpp_stream base;
    CUstream native;
    bool owned;
    char name[NAME_BYTES];
    struct zpp_err error;
};

struct cuda_event {
    zpp_event base;
    CUevent native;
    char stream_name[NAME_BYTES]; /* where it was recorded, for messages */
    struct zpp_err error;         /* of that stream, when it was recorded */
};

static const struct zpp_wait for_ever = {0, NULL, NULL};

static struct cuda_device *cuda_of(const zpp_device *device) { return (struct cuda_device *)device; }

/* --- the context -------------------------------------------------------------------------------------------------- */
static zpp_status enter(const struct cuda_device *cuda, bool *pushed, struct zpp_err *err) {
    CUcontext current = NULL;
    *pushed = false;
    if (cuda->api->cuCtxGetCurrent(&current) == ZPP_CU_SUCCESS && current == cuda->context) return ZPP_OK;
    const CUresult result = cuda->api->cuCtxPushCurrent(cuda->context);
    if (result) return zpp_cuda_fail(cuda->api, result, err, "device cuda: entering its context");
    *pushed = true;
    return ZPP_OK;
}

static void leave(const struct cuda_device *cuda, bool pushed) {
    CUcontext ours;
    if (pushed) cuda->api->cuCtxPopCurrent(&ours);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */
static void forget_block(struct cuda_device *cuda, struct block **link) {
    struct block *block = *link;
    *link = block->next;
    cuda->api->cuMemFree(block->start);
    free(block);
}

static zpp_status fail_alloc(const struct cuda_device *cuda, CUresult result, size_t bytes, struct zpp_err *err) {
    size_t free_bytes = 0, total_bytes = 0;
    if (result != ZPP_CU_OUT_OF_MEMORY || cuda->api->cuMemGetInfo(&free_bytes, &total_bytes) != ZPP_CU_SUCCESS) {
        return zpp_cuda_fail(cuda->api, result, err, "device cuda: allocating memory");
    }
    return zpp_fail(err, ZPP_NOMEM, "device cuda:%d: no room for %zu bytes, %zu of %zu bytes are free", cuda->ordinal,
                    bytes, free_bytes, total_bytes);
}

static zpp_status cuda_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err) {
    struct cuda_device *cuda = cuda_of(device);
    struct block *block = malloc(sizeof *block);
    if (!block) return zpp_fail(err, ZPP_NOMEM, "device cuda: no memory for a block's record");
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (!status) {
        const CUresult result = cuda->api->cuMemAlloc(&block->start, bytes + ZPP_PAGE_BYTES);
        if (result) status = fail_alloc(cuda, result, bytes, err);
        leave(cuda, pushed);
    }
    if (status) {
        free(block);
        return status;
    }
    block->aligned = (uintptr_t)(block->start + ZPP_PAGE_BYTES - 1) & ~(uintptr_t)(ZPP_PAGE_BYTES - 1);
    pthread_mutex_lock(&cuda->lock);
    block->next = cuda->blocks;
    cuda->blocks = block;
    pthread_mutex_unlock(&cuda->lock);
    *out = (void *)block->aligned;
    return ZPP_OK;
}

static void cuda_free(zpp_device *device, void *memory, size_t bytes) {
    (void)bytes;
    struct cuda_device *cuda = cuda_of(device);
    bool pushed;
    if (enter(cuda, &pushed, NULL)) return; /* the context was destroyed, and its memory with it */
    pthread_mutex_lock(&cuda->lock);
    struct block **link = &cuda->blocks;
    while (*link && (*link)->aligned != (uintptr_t)memory) link = &(*link)->next;
    if (*link) forget_block(cuda, link);
    pthread_mutex_unlock(&cuda->lock);
    leave(cuda, pushed);
}

/* --- streams ------------------------------------------------------------------------------------------------------ */
static zpp_status stream_error(const struct cuda_stream *stream, struct zpp_err *err) {
    if (stream->error.status != ZPP_OK && err) *err = stream->error;
    return stream->error.status;
}

/* Remember the failure of a call on this stream, if it is one. */
static zpp_status note(struct cuda_stream *stream, CUresult result, const char *what, struct zpp_err *err) {
    if (!result) return ZPP_OK;
    char text[64 + NAME_BYTES];
    snprintf(text, sizeof text, "stream \"%s\": %s", stream->name, what);
    zpp_cuda_fail(cuda_of(stream->base.device)->api, result, &stream->error, text);
    return stream_error(stream, err);
}

static zpp_status cuda_stream_create(zpp_device *device, enum zpp_stream_kind kind, const char *name, zpp_stream **out,
                                     struct zpp_err *err) {
    struct cuda_device *cuda = cuda_of(device);
    struct cuda_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return zpp_fail(err, ZPP_NOMEM, "stream \"%s\": no memory for its record", name);
    stream->base.device = device;
    strncpy(stream->name, name, sizeof stream->name - 1);
    stream->owned = kind != ZPP_STREAM_HOST; /* HOST: the default stream until one is adopted */
    if (stream->owned) {
        bool pushed;
        zpp_status status = enter(cuda, &pushed, err);
        if (!status) {
            const CUresult result = cuda->api->cuStreamCreateWithPriority(&stream->native, ZPP_CU_STREAM_NON_BLOCKING, 0);
            status = note(stream, result, "create", err);
            leave(cuda, pushed);
        }
        if (status) {
            free(stream);
            return status;
        }
    }
    *out = &stream->base;
    return ZPP_OK;
}

static void cuda_stream_destroy(zpp_stream *base) {
    struct cuda_stream *stream = (struct cuda_stream *)base;
    struct cuda_device *cuda = cuda_of(base->device);
    bool pushed;
    if (!enter(cuda, &pushed, NULL)) {
        cuda->api->cuStreamSynchronize(stream->native);
        if (stream->owned) cuda->api->cuStreamDestroy(stream->native);
        leave(cuda, pushed);
    }
    free(stream);
}

static void cuda_stream_adopt(zpp_stream *base, void *native) {
    struct cuda_stream *stream = (struct cuda_stream *)base;
    if (!stream->owned) stream->native = native;
}

static zpp_status cuda_op(zpp_stream *base, zpp_op_fn fn, const void *arg, size_t arg_bytes, struct zpp_err *err) {
    struct cuda_stream *stream = (struct cuda_stream *)base;
    struct cuda_device *cuda = cuda_of(base->device);
    if (stream->error.status) return stream_error(stream, err);
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (status) return status;
    _Alignas(16) unsigned char copy[ZPP_OP_ARG_BYTES];
    if (arg_bytes) memcpy(copy, arg, arg_bytes);
    struct zpp_err failure = ZPP_ERR_INIT;
    status = fn(copy, stream->native, &for_ever, &failure);
    leave(cuda, pushed);
    if (status == ZPP_OK) return ZPP_OK;
    stream->error = failure;
    return stream_error(stream, err);
}

static zpp_status cuda_copy(zpp_stream *base, void *dst, const void *src, size_t bytes, struct zpp_err *err) {
    struct cuda_stream *stream = (struct cuda_stream *)base;
    struct cuda_device *cuda = cuda_of(base->device);
    if (stream->error.status) return stream_error(stream, err);
    if (!bytes) return ZPP_OK;
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result =
        cuda->api->cuMemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, bytes, stream->native);
    status = note(stream, result, "copy", err);
    leave(cuda, pushed);
    return status;
}

static zpp_status cuda_poll(zpp_stream *base, struct zpp_err *err) {
    struct cuda_stream *stream = (struct cuda_stream *)base;
    struct cuda_device *cuda = cuda_of(base->device);
    if (stream->error.status) return stream_error(stream, err);
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuStreamQuery(stream->native);
    status = result == ZPP_CU_NOT_READY ? ZPP_AGAIN : note(stream, result, "poll", err);
    leave(cuda, pushed);
    return status;
}

/* --- events ------------------------------------------------------------------------------------------------------- */
static zpp_status cuda_event_create(zpp_device *device, zpp_event **out, struct zpp_err *err) {
    struct cuda_device *cuda = cuda_of(device);
    struct cuda_event *event = calloc(1, sizeof *event);
    if (!event) return zpp_fail(err, ZPP_NOMEM, "event: no memory for its record");
    event->base.device = device;
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (!status) {
        const CUresult result = cuda->api->cuEventCreate(&event->native, ZPP_CU_EVENT_DISABLE_TIMING);
        if (result) status = zpp_cuda_fail(cuda->api, result, err, "device cuda: creating an event");
        leave(cuda, pushed);
    }
    if (status) {
        free(event);
        return status;
    }
    *out = &event->base;
    return ZPP_OK;
}

static void cuda_event_destroy(zpp_event *base) {
    struct cuda_event *event = (struct cuda_event *)base;
    struct cuda_device *cuda = cuda_of(base->device);
    bool pushed;
    if (!enter(cuda, &pushed, NULL)) {
        cuda->api->cuEventDestroy(event->native);
        leave(cuda, pushed);
    }
    free(event);
}

static zpp_status cuda_record(zpp_event *base, zpp_stream *base_stream, struct zpp_err *err) {
    struct cuda_event *event = (struct cuda_event *)base;
    struct cuda_stream *stream = (struct cuda_stream *)base_stream;
    struct cuda_device *cuda = cuda_of(base->device);
    zpp_status status = stream_error(stream, err);
    bool pushed;
    if (!status) status = enter(cuda, &pushed, err);
    if (!status) {
        status = note(stream, cuda->api->cuEventRecord(event->native, stream->native), "record an event", err);
        leave(cuda, pushed);
    }
    event->error = stream->error;
    memcpy(event->stream_name, stream->name, sizeof event->stream_name);
    return status;
}

static zpp_status cuda_wait(zpp_stream *base_stream, zpp_event *base, const struct zpp_wait *wait,
                            struct zpp_err *err) {
    (void)wait; /* the GPU waits, never the caller */
    struct cuda_event *event = (struct cuda_event *)base;
    struct cuda_stream *stream = (struct cuda_stream *)base_stream;
    struct cuda_device *cuda = cuda_of(base->device);
    zpp_status status = stream_error(stream, err);
    if (!status && event->error.status) { /* the operations before the event failed */
        stream->error = event->error;
        status = stream_error(stream, err);
    }
    bool pushed;
    if (status || (status = enter(cuda, &pushed, err))) return status;
    status = note(stream, cuda->api->cuStreamWaitEvent(stream->native, event->native, 0), "wait for an event", err);
    leave(cuda, pushed);
    return status;
}

/* Query, spin for a short time, then query between short sleeps, so that ticks and timeouts work: with
 * cuEventSynchronize neither would. */
static zpp_status await_event(struct cuda_device *cuda, struct cuda_event *event, const struct zpp_wait *wait,
                              struct zpp_err *err) {
    const uint64_t start_ns = zpp_now_ns();
    uint64_t tick_ns = start_ns + TICK_NS;
    for (;;) {
        const CUresult result = cuda->api->cuEventQuery(event->native);
        if (result == ZPP_CU_SUCCESS) return ZPP_OK;
        if (result != ZPP_CU_NOT_READY) {
            return zpp_cuda_fail(cuda->api, result, err, "device cuda: waiting for an event");
        }
        if (!wait) return ZPP_AGAIN;
        const uint64_t now_ns = zpp_now_ns();
        if (wait->timeout_ns && now_ns - start_ns >= wait->timeout_ns) {
            return zpp_fail(err, ZPP_TIMEOUT, "stream \"%s\": an event was not reached within %.3f s",
                            event->stream_name, (double)wait->timeout_ns * 1e-9);
        }
        if (now_ns >= tick_ns) {
            tick_ns = now_ns + TICK_NS;
            const zpp_status status = wait->tick ? wait->tick(wait->ctx, err) : ZPP_OK;
            if (status) return status;
        }
        if (now_ns - start_ns > SPIN_NS) nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
    }
}

static zpp_status cuda_sync(zpp_event *base, const struct zpp_wait *wait, struct zpp_err *err) {
    struct cuda_event *event = (struct cuda_event *)base;
    struct cuda_device *cuda = cuda_of(base->device);
    if (event->error.status) {
        if (err) *err = event->error;
        return event->error.status;
    }
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (status) return status;
    status = await_event(cuda, event, wait, err);
    leave(cuda, pushed);
    return status;
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */
static zpp_status load_images(struct cuda_device *cuda, struct zpp_err *err) {
    if (cuda->modules) return ZPP_OK;
    CUmodule *modules = calloc(zpp_cuda_images_count + 1, sizeof *modules);
    if (!modules) return zpp_fail(err, ZPP_NOMEM, "device cuda: no memory for its table of kernels");
    for (size_t image = 0; image < zpp_cuda_images_count; ++image) {
        const CUresult result = cuda->api->cuModuleLoadData(&modules[image], zpp_cuda_images[image].data);
        if (!result) continue;
        while (image--) cuda->api->cuModuleUnload(modules[image]);
        free(modules);
        return zpp_cuda_fail(cuda->api, result, err,
                             "device cuda: loading the kernels (is the driver older than `python -m zeropp env` asks "
                             "for?)");
    }
    cuda->modules = modules;
    return ZPP_OK;
}

static zpp_status find_kernel(struct cuda_device *cuda, const char *name, CUfunction *out, struct zpp_err *err) {
    for (const struct kernel *kernel = cuda->kernels; kernel; kernel = kernel->next) {
        if (strcmp(kernel->name, name) == 0) {
            *out = kernel->function;
            return ZPP_OK;
        }
    }
    const zpp_status status = load_images(cuda, err);
    if (status) return status;
    CUfunction function = NULL;
    CUresult result = ZPP_CU_NOT_FOUND;
    for (size_t image = 0; result && image < zpp_cuda_images_count; ++image) {
        result = cuda->api->cuModuleGetFunction(&function, cuda->modules[image], name);
    }
    if (result) {
        return zpp_fail(err, ZPP_NOT_BUILT, "device cuda: no kernel \"%s\" among %zu images", name,
                        zpp_cuda_images_count);
    }
    struct kernel *kernel = malloc(sizeof *kernel + strlen(name) + 1);
    if (!kernel) return zpp_fail(err, ZPP_NOMEM, "device cuda: no memory for a kernel's record");
    kernel->function = function;
    strcpy(kernel->name, name);
    kernel->next = cuda->kernels;
    cuda->kernels = kernel;
    *out = function;
    return ZPP_OK;
}

zpp_status zpp_cuda_kernel(zpp_device *device, const char *name, CUfunction *out, struct zpp_err *err) {
    struct cuda_device *cuda = cuda_of(device);
    if (!zpp_cuda_images_count) {
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "device cuda: kernel \"%s\": this build has no CUDA kernels; build it where nvcc is installed",
                        name);
    }
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (status) return status;
    pthread_mutex_lock(&cuda->lock);
    status = find_kernel(cuda, name, out, err);
    pthread_mutex_unlock(&cuda->lock);
    leave(cuda, pushed);
    return status;
}

zpp_status zpp_cuda_launch(zpp_device *device, CUfunction function, const struct zpp_cuda_grid *grid, void *native,
                           void **args, struct zpp_err *err) {
    struct cuda_device *cuda = cuda_of(device);
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuLaunchKernel(function, grid->blocks[0], grid->blocks[1], grid->blocks[2],
                                                      grid->threads[0], grid->threads[1], grid->threads[2],
                                                      grid->shared_bytes, native, args, NULL);
    if (result) status = zpp_cuda_fail(cuda->api, result, err, "device cuda: launching a kernel");
    leave(cuda, pushed);
    return status;
}

/* --- host memory -------------------------------------------------------------------------------------------------- */
zpp_status zpp_cuda_host_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err) {
    struct cuda_device *cuda = cuda_of(device);
    bool pushed;
    zpp_status status = enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuMemHostAlloc(out, bytes ? bytes : 1, ZPP_CU_HOST_ALLOC_PORTABLE);
    if (result) {
        char what[96];
        snprintf(what, sizeof what, "device cuda: %zu bytes of page-locked host memory", bytes);
        status = zpp_cuda_fail(cuda->api, result, err, what);
    }
    leave(cuda, pushed);
    return status;
}

void zpp_cuda_host_free(zpp_device *device, void *memory) {
    struct cuda_device *cuda = cuda_of(device);
    bool pushed;
    if (!memory || enter(cuda, &pushed, NULL)) return;
    cuda->api->cuMemFreeHost(memory);
    leave(cuda, pushed);
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
    struct cuda_device *cuda = cuda_of(device);
    bool pushed;
    if (!enter(cuda, &pushed, NULL)) {
        while (cuda->blocks) forget_block(cuda, &cuda->blocks);
        for (size_t image = 0; cuda->modules && image < zpp_cuda_images_count; ++image) {
            cuda->api->cuModuleUnload(cuda->modules[image]);
        }
        leave(cuda, pushed);
    }
    while (cuda->kernels) {
        struct kernel *kernel = cuda->kernels;
        cuda->kernels = kernel->next;
        free(kernel);
    }
    free(cuda->modules);
    cuda->api->cuDevicePrimaryCtxRelease(cuda->device);
    pthread_mutex_destroy(&cuda->lock);
    free(cuda);
}

static const struct zpp_device_fill cuda_fill = {
    .name = "cuda",
    .destroy = cuda_destroy,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_adopt = cuda_stream_adopt,
    .launch = cuda_op,
    .copy = cuda_copy,
    .poll = cuda_poll,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .record = cuda_record,
    .wait = cuda_wait,
    .sync = cuda_sync,
};

static zpp_status open_ordinal(struct cuda_device *cuda, int ordinal, struct zpp_err *err) {
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
    struct cuda_device *cuda = calloc(1, sizeof *cuda);
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
    *out = &cuda->base;
    return ZPP_OK;
}
