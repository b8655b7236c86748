/* SPDX-License-Identifier: Apache-2.0
 *
 * The rows of the simulated driver over streams.c, memory.c and kernels.c: devices, contexts, streams, events, copies,
 * launches. A call without a current context, a stream of another device and a dead handle are errors here, as they are
 * to the real driver.
 */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEPTH = 16, DRIVER_VERSION = 13010, MOST_THREADS = 1024, MOST_SHARED_BYTES = 48 << 10 };
enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 };

struct CUctx_st {
    int device;
};
static struct CUctx_st contexts[SIM_MOST_DEVICES];
static __thread struct CUctx_st *stack[MOST_DEPTH];
static __thread int depth;

struct sim_faults sim_faults;

void sim_fatal(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fputs("simulated GPU: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    abort();
}

uint64_t sim_setting(const char *variable, uint64_t otherwise) {
    const char *text = getenv(variable);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

int sim_devices(void) {
    const uint64_t devices = sim_setting("SIM_DEVICES", 1);
    return devices < SIM_MOST_DEVICES ? (int)devices : SIM_MOST_DEVICES;
}

/* --- errors ------------------------------------------------------------------------------------------------------- */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {ZPP_CU_SUCCESS, "CUDA_SUCCESS", "no error"},
    {ZPP_CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {ZPP_CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ZPP_CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {ZPP_CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ZPP_CU_HOST_REGISTER_ALREADY, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part of the range is mapped already"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered range"},
    {ZPP_CU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

static size_t error_row(CUresult error) {
    size_t row = 0;
    while (row < sizeof errors / sizeof errors[0] && errors[row].code != error) row++;
    return row;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    const size_t row = error_row(error);
    if (row == sizeof errors / sizeof errors[0]) return ZPP_CU_INVALID_VALUE;
    *name = errors[row].name;
    return ZPP_CU_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    const size_t row = error_row(error);
    if (row == sizeof errors / sizeof errors[0]) return ZPP_CU_INVALID_VALUE;
    *text = errors[row].text;
    return ZPP_CU_SUCCESS;
}

/* --- devices and contexts ----------------------------------------------------------------------------------------- */

static bool is_device(CUdevice device) { return device >= FIRST_DEVICE && device < FIRST_DEVICE + sim_devices(); }

CUresult cuInit(unsigned int flags) { return flags ? ZPP_CU_INVALID_VALUE : ZPP_CU_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return ZPP_CU_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = sim_devices();
    return ZPP_CU_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= sim_devices()) return INVALID_DEVICE;
    *device = FIRST_DEVICE + ordinal;
    return ZPP_CU_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    /* Numbers of CUdevice_attribute: threads a block, processors, mapped host memory, compute capability 9.0, 64-bit
     * counters, memory mapping, its export as a file descriptor. */
    static const int table[][2] = {{1, 1024}, {16, 132}, {19, 1}, {75, 9}, {76, 0}, {122, 1}, {102, 1}, {103, 1}};
    if (!is_device(device)) return INVALID_DEVICE;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i][0] == attribute) return *value = table[i][1], ZPP_CU_SUCCESS;
    return ZPP_CU_INVALID_VALUE;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (!is_device(device)) return INVALID_DEVICE;
    *context = &contexts[device - FIRST_DEVICE];
    (*context)->device = device - FIRST_DEVICE;
    SIM_COUNT(contexts, 1);
    return ZPP_CU_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    if (!is_device(device)) return INVALID_DEVICE;
    SIM_COUNT(contexts, -1);
    return ZPP_CU_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = depth ? stack[depth - 1] : NULL;
    return ZPP_CU_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    if (depth == MOST_DEPTH) sim_fatal("%d contexts are pushed in one thread", depth);
    stack[depth++] = context;
    return ZPP_CU_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return ZPP_CU_SUCCESS;
}

CUresult sim_current_device(int *device) {
    const struct CUctx_st *context = depth ? stack[depth - 1] : NULL;
    if (context < contexts || context >= contexts + SIM_MOST_DEVICES) return INVALID_CONTEXT;
    *device = context->device;
    return ZPP_CU_SUCCESS;
}

int sim_contexts_pushed(void) { return depth; }

/* The stream that a handle stands for in the current context. */
static CUresult find_stream(sim_stream handle, sim_stream *stream) {
    int device = 0;
    const CUresult result = sim_current_device(&device);
    if (!result) *stream = handle ? handle : sim_default_stream(device);
    return result;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = LEAST_PRIORITY;
    *greatest = GREATEST_PRIORITY;
    return ZPP_CU_SUCCESS;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

/* Streams that synchronize with the default stream by themselves are not simulated: flags are
 * ZPP_CU_STREAM_NON_BLOCKING. */
CUresult cuStreamCreateWithPriority(sim_stream *stream, unsigned int flags, int priority) {
    int device;
    const CUresult result = sim_current_device(&device);
    if (result) return result;
    if (flags != ZPP_CU_STREAM_NON_BLOCKING || priority > LEAST_PRIORITY || priority < GREATEST_PRIORITY)
        return ZPP_CU_INVALID_VALUE;
    return sim_stream_create(device, stream);
}

CUresult cuStreamDestroy(sim_stream stream) {
    int device;
    const CUresult result = sim_current_device(&device);
    return result ? result : sim_stream_destroy(stream);
}

CUresult cuStreamQuery(sim_stream handle) {
    sim_stream stream;
    const CUresult result = find_stream(handle, &stream);
    return result ? result : sim_stream_query(stream);
}

CUresult cuStreamSynchronize(sim_stream handle) {
    sim_stream stream;
    const CUresult result = find_stream(handle, &stream);
    return result ? result : sim_stream_synchronize(stream);
}

static _Atomic int captures; /* what cuStreamIsCapturing says of every stream but the default one */

void sim_capture(int status) { captures = status; }

CUresult cuStreamIsCapturing(sim_stream handle, CUstreamCaptureStatus *status) {
    sim_stream stream;
    const CUresult result = find_stream(handle, &stream);
    *status = handle ? captures : ZPP_CU_CAPTURE_NONE;
    if (result) return result;
    return !handle && captures ? ZPP_CU_STREAM_CAPTURE_IMPLICIT : ZPP_CU_SUCCESS;
}

CUresult cuStreamWaitEvent(sim_stream handle, sim_event event, unsigned int flags) {
    sim_stream stream;
    const CUresult result = find_stream(handle, &stream);
    if (result) return result;
    return flags ? ZPP_CU_INVALID_VALUE : sim_stream_wait(stream, event);
}

/* --- counters ----------------------------------------------------------------------------------------------------- */

static CUresult find_counter(CUdeviceptr address, uint64_t **counter) {
    *counter = (uint64_t *)(uintptr_t)address;
    return address % 8 || sim_memory_of(*counter) == SIM_PAGEABLE ? ZPP_CU_INVALID_VALUE : ZPP_CU_SUCCESS;
}

/* flags: GEQ, which compares cyclically. The driver's other comparisons are not simulated. */
CUresult cuStreamWaitValue64(sim_stream handle, CUdeviceptr address, uint64_t value, unsigned int flags) {
    sim_stream stream;
    uint64_t *counter;
    CUresult result = find_stream(handle, &stream);
    if (!result) result = flags ? ZPP_CU_NOT_SUPPORTED : find_counter(address, &counter);
    return result ? result : sim_enqueue_wait_values(stream, &counter, &value, 1);
}

CUresult cuStreamWriteValue64(sim_stream handle, CUdeviceptr address, uint64_t value, unsigned int flags) {
    sim_stream stream;
    uint64_t *counter;
    CUresult result = find_stream(handle, &stream);
    if (!result) result = flags > 1 ? ZPP_CU_INVALID_VALUE : find_counter(address, &counter); /* 1: without a barrier */
    return result ? result : sim_enqueue_write_value(stream, counter, value);
}

enum { MOST_BATCHED = 255 };

/* Waits for counters, in the order of the array, as one operation of the host. `operations` is read inside the call.
 * All of them are checked before one is enqueued. Writes and barriers in a batch are not simulated. */
CUresult cuStreamBatchMemOp(sim_stream handle, unsigned int count, CUstreamBatchMemOpParams *operations,
                            unsigned int flags) {
    sim_stream stream;
    uint64_t *counters[MOST_BATCHED], values[MOST_BATCHED];
    CUresult result = find_stream(handle, &stream);
    if (!result && (flags || !count || count > MOST_BATCHED)) result = ZPP_CU_INVALID_VALUE;
    for (unsigned int i = 0; !result && i < count; i++) {
        const bool waits = operations[i].waitValue.operation == ZPP_CU_STREAM_MEM_OP_WAIT_VALUE_64;
        values[i] = operations[i].waitValue.value64;
        result = !waits || operations[i].waitValue.flags ? ZPP_CU_NOT_SUPPORTED
                                                         : find_counter(operations[i].waitValue.address, &counters[i]);
    }
    return result ? result : sim_enqueue_wait_values(stream, counters, values, count);
}

/* --- events ------------------------------------------------------------------------------------------------------- */

CUresult cuEventCreate(sim_event *event, unsigned int flags) {
    int device;
    const CUresult result = sim_current_device(&device);
    if (result) return result;
    return flags != ZPP_CU_EVENT_DISABLE_TIMING ? ZPP_CU_NOT_SUPPORTED : sim_event_create(event);
}

CUresult cuEventDestroy(sim_event event) {
    int device;
    const CUresult result = sim_current_device(&device);
    return result ? result : sim_event_destroy(event);
}

CUresult cuEventRecord(sim_event event, sim_stream handle) {
    sim_stream stream;
    const CUresult result = find_stream(handle, &stream);
    return result ? result : sim_event_record(event, stream);
}

CUresult cuEventQuery(sim_event event) {
    int device;
    const CUresult result = sim_current_device(&device);
    return result ? result : sim_event_query(event);
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

int sim_enqueue(sim_stream stream, void (*run)(void *arg), void *arg, const char *name) {
    return sim_enqueue_counted(stream, run, arg, name, offsetof(struct sim_counts, kernels));
}

struct copy {
    void *dst;
    const void *src;
    size_t bytes;
};

static void run_copy(void *arg) {
    const struct copy *copy = arg;
    memmove(copy->dst, copy->src, copy->bytes);
    free(arg);
}

int sim_enqueue_copy(sim_stream stream, void *dst, const void *src, size_t bytes) {
    struct copy *copy = malloc(sizeof *copy);
    if (!copy) sim_fatal("no memory for a copy");
    *copy = (struct copy){dst, src, bytes};
    const int result = sim_enqueue_counted(stream, run_copy, copy, "copy", offsetof(struct sim_counts, copies));
    if (result) free(copy);
    return result;
}

/* Pageable memory is not the GPU's to touch: what is read from it is read inside the call, and a call that writes to it
 * returns when it has written. */
CUresult cuMemcpyAsync(CUdeviceptr dst_address, CUdeviceptr src_address, size_t bytes, sim_stream handle) {
    void *dst = (void *)(uintptr_t)dst_address, *src = (void *)(uintptr_t)src_address;
    sim_stream stream;
    CUresult result = find_stream(handle, &stream);
    if (!result) result = sim_faults.fail_copy;
    sim_faults.fail_copy = ZPP_CU_SUCCESS;
    if (result) return result;
    void *staged = NULL;
    if (sim_memory_of(src) == SIM_PAGEABLE) {
        staged = malloc(bytes ? bytes : 1);
        if (!staged) sim_fatal("no memory to stage a copy of %zu bytes", bytes);
        src = memcpy(staged, src, bytes);
    }
    result = sim_enqueue_copy(stream, dst, src, bytes);
    if (staged && !result) result = sim_enqueue(stream, free, staged, "the end of a staged copy");
    if (!result && sim_memory_of(dst) == SIM_PAGEABLE) {
        const char *before = sim_because("cuMemcpyAsync to pageable memory");
        result = sim_stream_synchronize(stream);
        sim_because(before);
    }
    return result;
}

struct fill {
    void *dst;
    size_t bytes;
    unsigned char byte;
};

static void run_fill(void *arg) {
    const struct fill *fill = arg;
    memset(fill->dst, fill->byte, fill->bytes);
    free(arg);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char byte, size_t bytes, sim_stream handle) {
    sim_stream stream;
    const CUresult result = find_stream(handle, &stream);
    if (result) return result;
    struct fill *fill = malloc(sizeof *fill);
    if (!fill) sim_fatal("no memory for a fill");
    *fill = (struct fill){(void *)(uintptr_t)dst, bytes, byte};
    return sim_enqueue(stream, run_fill, fill, "a fill");
}

/* --- kernels: the files that nvcc compiles, compiled as C (build.py) ------------------------------------------------
 */

/* An image that begins with "sim:" is the name of its one kernel, one with "old:" has no code for this GPU; every other
 * one holds all that are registered. */
struct CUmod_st {
    const char *only;
};

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    int device;
    const CUresult result = sim_current_device(&device);
    if (result) return result;
    if (memcmp(image, "old:", 4) == 0) return ZPP_CU_NO_BINARY_FOR_GPU;
    CUmodule made = calloc(1, sizeof *made);
    if (!made) return ZPP_CU_OUT_OF_MEMORY;
    made->only = memcmp(image, "sim:", 4) == 0 ? (const char *)image + 4 : NULL;
    SIM_COUNT(modules, 1);
    *module = made;
    return ZPP_CU_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    int device;
    const CUresult result = sim_current_device(&device);
    if (result) return result;
    free(module);
    SIM_COUNT(modules, -1);
    return ZPP_CU_SUCCESS;
}

/* A CUfunction is a row of kernels.c. */
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    const struct sim_kernel *kernel = module->only && strcmp(module->only, name) != 0 ? NULL : sim_kernel_find(name);
    if (!kernel) return ZPP_CU_NOT_FOUND;
    *function = (CUfunction)(uintptr_t)kernel;
    return ZPP_CU_SUCCESS;
}

struct launch {
    const struct sim_kernel *kernel;
    unsigned int blocks, threads;
    _Alignas(16) unsigned char arg[];
};

static void run_launch(void *arg) {
    const struct launch *launch = arg;
    sim_kernel_run(launch->kernel, launch->arg, launch->blocks, launch->threads);
    free(arg);
}

/* As of now, kernels have one dimension. One with shared memory that is sized at the launch has an array as C, as large
 * as any GPU gives without being asked. */
CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        sim_stream handle, void **args, void **extra) {
    const struct sim_kernel *kernel = (const struct sim_kernel *)function;
    sim_stream stream;
    const CUresult result = find_stream(handle, &stream);
    if (result) return result;
    if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z) return ZPP_CU_INVALID_VALUE;
    if ((uint64_t)block_x * block_y * block_z > MOST_THREADS) return ZPP_CU_INVALID_VALUE;
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes > MOST_SHARED_BYTES || extra)
        return ZPP_CU_NOT_SUPPORTED;
    struct launch *launch = malloc(sizeof *launch + kernel->arg_bytes);
    if (!launch) sim_fatal("no memory for a launch of %s", kernel->name);
    launch->kernel = kernel;
    launch->blocks = grid_x;
    launch->threads = block_x;
    memcpy(launch->arg, args[0], kernel->arg_bytes); /* a launch takes its arguments' values along */
    return sim_enqueue(stream, run_launch, launch, kernel->name);
}
