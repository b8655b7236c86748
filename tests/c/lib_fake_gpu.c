/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA driver and an NCCL for tests/c/test_comm_nccl.c and tests/comm/test_nccl.py, in host memory, for ranks that
 * are threads of one process; loaded through ZEROPP_CUDA_DRIVER and ZEROPP_NCCL. It keeps the order of streams and
 * nothing else: a stream is a queue, its head runs when it can, and only while somebody asks for an event or a stream.
 * So an NCCL call is done when all its ranks' calls are at the heads of their streams, what ranks call in another order
 * hangs, and so do a send and a receive that wait for each other outside of a group; a call that its peers never make
 * hangs until its communicator is aborted. Not blocking, as it is asked to be: what takes peers is in progress first.
 *
 * `fake_gpu` is for the test to look inside and to break things.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../csrc/base/cuda_api.h"
#include "../../csrc/base/dtype.h"
#include "../../csrc/comm/nccl/nccl_api.h"
#include "fake_gpu.h"

#define CU(name, symbol, arguments) CUresult name arguments __asm__(symbol);
#include "../../csrc/base/cuda_api.def"
#undef CU
#define NCCL(need, type, name, arguments) type name arguments;
#include "../../csrc/comm/nccl/nccl_api.def"
#undef NCCL

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, MOST_RANKS = 16, NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5 };
enum kind { COPY, RECORD, WAIT, NCCL };
enum what { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECV };

struct part { /* one function of NCCL */
    struct part *next, *next_active;
    enum what what;
    const void *src;
    void *dst;
    size_t elems;
    int dtype, op, peer; /* root, or the other one */
    ncclComm_t comm;
    unsigned number; /* of this rank's collectives; of the transfers of this pair and direction */
    bool done;
};
struct work {
    struct work *next;
    enum kind kind;
    void *dst;
    const void *src;
    size_t bytes;
    CUevent event;
    unsigned target;
    struct part *parts;
    bool active;
};
struct CUctx_st { int unused; };
struct CUstream_st {
    struct CUstream_st *next;
    struct work *first, **last;
};
struct CUevent_st {
    unsigned recorded, completed;
    int users;
    bool destroyed;
};
struct CUmod_st { int unused; };
struct CUfunc_st { int unused; };
struct rendezvous {
    struct rendezvous *next;
    ncclUniqueId id;
    int ranks, joined, left;
    bool broken;
    struct part *active; /* at the heads of their streams, not done */
};
struct ncclComm {
    struct ncclComm *next_aborted;
    struct rendezvous *rendezvous;
    int rank;
    bool aborted, finalized;
    unsigned collectives, sent[MOST_RANKS], received[MOST_RANKS];
};

struct fake_gpu fake_gpu;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below */
static struct CUctx_st primary;
static struct CUstream_st *streams, default_stream;
static struct rendezvous *rendezvous_list;
static ncclComm_t aborted; /* kept: works that are not at a head yet point at them */
static __thread CUcontext stack[16];
static __thread int depth;
static __thread int grouping;
static __thread struct part *group_first, **group_last;
static __thread CUstream group_stream;

/* --- NCCL's arithmetic -------------------------------------------------------------------------------------------- */

static size_t bytes_of(int dtype) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return dtype >= 0 && dtype < 10 ? bytes[dtype] : 0;
}

static double load(const void *at, size_t i, int dtype) {
    switch (dtype) {
    case ZPP_NCCL_INT8: return ((const int8_t *)at)[i];
    case ZPP_NCCL_UINT8: return ((const uint8_t *)at)[i];
    case ZPP_NCCL_INT32: return ((const int32_t *)at)[i];
    case ZPP_NCCL_INT64: return (double)((const int64_t *)at)[i];
    case ZPP_NCCL_FLOAT32: return (double)((const float *)at)[i];
    case ZPP_NCCL_FLOAT64: return ((const double *)at)[i];
    case ZPP_NCCL_BFLOAT16: return (double)zpp_bf16_to_f32(((const uint16_t *)at)[i]);
    default: abort();
    }
}

static void store(void *at, size_t i, int dtype, double value) {
    switch (dtype) {
    case ZPP_NCCL_INT8: ((int8_t *)at)[i] = (int8_t)value; break;
    case ZPP_NCCL_UINT8: ((uint8_t *)at)[i] = (uint8_t)value; break;
    case ZPP_NCCL_INT32: ((int32_t *)at)[i] = (int32_t)value; break;
    case ZPP_NCCL_INT64: ((int64_t *)at)[i] = (int64_t)value; break;
    case ZPP_NCCL_FLOAT32: ((float *)at)[i] = (float)value; break;
    case ZPP_NCCL_FLOAT64: ((double *)at)[i] = value; break;
    case ZPP_NCCL_BFLOAT16: ((uint16_t *)at)[i] = zpp_bf16_from_f32((float)value); break;
    default: abort();
    }
}

