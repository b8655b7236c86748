/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL over the simulated GPU, for ranks that are processes, or threads of one process. A communicator is a file
 * without a name that its ranks map; the id names it. It has many slots a rank for collectives, and one for each pair
 * of ranks and direction. With few slots a call would wait for the calls before it, which hides missing waits.
 *
 * A group of calls is one operation of its stream, attempted until all its calls are done. A collective posts its
 * source to the rank's slot, and is done when every rank has posted a call of the same number and kind. So what ranks
 * call in another order hangs, and so does a send without its receive, until the communicator is aborted. Calls do not
 * block, as they are asked to.
 *
 * Locks: `lock` of a communicator: held while one of its calls touches memory, so that after an abort nothing does.
 */
#include "internal.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../csrc/base/dtype.h"
#include "../../csrc/comm/nccl/nccl_api.h"

#define NCCL(need, type, name, arguments) type name arguments;
#include "../../csrc/comm/nccl/nccl_api.def"
#undef NCCL

enum { SLOTS = 32, HEADER_BYTES = 4096, UNHANDLED_CUDA = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, VERSION = 22809 };
enum what { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECV };

struct call_kind { /* what has to be equal on all ranks */
    int what, dtype, op, root;
    size_t elems;
};

struct slot {
    _Atomic uint64_t posted, taken; /* calls that were posted here; readings of them */
    struct call_kind kind;
    unsigned char data[] __attribute__((aligned(64)));
};

struct shared {
    _Atomic int ranks, joined;
};

struct call {
    struct call *next;
    struct call_kind kind;
    const void *src;
    void *dst;
    int peer;
    ncclComm_t comm;
    uint64_t number; /* of this rank's collectives, or of the transfers of this pair and direction; from 0 */
    bool posted, done;
};

struct ncclComm {
    pthread_mutex_t lock;
    _Atomic int references; /* the caller's, and one a call */
    struct shared *shared;
    size_t shared_bytes, slot_bytes;
    int rank, ranks;
    bool aborted, finalized;
    uint64_t collectives, *sent, *received;
};

static __thread int grouping;
static __thread struct call *group_first, **group_last;
static __thread sim_stream group_stream;

/* --- the shared file ---------------------------------------------------------------------------------------------- */

static size_t stride_of(const struct ncclComm *comm) { return sizeof(struct slot) + comm->slot_bytes; }

static struct slot *slot_at(const struct ncclComm *comm, size_t index) {
    return (struct slot *)((char *)comm->shared + HEADER_BYTES + index * stride_of(comm));
}

static struct slot *collective_slot(const struct ncclComm *comm, uint64_t number, int rank) {
    return slot_at(comm, (number % SLOTS) * (size_t)comm->ranks + (size_t)rank);
}

static struct slot *transfer_slot(const struct ncclComm *comm, int from, int to) {
    const size_t ranks = (size_t)comm->ranks;
    return slot_at(comm, SLOTS * ranks + (size_t)from * ranks + (size_t)to);
}

/* --- arithmetic --------------------------------------------------------------------------------------------------- */

static size_t bytes_of(int dtype) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return dtype >= 0 && dtype < 10 ? bytes[dtype] : 0;
}

static double load(const void *at, size_t i, int dtype) {
    switch (dtype) {
        case ZPP_NCCL_INT8:
            return ((const int8_t *)at)[i];
        case ZPP_NCCL_UINT8:
            return ((const uint8_t *)at)[i];
        case ZPP_NCCL_INT32:
            return ((const int32_t *)at)[i];
        case ZPP_NCCL_INT64:
            return (double)((const int64_t *)at)[i];
        case ZPP_NCCL_FLOAT16:
            return (double)zpp_f16_to_f32(((const uint16_t *)at)[i]);
        case ZPP_NCCL_FLOAT32:
            return (double)((const float *)at)[i];
        case ZPP_NCCL_FLOAT64:
            return ((const double *)at)[i];
        case ZPP_NCCL_BFLOAT16:
            return (double)zpp_bf16_to_f32(((const uint16_t *)at)[i]);
        default:
            sim_fatal("a reduction of NCCL's type %d", dtype);
    }
}

