/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA driver for tests/c/test_base_cuda_fake.c, in host memory: loaded through ZEROPP_CUDA_DRIVER. It is strict
 * where the real one is strict (a call without the context current is an error, so is a stream of another context), and
 * late where the real one is late: copies and kernels happen when an event is queried for the third time, or at a
 * synchronize. `fake_cuda_*` are for the test to look inside.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../csrc/base/cuda_api.h"

#define CU(name, symbol, arguments) CUresult name arguments __asm__(symbol);
#include "../../csrc/base/cuda_api.def"
#undef CU

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, NO_ROOM_FROM_BYTES = 1 << 28, ERROR_ILLEGAL_ADDRESS = 700 };
enum { GRAIN_BYTES = 4096, MOST_HANDLES = 64 };
enum kind { COPY, FILL, WRITE, WAIT };

struct pending {
    struct pending *next;
    enum kind kind;
    void *dst;
    const void *src;
    size_t bytes;
    uint64_t value; /* FILL: the byte; WRITE, WAIT: of the counter at dst */
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
int fake_cuda_pinned, fake_cuda_reserved, fake_cuda_handles, fake_cuda_priority, fake_cuda_no_virtual_memory;
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

/* Do what the stream holds, up to a counter that is not reached. */
static void flush(CUstream stream) {
    while (stream->first) {
        struct pending *work = stream->first;
        volatile uint64_t *counter = work->dst;
        if (work->kind == WAIT && (int64_t)(*counter - work->value) < 0) return;
        stream->first = work->next;
        if (work->kind == COPY) memmove(work->dst, work->src, work->bytes);
        if (work->kind == FILL) memset(work->dst, (int)work->value, work->bytes);
        if (work->kind == WRITE) *counter = work->value;
        free(work);
    }
    stream->last = &stream->first;
}

static CUresult enqueue(CUstream stream, struct pending like) {
    struct pending *work = malloc(sizeof *work);
    *work = like;
    stream = real(stream);
    *stream->last = work;
    stream->last = &work->next;
    return 0;
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
    return enqueue(stream, (struct pending){NULL, COPY, (void *)(size_t)dst, (const void *)(size_t)src, bytes, 0});
}
CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char byte, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT;
    return enqueue(stream, (struct pending){NULL, FILL, (void *)(size_t)dst, NULL, bytes, byte});
}
CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags) {
    NEEDS_CONTEXT;
    if (at % 8 || flags != ZPP_CU_STREAM_WRITE_VALUE_DEFAULT) return INVALID_VALUE;
    return enqueue(stream, (struct pending){NULL, WRITE, (void *)(size_t)at, NULL, 8, value});
}
CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags) {
    NEEDS_CONTEXT;
    if (at % 8 || flags != ZPP_CU_STREAM_WAIT_VALUE_GEQ) return INVALID_VALUE;
    return enqueue(stream, (struct pending){NULL, WAIT, (void *)(size_t)at, NULL, 8, value});
}

/* Virtual memory: a handle is a memfd, and a mapping an mmap of it, so one may be mapped many times, as on a GPU. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    const bool known = attribute == ZPP_CU_ATTRIBUTE_VIRTUAL_MEMORY || attribute == ZPP_CU_ATTRIBUTE_POSIX_HANDLES;
    return *value = known && !fake_cuda_no_virtual_memory, device == 40 ? 0 : INVALID_VALUE;
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags which) {
    NEEDS_CONTEXT;
    return *bytes = GRAIN_BYTES, properties->type == ZPP_CU_MEM_PINNED && which == 0 ? 0 : INVALID_VALUE;
}
CUresult cuMemAddressReserve(CUdeviceptr *base, size_t bytes, size_t align_bytes, CUdeviceptr wanted,
                             unsigned long long flags) {
    NEEDS_CONTEXT;
    if (bytes % GRAIN_BYTES || align_bytes || wanted || flags) return INVALID_VALUE;
    void *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ++fake_cuda_reserved;
    return *base = (CUdeviceptr)(size_t)at, at == MAP_FAILED ? ZPP_CU_OUT_OF_MEMORY : 0;
}
CUresult cuMemAddressFree(CUdeviceptr base, size_t bytes) {
    NEEDS_CONTEXT;
    return --fake_cuda_reserved, munmap((void *)(size_t)base, bytes) ? INVALID_VALUE : 0;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    NEEDS_CONTEXT;
    if (bytes % GRAIN_BYTES || flags || properties->location.type != ZPP_CU_MEM_ON_DEVICE) return INVALID_VALUE;
    if (bytes >= NO_ROOM_FROM_BYTES || fake_cuda_handles == MOST_HANDLES) return ZPP_CU_OUT_OF_MEMORY;
    const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes)) return ZPP_CU_OUT_OF_MEMORY;
    ++fake_cuda_handles;
    return *handle = (CUmemGenericAllocationHandle)fd, 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    NEEDS_CONTEXT;
    return --fake_cuda_handles, close((int)handle) ? INVALID_VALUE : 0;
}
CUresult cuMemMap(CUdeviceptr base, size_t bytes, size_t offset_bytes, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    NEEDS_CONTEXT;
    if (offset_bytes || flags || bytes % GRAIN_BYTES || base % GRAIN_BYTES) return INVALID_VALUE;
    void *at = mmap((void *)(size_t)base, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, 0);
    return at == MAP_FAILED ? INVALID_VALUE : 0;
}
CUresult cuMemSetAccess(CUdeviceptr base, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    NEEDS_CONTEXT;
    if (count != 1 || access->flags != ZPP_CU_MEM_READ_WRITE || access->location.id != 40) return INVALID_VALUE;
    return mprotect((void *)(size_t)base, bytes, PROT_READ | PROT_WRITE) ? INVALID_VALUE : 0;
}
CUresult cuMemUnmap(CUdeviceptr base, size_t bytes) {
    NEEDS_CONTEXT;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)(size_t)base, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : 0;
}
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    NEEDS_CONTEXT;
    if (type != ZPP_CU_MEM_POSIX_HANDLE || flags) return INVALID_VALUE;
    return *(int *)out = dup((int)handle), 0;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from,
                                        CUmemAllocationHandleType type) {
    NEEDS_CONTEXT;
    if (type != ZPP_CU_MEM_POSIX_HANDLE) return INVALID_VALUE;
    const int fd = dup((int)(size_t)from);
    if (fd < 0) return INVALID_VALUE;
    ++fake_cuda_handles;
    return *handle = (CUmemGenericAllocationHandle)fd, 0;
}
CUresult cuMemHostRegister(void *memory, size_t bytes, unsigned int flags) {
    NEEDS_CONTEXT;
    (void)bytes;
    if (flags != (ZPP_CU_HOST_REGISTER_PORTABLE | ZPP_CU_HOST_REGISTER_DEVICEMAP)) return INVALID_VALUE;
    return ++fake_cuda_pinned, memory ? 0 : INVALID_VALUE;
}
CUresult cuMemHostUnregister(void *memory) {
    NEEDS_CONTEXT;
    return --fake_cuda_pinned, memory ? 0 : INVALID_VALUE;
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *host, unsigned int flags) {
    NEEDS_CONTEXT;
    return *device = (CUdeviceptr)(size_t)host, flags ? INVALID_VALUE : 0;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    NEEDS_CONTEXT;
    if (flags != ZPP_CU_STREAM_NON_BLOCKING) return INVALID_VALUE;
    ++fake_cuda_objects;
    fake_cuda_priority = priority;
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