static double combine(double a, double b, int op) {
    switch (op) {
    case ZPP_NCCL_PROD: return a * b;
    case ZPP_NCCL_MAX: return a > b ? a : b;
    case ZPP_NCCL_MIN: return a < b ? a : b;
    default: return a + b;
    }
}

/* Elements [begin, begin + elems) of all ranks' sources, combined into `dst`. */
static void reduce_into(struct part *const *of, int ranks, size_t begin, size_t elems, void *dst) {
    const int dtype = of[0]->dtype;
    for (size_t i = 0; i < elems; i++) {
        double value = load(of[0]->src, begin + i, dtype);
        for (int r = 1; r < ranks; r++) value = combine(value, load(of[r]->src, begin + i, dtype), of[0]->op);
        store(dst, i, dtype, of[0]->op == ZPP_NCCL_AVG ? value / ranks : value);
    }
}

static void finish_collective(struct part *const *of, int ranks) {
    const size_t elems = of[0]->elems, bytes = elems * bytes_of(of[0]->dtype);
    char *result = malloc((size_t)ranks * bytes + 1);
    switch (of[0]->what) {
    case ALL_REDUCE:
    case REDUCE: reduce_into(of, ranks, 0, elems, result); break;
    case REDUCE_SCATTER: reduce_into(of, ranks, 0, elems * (size_t)ranks, result); break;
    case BROADCAST: memcpy(result, of[of[0]->peer]->src, bytes); break;
    default:
        for (int r = 0; r < ranks; r++) memcpy(result + (size_t)r * bytes, of[r]->src, bytes);
    }
    for (int r = 0; r < ranks; r++) {
        const size_t from = of[0]->what == REDUCE_SCATTER ? (size_t)r * bytes : 0;
        const size_t count = of[0]->what == ALL_GATHER ? (size_t)ranks * bytes : bytes;
        if (of[0]->what != REDUCE || r == of[0]->peer) memcpy(of[r]->dst, result + from, count);
        of[r]->done = true;
    }
    free(result);
}

static bool same(const struct part *a, const struct part *b) {
    return a->what == b->what && a->elems == b->elems && a->dtype == b->dtype && a->op == b->op && a->peer == b->peer;
}

static bool is_collective(const struct part *part) { return part->what != SEND && part->what != RECV; }

static bool try_collective(struct rendezvous *rendezvous, struct part *part) {
    struct part *of[MOST_RANKS] = {NULL};
    int found = 0;
    for (struct part *other = rendezvous->active; other; other = other->next_active) {
        if (other->done || !is_collective(other) || other->number != part->number) continue;
        if (!same(part, other)) return false;
        if (!of[other->comm->rank]) ++found;
        of[other->comm->rank] = other;
    }
    if (found < rendezvous->ranks) return false;
    finish_collective(of, rendezvous->ranks);
    return true;
}