static void store(void *at, size_t i, int dtype, double value) {
    switch (dtype) {
        case ZPP_NCCL_INT8:
            ((int8_t *)at)[i] = (int8_t)value;
            break;
        case ZPP_NCCL_UINT8:
            ((uint8_t *)at)[i] = (uint8_t)value;
            break;
        case ZPP_NCCL_INT32:
            ((int32_t *)at)[i] = (int32_t)value;
            break;
        case ZPP_NCCL_INT64:
            ((int64_t *)at)[i] = (int64_t)value;
            break;
        case ZPP_NCCL_FLOAT16:
            ((uint16_t *)at)[i] = zpp_f16_from_f32((float)value);
            break;
        case ZPP_NCCL_FLOAT32:
            ((float *)at)[i] = (float)value;
            break;
        case ZPP_NCCL_FLOAT64:
            ((double *)at)[i] = value;
            break;
        case ZPP_NCCL_BFLOAT16:
            ((uint16_t *)at)[i] = zpp_bf16_from_f32((float)value);
            break;
        default:
            sim_fatal("a reduction of NCCL's type %d", dtype);
    }
}

static double combine(double a, double b, int op) {
    switch (op) {
        case ZPP_NCCL_PROD:
            return a * b;
        case ZPP_NCCL_MAX:
            return a > b ? a : b;
        case ZPP_NCCL_MIN:
            return a < b ? a : b;
        default:
            return a + b;
    }
}

/* Elements from `begin` of all ranks' sources, combined in the order of ranks. */
static void reduce_into(void *dst, const struct call *call, size_t begin) {
    const struct call_kind *kind = &call->kind;
    const int ranks = call->comm->ranks;
    for (size_t i = 0; i < kind->elems; i++) {
        double value = load(collective_slot(call->comm, call->number, 0)->data, begin + i, kind->dtype);
        for (int r = 1; r < ranks; r++) {
            const struct slot *slot = collective_slot(call->comm, call->number, r);
            value = combine(value, load(slot->data, begin + i, kind->dtype), kind->op);
        }
        store(dst, i, kind->dtype, kind->op == ZPP_NCCL_AVG ? value / ranks : value);
    }
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

static size_t source_bytes(const struct call *call) {
    const size_t bytes = call->kind.elems * bytes_of(call->kind.dtype);
    return call->kind.what == REDUCE_SCATTER ? bytes * (size_t)call->comm->ranks : bytes;
}

/* `uses`: how often the slot was used before; `readers`: how many have to have read each time. */
static bool post(struct call *call, struct slot *slot, uint64_t uses, uint64_t readers) {
    if (call->posted) return true;
    if (slot->taken != uses * readers) return false;
    const bool sends = call->kind.what != BROADCAST || call->kind.root == call->comm->rank;
    slot->kind = call->kind;
    if (sends) memcpy(slot->data, call->src, source_bytes(call));
    atomic_store(&slot->posted, call->number + 1);
    return call->posted = true;
}

static bool all_posted(const struct call *call) {
    for (int r = 0; r < call->comm->ranks; r++) {
        struct slot *slot = collective_slot(call->comm, call->number, r);
        if (atomic_load(&slot->posted) != call->number + 1) return false;
        if (memcmp(&slot->kind, &call->kind, sizeof call->kind) != 0) return false;
    }
    return true;
}

static void take(const struct call *call) {
    const struct ncclComm *comm = call->comm;
    const size_t bytes = call->kind.elems * bytes_of(call->kind.dtype);
    switch (call->kind.what) {
        case ALL_GATHER:
            for (int r = 0; r < comm->ranks; r++)
                memcpy((char *)call->dst + (size_t)r * bytes, collective_slot(comm, call->number, r)->data, bytes);
            break;
        case BROADCAST:
            memcpy(call->dst, collective_slot(comm, call->number, call->kind.root)->data, bytes);
            break;
        case REDUCE_SCATTER:
            reduce_into(call->dst, call, (size_t)comm->rank * call->kind.elems);
            break;
        case REDUCE:
            if (comm->rank == call->kind.root) reduce_into(call->dst, call, 0);
            break;
        default:
            reduce_into(call->dst, call, 0);
    }
    for (int r = 0; r < comm->ranks; r++) atomic_fetch_add(&collective_slot(comm, call->number, r)->taken, 1);
}

static bool try_collective(struct call *call) {
    const struct ncclComm *comm = call->comm;
    struct slot *own = collective_slot(comm, call->number, comm->rank);
    if (!post(call, own, call->number / SLOTS, (uint64_t)comm->ranks) || !all_posted(call)) return false;
    take(call);
    return true;
}

static bool try_send(struct call *call) {
    struct slot *slot = transfer_slot(call->comm, call->comm->rank, call->peer);
    return post(call, slot, call->number, 1) && atomic_load(&slot->taken) == call->number + 1;
}

static bool try_receive(const struct call *call) {
    struct slot *slot = transfer_slot(call->comm, call->peer, call->comm->rank);
    if (atomic_load(&slot->posted) != call->number + 1 || slot->kind.elems != call->kind.elems) return false;
    memcpy(call->dst, slot->data, source_bytes(call));
    atomic_store(&slot->taken, call->number + 1);
    return true;
}

static bool try_call(struct call *call) {
    ncclComm_t comm = call->comm;
    pthread_mutex_lock(&comm->lock);
    if (comm->aborted) call->done = true;
    else if (sim_faults.stall) call->done = false;
    else if (call->kind.what == SEND) call->done = try_send(call);
    else if (call->kind.what == RECV) call->done = try_receive(call);
    else call->done = try_collective(call);
    pthread_mutex_unlock(&comm->lock);
    return call->done;
}

static void drop(ncclComm_t comm) {
    if (atomic_fetch_sub(&comm->references, 1) > 1) return;
    munmap(comm->shared, comm->shared_bytes);
    pthread_mutex_destroy(&comm->lock);
    free(comm->sent);
    free(comm->received);
    free(comm);
}

static bool try_group(void *arg) {
    bool all = true;
    for (struct call *call = arg; call; call = call->next) all = (call->done || try_call(call)) && all;
    if (!all) return false;
    for (struct call *call = arg, *next; call; call = next) {
        next = call->next;
        drop(call->comm);
        free(call);
    }
    return true;
}

/* --- the life of a communicator ----------------------------------------------------------------------------------- */

struct id { /* the text of ncclUniqueId */
    int process, file;
};

static bool read_id(const ncclUniqueId *id, struct id *out) {
    return sscanf(id->internal, "simulated %d %d", &out->process, &out->file) == 2;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = VERSION;
    return ZPP_NCCL_SUCCESS;
}

const char *ncclGetErrorString(ncclResult_t result) {
    return result == 2 ? "unhandled system error" : "a simulated error";
}

const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "the simulated cable is out";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (sim_faults.refuse_id) return 2;
    const int file = memfd_create("simulated NCCL", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, HEADER_BYTES)) return 2;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "simulated %d %d", getpid(), file);
    return ZPP_NCCL_SUCCESS;
}

