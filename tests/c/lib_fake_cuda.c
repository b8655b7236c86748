/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA driver for tests/c/test_base_cuda_fake.c, in host memory: loaded through ZEROPP_CUDA_DRIVER. It is strict
 * where the real one is strict (a call without the context current is an error, so is a stream of another context), and
 * late where the real one is late: copies and kernels happen when an event is queried for the third time, or at a
 * synchronize. `fake_cuda_*` are for the test to look inside.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/base/cuda_api.h"

#define CU(name, symbol, arguments) CUresult name arguments __asm__(symbol);
#include "../../csrc/base/cuda_api.def"
#undef CU

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, NO_ROOM_FROM_BYTES = 1 << 28, ERROR_ILLEGAL_ADDRESS = 700 };

struct pending {
    struct pending *next;
    void *dst;
    const void *src;
    size_t bytes;
};
struct CUctx_st { int unused; };
struct CUstream_st {
    struct pending *first, **last;
};
struct CUevent_st {
    CUstream stream;
    int queries;
};
struct CUmod_st { const char *text; };
struct CUfunc_st { int calls; };

static struct CUctx_st primary;
static CUcontext stack[16];
static int depth;
static struct CUstream_st default_stream;
static struct CUfunc_st functions[2];

int fake_cuda_retained, fake_cuda_allocated, fake_cuda_objects, fake_cuda_modules, fake_cuda_break_next;
int fake_cuda_depth(void);
int fake_cuda_launches(int function);
int fake_cuda_depth(void) { return depth; }
int fake_cuda_launches(int function) { return functions[function].calls; }

#define NEEDS_CONTEXT                                                     \
    do {                                                                  \
        if (!depth || stack[depth - 1] != &primary) return INVALID_CONTEXT; \
    } while (0)

static CUstream real(CUstream stream) {
    CUstream found = stream ? stream : &default_stream;
    if (!found->last) found->last = &found->first;
    return found;
}

static void flush(CUstream stream) {
    while (stream->first) {
        struct pending *work = stream->first;
        stream->first = work->next;
        memmove(work->dst, work->src, work->bytes);
        free(work);
    }
    stream->last = &stream->first;
}

CUresult cuInit(unsigned int flags) { return flags ? INVALID_VALUE : 0; }
CUresult cuDriverGetVersion(int *version) { return *version = 13010, 0; }
CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_FAKE";
    return 0;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return (void)error, *text = "a fake error", 0; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal + 40, ordinal ? INVALID_VALUE : 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = &primary;
    ++fake_cuda_retained;
    return device == 40 ? 0 : INVALID_VALUE;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return --fake_cuda_retained, device == 40 ? 0 : INVALID_VALUE; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = depth ? stack[depth - 1] : NULL, 0; }
CUresult cuCtxPushCurrent(CUcontext context) { return stack[depth++] = context, 0; }
CUresult cuCtxPopCurrent(CUcontext *context) { return *context = stack[--depth], 0; }

CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes) {
    NEEDS_CONTEXT;
    if (bytes >= NO_ROOM_FROM_BYTES) return ZPP_CU_OUT_OF_MEMORY;
    char *block = malloc(bytes + 512); /* 256-aligned and no more, as the real one promises */
    char *aligned = (char *)(((size_t)block + 8 + 255) / 512 * 512 + 256);
    memcpy(aligned - 8, &block, sizeof block);
    ++fake_cuda_allocated;
    return *memory = (CUdeviceptr)(size_t)aligned, 0;
}
CUresult cuMemFree(CUdeviceptr memory) {
    NEEDS_CONTEXT;
    char *block;
    memcpy(&block, (char *)(size_t)memory - 8, sizeof block);
    free(block);
    return --fake_cuda_allocated, 0;
}
CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    return *free_bytes = 1000, *total_bytes = NO_ROOM_FROM_BYTES, 0;
}
CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags) {
    NEEDS_CONTEXT;
    if (flags != ZPP_CU_HOST_ALLOC_PORTABLE) return INVALID_VALUE;
    ++fake_cuda_allocated;
    return *memory = malloc(bytes), 0;
}
CUresult cuMemFreeHost(void *memory) {
    NEEDS_CONTEXT;
    free(memory);
    return --fake_cuda_allocated, 0;
}
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT;
    if (fake_cuda_break_next) return fake_cuda_break_next = 0, ERROR_ILLEGAL_ADDRESS;
    struct pending *work = malloc(sizeof *work);
    *work = (struct pending){NULL, (void *)(size_t)dst, (const void *)(size_t)src, bytes};
    stream = real(stream);
    *stream->last = work;
    stream->last = &work->next;
    return 0;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    NEEDS_CONTEXT;
    if (flags != ZPP_CU_STREAM_NON_BLOCKING) return INVALID_VALUE;
    ++fake_cuda_objects;
    return *stream = calloc(1, sizeof **stream), 0;
}
CUresult cuStreamDestroy(CUstream stream) {
    NEEDS_CONTEXT;
    free(stream);
    return --fake_cuda_objects, 0;
}
CUresult cuStreamQuery(CUstream stream) { return real(stream)->first ? ZPP_CU_NOT_READY : 0; }
CUresult cuStreamSynchronize(CUstream stream) {
    NEEDS_CONTEXT;
    return flush(real(stream)), 0;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    NEEDS_CONTEXT;
    (void)stream;
    if (event->stream) flush(event->stream); /* in effect: what comes later on `stream` sees it done */
    return flags ? INVALID_VALUE : 0;
}
CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    NEEDS_CONTEXT;
    if (flags != ZPP_CU_EVENT_DISABLE_TIMING) return INVALID_VALUE;
    ++fake_cuda_objects;
    return *event = calloc(1, sizeof **event), 0;
}
CUresult cuEventDestroy(CUevent event) {
    NEEDS_CONTEXT;
    free(event);
    return --fake_cuda_objects, 0;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    NEEDS_CONTEXT;
    *event = (struct CUevent_st){real(stream), 0};
    return 0;
}
CUresult cuEventQuery(CUevent event) {
    NEEDS_CONTEXT;
    if (!event->stream || !event->stream->first) return 0;
    if (++event->queries < 3) return ZPP_CU_NOT_READY;
    return flush(event->stream), 0;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    NEEDS_CONTEXT;
    ++fake_cuda_modules;
    *module = malloc(sizeof **module);
    (*module)->text = image;
    return 0;
}
CUresult cuModuleUnload(CUmodule module) {
    NEEDS_CONTEXT;
    free(module);
    return --fake_cuda_modules, 0;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    NEEDS_CONTEXT;
    if (strcmp(module->text, name) != 0) return ZPP_CU_NOT_FOUND;
    return *function = &functions[strcmp(name, "first") != 0], 0;
}
CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void **args, void **extra) {
    NEEDS_CONTEXT;
    (void)stream, (void)shared_bytes, (void)extra;
    if (!grid_x || !grid_y || !grid_z || block_x * block_y * block_z > 1024) return INVALID_VALUE;
    function->calls += *(int *)args[0];
    return 0;
}