static bool try_transfer(const struct rendezvous *rendezvous, struct part *part) {
    for (struct part *other = rendezvous->active; other; other = other->next_active) {
        if (other->done || other->what != RECV || part->what != SEND || other->number != part->number ||
            other->peer != part->comm->rank || part->peer != other->comm->rank)
            continue;
        if (other->elems != part->elems) return false;
        memcpy(other->dst, part->src, part->elems);
        part->done = other->done = true;
        return true;
    }
    return false;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

static void free_event(CUevent event) {
    if (!event->destroyed || event->users) return;
    free(event);
    --fake_gpu.objects;
}

static void deactivate(struct part *part) {
    struct part **link = &part->comm->rendezvous->active;
    while (*link && *link != part) link = &(*link)->next_active;
    if (*link) *link = part->next_active;
}

static bool parts_done(struct work *work) {
    bool all = true;
    if (!work->active) {
        for (struct part *part = work->parts; part; part = part->next) {
            part->next_active = part->comm->rendezvous->active;
            part->comm->rendezvous->active = part;
        }
        work->active = true;
    }
    for (struct part *part = work->parts; part; part = part->next) {
        struct rendezvous *rendezvous = part->comm->rendezvous;
        if (!part->done && !fake_gpu.stall)
            (void)(is_collective(part) ? try_collective(rendezvous, part) : try_transfer(rendezvous, part));
        if (part->comm->aborted) part->done = true;
        all = all && part->done;
    }
    if (!all) return false;
    while (work->parts) {
        struct part *part = work->parts;
        work->parts = part->next;
        deactivate(part);
        free(part);
    }
    return true;
}

static bool run_head(CUstream stream) {
    struct work *work = stream->first;
    if (!work) return false;
    if (work->kind == COPY) memmove(work->dst, work->src, work->bytes);
    if (work->kind == WAIT && work->event->completed < work->target) return false;
    if (work->kind == RECORD && work->event->completed < work->target) work->event->completed = work->target;
    if (work->kind == NCCL && !parts_done(work)) return false;
    if (work->event) {
        --work->event->users;
        free_event(work->event);
    }
    stream->first = work->next;
    if (!stream->first) stream->last = &stream->first;
    free(work);
    return true;
}

static void pump(void) {
    bool moved = true;
    while (moved) {
        moved = run_head(&default_stream);
        for (CUstream stream = streams; stream; stream = stream->next) moved = run_head(stream) || moved;
    }
}

static CUstream real(CUstream stream) {
    CUstream found = stream ? stream : &default_stream;
    if (!found->last) found->last = &found->first;
    return found;
}

static void push(CUstream stream, struct work like) {
    struct work *work = malloc(sizeof *work);
    *work = like;
    stream = real(stream);
    *stream->last = work;
    stream->last = &work->next;
    if (work->event) ++work->event->users;
}

/* --- the driver --------------------------------------------------------------------------------------------------- */

#define NEEDS_CONTEXT                                                       \
    do {                                                                    \
        if (!depth || stack[depth - 1] != &primary) return INVALID_CONTEXT; \
    } while (0)
#define LOCKED(statement)            \
    do {                             \
        pthread_mutex_lock(&lock);   \
        statement;                   \
        pthread_mutex_unlock(&lock); \
    } while (0)

CUresult cuInit(unsigned int flags) { return flags ? INVALID_VALUE : 0; }
CUresult cuDriverGetVersion(int *version) { return *version = 13010, 0; }
CUresult cuGetErrorName(CUresult error, const char **name) { return (void)error, *name = "CUDA_ERROR_FAKE", 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { return (void)error, *text = "a fake error", 0; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = 40, ordinal ? INVALID_VALUE : 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return (void)device, *context = &primary, 0;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return (void)device, 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = depth ? stack[depth - 1] : NULL, 0; }
CUresult cuCtxPushCurrent(CUcontext context) { return stack[depth++] = context, 0; }
CUresult cuCtxPopCurrent(CUcontext *context) { return *context = stack[--depth], 0; }
CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes) {
    NEEDS_CONTEXT;
    return *memory = (CUdeviceptr)(size_t)malloc(bytes), 0;
}
CUresult cuMemFree(CUdeviceptr memory) { return free((void *)(size_t)memory), 0; }
CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) { return *free_bytes = *total_bytes = 1 << 30, 0; }
CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags) {
    return (void)flags, *memory = malloc(bytes), 0;
}
CUresult cuMemFreeHost(void *memory) { return free(memory), 0; }
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT;
    LOCKED(push(stream, (struct work){.kind = COPY, .dst = (void *)(size_t)dst, .src = (void *)(size_t)src,
                                      .bytes = bytes}));
    return 0;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -1, 0; }
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    (void)priority;
    NEEDS_CONTEXT;
    if (flags != ZPP_CU_STREAM_NON_BLOCKING) return INVALID_VALUE;
    *stream = calloc(1, sizeof **stream);
    LOCKED(++fake_gpu.objects; (*stream)->next = streams; streams = *stream);
    return 0;
}
CUresult cuStreamQuery(CUstream stream) {
    NEEDS_CONTEXT;
    bool left;
    LOCKED(pump(); left = real(stream)->first != NULL);
    return left ? ZPP_CU_NOT_READY : 0;
}
CUresult cuStreamSynchronize(CUstream stream) {
    while (cuStreamQuery(stream) == ZPP_CU_NOT_READY) nanosleep(&(struct timespec){0, 200000}, NULL);
    return 0;
}
CUresult cuStreamDestroy(CUstream stream) {
    CUstream *link = &streams;
    pthread_mutex_lock(&lock);
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    --fake_gpu.objects;
    pthread_mutex_unlock(&lock);
    free(stream);
    return 0;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    NEEDS_CONTEXT;
    LOCKED(push(stream, (struct work){.kind = WAIT, .event = event, .target = event->recorded}));
    return flags ? INVALID_VALUE : 0;
}
CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    NEEDS_CONTEXT;
    if (flags != ZPP_CU_EVENT_DISABLE_TIMING) return INVALID_VALUE;
    *event = calloc(1, sizeof **event);
    LOCKED(++fake_gpu.objects);
    return 0;
}
CUresult cuEventDestroy(CUevent event) {
    LOCKED(event->destroyed = true; free_event(event));
    return 0;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    NEEDS_CONTEXT;
    LOCKED(++event->recorded; push(stream, (struct work){.kind = RECORD, .event = event, .target = event->recorded}));
    return 0;
}
CUresult cuEventQuery(CUevent event) {
    NEEDS_CONTEXT;
    bool done;
    LOCKED(pump(); done = event->completed == event->recorded);
    return done ? 0 : ZPP_CU_NOT_READY;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return (void)module, (void)image, INVALID_VALUE; }