static bool map_shared(ncclComm_t comm, const struct id *id) {
    char path[64];
    const size_t ranks = (size_t)comm->ranks, slots = SLOTS * ranks + ranks * ranks;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", id->process, id->file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    comm->shared_bytes = HEADER_BYTES + slots * stride_of(comm);
    if (file < 0 || ftruncate(file, (off_t)comm->shared_bytes)) return false;
    comm->shared = mmap(NULL, comm->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    int none = 0;
    if (comm->shared == MAP_FAILED) return false;
    return atomic_compare_exchange_strong(&comm->shared->ranks, &none, comm->ranks) || none == comm->ranks;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId text, int rank, ncclConfig_t *config) {
    struct id id;
    int device;
    if (config->magic != 0xcafebeef || config->blocking != 0 || config->size_bytes < 24) return INVALID_ARGUMENT;
    if (sim_current_device(&device)) return INVALID_USAGE;
    if (rank < 0 || rank >= ranks || !read_id(&text, &id)) return INVALID_ARGUMENT;
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (!comm) return 2;
    pthread_mutex_init(&comm->lock, NULL);
    comm->references = 1;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->slot_bytes = sim_setting("SIM_NCCL_BYTES", UINT64_C(1) << 25) / 64 * 64;
    comm->sent = calloc((size_t)ranks, sizeof *comm->sent);
    comm->received = calloc((size_t)ranks, sizeof *comm->received);
    if (!comm->sent || !comm->received || !map_shared(comm, &id)) {
        sim_fatal("rank %d cannot join the communicator of process %d", rank, id.process);
    }
    const bool all = atomic_fetch_add(&comm->shared->joined, 1) + 1 == ranks;
    if (all && id.process == getpid()) close(id.file); /* elsewhere it ends with the process that made it */
    SIM_COUNT(comms, 1);
    *out = comm;
    return ZPP_NCCL_IN_PROGRESS;
}

static bool all_joined(ncclComm_t comm) { return atomic_load(&comm->shared->joined) == comm->ranks; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    const bool meets = !all_joined(comm) || sim_faults.stall_init;
    *error = sim_faults.async_error ? sim_faults.async_error : meets ? ZPP_NCCL_IN_PROGRESS : ZPP_NCCL_SUCCESS;
    return ZPP_NCCL_SUCCESS;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    comm->finalized = true;
    return ZPP_NCCL_IN_PROGRESS;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm->finalized) return INVALID_USAGE;
    SIM_COUNT(comms, -1);
    drop(comm);
    return ZPP_NCCL_SUCCESS;
}