CUresult cuModuleUnload(CUmodule module) { return (void)module, 0; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return (void)function, (void)module, (void)name, ZPP_CU_NOT_FOUND;
}
CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void **args, void **extra) {
    (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)stream, (void)args, (void)extra;
    return INVALID_VALUE;
}

/* --- NCCL's life -------------------------------------------------------------------------------------------------- */

ncclResult_t ncclGetVersion(int *version) { return *version = 22809, 0; }
const char *ncclGetErrorString(ncclResult_t result) { return result == 2 ? "unhandled system error" : "a fake error"; }
const char *ncclGetLastError(ncclComm_t comm) { return (void)comm, "the fake cable is out"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int made;
    memset(id, 0, sizeof *id);
    LOCKED(snprintf(id->internal, sizeof id->internal, "fake %d", ++made));
    return fake_gpu.refuse_id ? 2 : 0;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (config->magic != 0xcafebeef || config->blocking != 0 || config->size_bytes < 24) return NCCL_INVALID_ARGUMENT;
    if (!depth) return NCCL_INVALID_USAGE; /* no device is current */
    pthread_mutex_lock(&lock);
    struct rendezvous *rendezvous = rendezvous_list;
    while (rendezvous && memcmp(&rendezvous->id, &id, sizeof id) != 0) rendezvous = rendezvous->next;
    if (!rendezvous) {
        rendezvous = calloc(1, sizeof *rendezvous);
        *rendezvous = (struct rendezvous){.next = rendezvous_list, .id = id, .ranks = ranks};
        rendezvous_list = rendezvous;
    }
    ++rendezvous->joined;
    ++fake_gpu.comms;
    *comm = calloc(1, sizeof **comm);
    **comm = (struct ncclComm){.rendezvous = rendezvous, .rank = rank};
    pthread_mutex_unlock(&lock);
    return ZPP_NCCL_IN_PROGRESS;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    pthread_mutex_lock(&lock);
    const bool waits = comm->rendezvous->joined < comm->rendezvous->ranks || fake_gpu.stall_init;
    *error = fake_gpu.async_error ? fake_gpu.async_error : waits ? ZPP_NCCL_IN_PROGRESS : 0;
    pthread_mutex_unlock(&lock);
    return 0;
}

static void forget(ncclComm_t comm) {
    struct rendezvous *rendezvous = comm->rendezvous, **link = &rendezvous_list;
    --fake_gpu.comms;
    if (++rendezvous->left < rendezvous->ranks || rendezvous->broken) return;
    while (*link != rendezvous) link = &(*link)->next;
    *link = rendezvous->next;
    free(rendezvous);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return comm->finalized = true, ZPP_NCCL_IN_PROGRESS; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm->finalized) return NCCL_INVALID_USAGE;
    LOCKED(forget(comm));
    free(comm);
    return 0;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { /* its works end at once, and are taken off their streams here */
    LOCKED(comm->aborted = comm->rendezvous->broken = true; comm->next_aborted = aborted; aborted = comm; pump();
           forget(comm); ++fake_gpu.aborts);
    return 0;
}

/* --- NCCL's calls ------------------------------------------------------------------------------------------------- */

static ncclResult_t push_group(void) {
    if (group_first) LOCKED(push(group_stream, (struct work){.kind = NCCL, .parts = group_first}));
    group_first = NULL;
    return fake_gpu.late_launch ? ZPP_NCCL_IN_PROGRESS : 0;
}