/* Its calls end at their next attempt, and touch nothing from now on. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    pthread_mutex_lock(&comm->lock);
    comm->aborted = true;
    pthread_mutex_unlock(&comm->lock);
    SIM_COUNT(comms, -1);
    SIM_COUNT(aborts, 1);
    drop(comm);
    return ZPP_NCCL_SUCCESS;
}

/* --- groups ------------------------------------------------------------------------------------------------------- */

static ncclResult_t launch_group(void) {
    struct call *group = group_first;
    int device;
    group_first = NULL;
    if (!group) return ZPP_NCCL_SUCCESS;
    if (sim_current_device(&device)) return INVALID_USAGE;
    const sim_stream stream = group_stream ? group_stream : sim_default_stream(device);
    if (sim_enqueue_attempt(stream, try_group, group, "a group of NCCL calls")) return UNHANDLED_CUDA;
    return sim_faults.late_launch ? ZPP_NCCL_IN_PROGRESS : ZPP_NCCL_SUCCESS;
}

ncclResult_t ncclGroupStart(void) {
    if (!grouping++) group_last = &group_first;
    return ZPP_NCCL_SUCCESS;
}

ncclResult_t ncclGroupEnd(void) { return --grouping ? ZPP_NCCL_SUCCESS : launch_group(); }

static ncclResult_t add(struct call like, cudaStream_t stream) {
    ncclComm_t comm = like.comm;
    const int peer = like.kind.root > like.peer ? like.kind.root : like.peer;
    if (!bytes_of(like.kind.dtype) || peer >= comm->ranks || like.kind.root < 0 || like.peer < 0)
        return INVALID_ARGUMENT;
    if (like.kind.op < 0 || like.kind.op > ZPP_NCCL_AVG) return INVALID_ARGUMENT;
    if (!all_joined(comm)) return INVALID_USAGE;
    if (source_bytes(&like) > comm->slot_bytes) {
        sim_fatal("a call of NCCL with %zu bytes; SIM_NCCL_BYTES is %zu", source_bytes(&like), comm->slot_bytes);
    }
    struct call *call = malloc(sizeof *call);
    if (!call) sim_fatal("no memory for a call of NCCL");
    *call = like;
    uint64_t *numbers = like.kind.what == SEND   ? &comm->sent[like.peer]
                        : like.kind.what == RECV ? &comm->received[like.peer]
                                                 : &comm->collectives;
    call->number = (*numbers)++;
    atomic_fetch_add(&comm->references, 1);
    ncclGroupStart();
    *group_last = call;
    group_last = &call->next;
    group_stream = stream;
    return ncclGroupEnd();
}

static ncclResult_t collective(enum what what, const void *src, void *dst, size_t elems, int dtype, int op, int root,
                               ncclComm_t comm, cudaStream_t stream) {
    struct call call;
    memset(&call, 0, sizeof call); /* kinds are compared with their padding */
    call.kind.what = (int)what;
    call.kind.dtype = dtype;
    call.kind.op = op;
    call.kind.root = root;
    call.kind.elems = elems;
    call.src = src;
    call.dst = dst;
    call.comm = comm;
    return add(call, stream);
}

static ncclResult_t transfer(enum what what, const void *src, void *dst, size_t elems, int dtype, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
    const struct call call = {.kind = {.what = (int)what, .dtype = dtype, .elems = elems},
                              .src = src,
                              .dst = dst,
                              .peer = peer,
                              .comm = comm};
    return add(call, stream);
}

ncclResult_t ncclAllReduce(const void *src, void *dst, size_t elems, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return collective(ALL_REDUCE, src, dst, elems, dtype, op, 0, comm, stream);
}

ncclResult_t ncclReduce(const void *src, void *dst, size_t elems, ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return collective(REDUCE, src, dst, elems, dtype, op, root, comm, stream);
}

ncclResult_t ncclBroadcast(const void *src, void *dst, size_t elems, ncclDataType_t dtype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective(BROADCAST, src, dst, elems, dtype, 0, root, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *src, void *dst, size_t dst_elems, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return collective(REDUCE_SCATTER, src, dst, dst_elems, dtype, op, 0, comm, stream);
}

ncclResult_t ncclAllGather(const void *src, void *dst, size_t src_elems, ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective(ALL_GATHER, src, dst, src_elems, dtype, 0, 0, comm, stream);
}

ncclResult_t ncclSend(const void *src, size_t elems, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return transfer(SEND, src, NULL, elems, dtype, peer, comm, stream);
}

ncclResult_t ncclRecv(void *dst, size_t elems, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
    return transfer(RECV, NULL, dst, elems, dtype, peer, comm, stream);
}