ncclResult_t ncclGroupStart(void) {
    if (!grouping++) group_last = &group_first;
    return 0;
}
ncclResult_t ncclGroupEnd(void) { return --grouping ? 0 : push_group(); }

static ncclResult_t add(enum what what, const void *src, void *dst, size_t elems, int dtype, int op, int peer,
                        ncclComm_t comm, CUstream stream) {
    if (!bytes_of(dtype) || peer < 0 || peer >= comm->rendezvous->ranks
        || op > ZPP_NCCL_AVG) return NCCL_INVALID_ARGUMENT;
    if (comm->rendezvous->joined < comm->rendezvous->ranks) return NCCL_INVALID_USAGE;
    if (!grouping) return NCCL_INVALID_USAGE; /* the caller under test always groups */
    struct part *part = calloc(1, sizeof *part);
    *part = (struct part){.what = what, .src = src, .dst = dst, .elems = elems, .dtype = dtype, .op = op, .peer = peer,
                          .comm = comm};
    part->number = what == SEND ? ++comm->sent[peer] : what == RECV ? ++comm->received[peer] : ++comm->collectives;
    *group_last = part;
    group_last = &part->next;
    group_stream = stream;
    return 0;
}

ncclResult_t ncclAllReduce(const void *src, void *dst, size_t elems, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return add(ALL_REDUCE, src, dst, elems, dtype, op, 0, comm, stream);
}
ncclResult_t ncclReduce(const void *src, void *dst, size_t elems, ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return add(REDUCE, src, dst, elems, dtype, op, root, comm, stream);
}
ncclResult_t ncclBroadcast(const void *src, void *dst, size_t elems, ncclDataType_t dtype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return add(BROADCAST, src, dst, elems, dtype, 0, root, comm, stream);
}
ncclResult_t ncclReduceScatter(const void *src, void *dst, size_t dst_elems, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return add(REDUCE_SCATTER, src, dst, dst_elems, dtype, op, 0, comm, stream);
}
ncclResult_t ncclAllGather(const void *src, void *dst, size_t src_elems, ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream) {
    return add(ALL_GATHER, src, dst, src_elems, dtype, 0, 0, comm, stream);
}
ncclResult_t ncclSend(const void *src, size_t elems, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return add(SEND, src, NULL, elems, dtype, 0, peer, comm, stream);
}
ncclResult_t ncclRecv(void *dst, size_t elems, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add(RECV, NULL, dst, elems, dtype, 0, peer, comm, stream);
}

/* --- what no collective of NCCL needs: virtual memory, counters, fills -------------------------------------------- */
#define LACKS(name, arguments) \
    CUresult name arguments { return ZPP_CU_NOT_SUPPORTED; }
#pragma GCC diagnostic ignored "-Wunused-parameter"
LACKS(cuDeviceGetAttribute, (int *value, CUdevice_attribute attribute, CUdevice device))
LACKS(cuMemHostRegister, (void *memory, size_t bytes, unsigned int flags))
LACKS(cuMemHostUnregister, (void *memory))
LACKS(cuMemHostGetDevicePointer, (CUdeviceptr *device, void *host, unsigned int flags))
LACKS(cuMemGetAllocationGranularity,
      (size_t *bytes, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags which))
LACKS(cuMemAddressReserve,
      (CUdeviceptr *base, size_t bytes, size_t align_bytes, CUdeviceptr wanted, unsigned long long flags))
LACKS(cuMemAddressFree, (CUdeviceptr base, size_t bytes))
LACKS(cuMemCreate, (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                    unsigned long long flags))
LACKS(cuMemRelease, (CUmemGenericAllocationHandle handle))
LACKS(cuMemMap, (CUdeviceptr base, size_t bytes, size_t offset_bytes, CUmemGenericAllocationHandle handle,
                 unsigned long long flags))
LACKS(cuMemUnmap, (CUdeviceptr base, size_t bytes))
LACKS(cuMemSetAccess, (CUdeviceptr base, size_t bytes, const CUmemAccessDesc *access, size_t count))
LACKS(cuMemExportToShareableHandle,
      (void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags))
LACKS(cuMemImportFromShareableHandle,
      (CUmemGenericAllocationHandle *handle, void *from, CUmemAllocationHandleType type))
LACKS(cuMemsetD8Async, (CUdeviceptr dst, unsigned char byte, size_t bytes, CUstream stream))
LACKS(cuStreamWriteValue64, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags))
LACKS(cuStreamWaitValue64, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned int flags))
