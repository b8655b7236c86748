/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator's own state, shared by the sources of csrc/zero, and by no other folder.
 */
#ifndef ZPP_ZERO_INTERNAL_H
#define ZPP_ZERO_INTERNAL_H

#include <pthread.h>

#include "../base/mem.h"
#include "../base/timeline.h"
#include "../comm/nccl/nccl.h"
#include "../ops/quant/quant.h"
#include "offload/unit_file.h"
#include "reduce.h"
#include "zero.h"

/* --- the recorded order (gather.c) -------------------------------------------------------------------------------- */
/* One phase: `before` is what we follow, `now` is being recorded. The same unit twice in a row counts once. */
struct zpp_sequence {
    int *before, *now; /* unit indices */
    size_t before_count, now_count;
    size_t cursor;     /* what is needed next is before[cursor] */
};

struct zpp_trace {
    struct zpp_sequence phases[ZPP_PHASES];
    size_t capacity; /* of each array; what comes after it in a pass is not recorded */
};

/* --- exchanges (exchange.c) --------------------------------------------------------------------------------------- */
/* The kinds of descriptors on the ring. */
enum { ZPP_DESC_REDUCE = 1, ZPP_DESC_COPY, ZPP_DESC_NORM, ZPP_DESC_STEP, ZPP_DESC_BUFFERS, ZPP_DESC_AGREE };

/* The exchange under way; one at a time. Its bytes are its own, because a caller that is interrupted does not wait. */
struct zpp_exchange {
    zpp_zero *zero;
    size_t board_offset_bytes; /* my place in the gradients' region, read by the peers */
    size_t board_bytes;        /* its capacity */
    unsigned char *all;        /* [ranks * bytes] */
    uint64_t kind, pass, seq;
    size_t bytes;
    bool posted;
    zpp_event *done;
};

/* The model's buffers. */
struct zpp_buffers_board {
    zpp_zero *zero;
    zpp_region *region;    /* one host */
    unsigned char *memory; /* several hosts, or nothing is reduced; else NULL */
    size_t bytes;
    uint64_t count, seq;   /* of messages; the last descriptor of mine */
    bool posted;
    zpp_event *done;
};

/* --- quantised copies and narrow gradients (wire.c) --------------------------------------------------------------- */
struct zpp_wire {
    struct zpp_quant_spec params, grads; /* bits 0: exact */
    zpp_region *qcopies;                  /* PER_RANK: of my shards of sharded units */
    size_t qcopies_bytes, scratch_bytes, arrival_bytes;
    unsigned char *scratch; /* the quantised copy of one shard of a bucket */
    void *arrival;          /* on the device: a quantised copy that came from the host (placement/offloaded.c) */
};

/* --- gradients in a file (offload/grad_file.c) -------------------------------------------------------------------- */
/* Part of the coordinator, for the store nvme (grad_store.h); `unit_file` NULL: shards are in memory. */
struct zpp_grad_file {
    zpp_unit_file *unit_file;
    pthread_mutex_t lock; /* guards open_bytes, and what comes to memory or goes: reductions open, steps drop */
    size_t open_bytes, bound_bytes;
    bool keeps; /* this backward: what is reduced stays until it is dropped */
    struct zpp_unit_grad *oldest, **newest; /* being written */
    zpp_status status;                      /* the first failure */
    struct zpp_err err;
    struct zpp_aio_fault fault;
};

enum zpp_grad_file_state { ZPP_GRAD_FILE_ON_DISK, ZPP_GRAD_FILE_READING, ZPP_GRAD_FILE_LOADED, ZPP_GRAD_FILE_WRITING };

/* --- an accelerator beside the host (pinned.c, grad_offload.c) -----------------------------------------------------
 */
struct zpp_pinned_memory {
    void *memory;
    size_t owned_bytes; /* 0: it is borrowed, and not freed here */
};
struct zpp_pinned {
    struct zpp_pinned_memory *all; /* page-locked for the device, until destroy */
    size_t count, capacity, bytes;
};

/* Page-locked memory through which units go up to the accelerator: from a file (placement/nvme_up.c), or from other
 * hosts (placement/offloaded_net.c). */
enum { ZPP_STAGINGS = 2 };
struct zpp_staging {
    unsigned char *memory[ZPP_STAGINGS];
    zpp_event *copied[ZPP_STAGINGS]; /* the last copy from it is over */
    size_t bytes;                    /* of each: the largest unit */
    int next;
};

struct zpp_grad_block;
struct zpp_grad_blocks {
    struct zpp_grad_block **all;
    size_t count, capacity, bytes;
    zpp_stream *down; /* copies to the host */
};

/* --- NCCL between accelerators (by_nccl.c) ------------------------------------------------------------------------ */
struct zpp_by_nccl {
    zpp_nccl *nccl;             /* NULL: ranks copy, or there is one */
    uint64_t *halt;             /* of kernels behind calls that failed; a pinned page */
    struct zpp_err no_map;      /* why peers cannot map each other's memory; OK: that was not the reason */
    unsigned char *received;    /* every rank's shard of one bucket, as they came */
    const unsigned char *zeros; /* what a rank without a gradient sends: one shard */
};

/* --- the coordinator ---------------------------------------------------------------------------------------------- */
struct zpp_zero {
    struct zpp_zero_options options;
    int rank, ranks; /* of the data ranks */
    struct zpp_group **groups; /* the first one: all data ranks */
    int groups_count;
    size_t groups_capacity;
    bool sealed;

    struct zpp_unit **units;
    int units_count;
    size_t units_capacity;

    /* memory: made at seal, by the placements */
    const struct zpp_placement *placement; /* of the units that move */
    zpp_region *params;   /* PER_RANK: shards of sharded units, replicated units */
    zpp_region *host;     /* ONE: host_shared units */
    zpp_region *grads;    /* PER_RANK: buckets, an arena and then the mappings */
    unsigned char *alone; /* one rank: replicated units, private memory */
    size_t params_bytes, host_bytes, alone_bytes, range_bytes;
    struct zpp_unit **moving, **by_address; /* in the order in which they are gathered; the same, by address */
    int moving_count;
    zpp_range *range;           /* gathered units on cpu, at addresses that never change */
    zpp_unit_file *unit_file;   /* parameters in a file; NULL without any */
    unsigned char *moving_base; /* addresses of units that move: of `range`, the mapping of `unit_file`, or `wrap` */
    struct zpp_wrap *wrap;      /* whole units that move, on an accelerator (placement/wrapped.c) */
    unsigned char *resident;    /* whole units that stay, there */
    size_t resident_bytes;
    struct zpp_pinned pinned;
    struct zpp_staging staging;

    zpp_comm *intranode; /* hpZ: the ranks of this host; NULL without */
    unsigned char *secondary;
    size_t secondary_bytes;

    /* gathering */
    zpp_stream *compute, *gather;
    zpp_event *settled; /* this rank's copies that read shards are over */
    zpp_stream *arrive; /* nvme units: their reads end here, in order; `gather` begins them. offloaded_net: copies up */
    struct zpp_aio_fault fault; /* of the last read that failed */
    struct zpp_trace trace;
    size_t full_bytes, full_peak_bytes, ahead_bytes; /* see unit.c */
    size_t largest_bytes; /* of the units that move and that one module has */
    bool used_again;      /* since the last backward, such a unit was used more than once, or nested (evict.c) */
    uint64_t reads;       /* of units in backwards, while that is so */
    int kept_units;
    bool is_masked;
    bool forward_read; /* of the units in a file that this pass needs forward, each was read or is being read */
    uint64_t gather_ns; /* what needed a unit waited for it so long */

    /* gradients */
    zpp_stream *reduce;
    zpp_event *acked; /* the last wait for peers to have read a bucket */
    struct zpp_wire wire;
    zpp_desc_ring *ring, *copy_ring; /* copy_ring: stage 0 */
    struct zpp_exchange exchange;
    struct zpp_buffers_board board;
    struct zpp_buckets buckets;
    struct zpp_unit_grad *out_first, **out_last; /* buckets that went out and were not given back, oldest first */
    int *order;        /* trainable units, as they are reduced */
    int order_count, order_at;
    uint64_t pass;     /* reducing backwards so far */
    bool in_backward, reduces;
    bool pass_is_open, pass_reduces, reduces_graphs; /* see pass.c */
    bool unsettled;       /* all that is reduced went out, and was not waited for */
    _Atomic bool defers;  /* sums wait until this thread waits: for a message (zpp_zero_drive), or for reductions */
    _Atomic bool may_sum; /* ... which it does now, so one of them may run */
    bool shares_backward; /* another coordinator may be in this backward: see zpp_bucket_take */
    bool over_bound;      /* ... and a bucket was waited for in vain: this backward goes beyond bucket_bytes */
    uint32_t number;      /* of the coordinators on this communicator, in their order */
    bool stepping; /* between step_begin and step_end */
    uint64_t backward_ns, step_ns; /* when they began, for zeropp.trace */
    double grad_scale;
    const struct zpp_grad_store *store; /* where reduced gradients live */
    const struct zpp_grad_path *path;   /* how gradients come to their buckets */
    struct zpp_on_device *on_device;    /* NULL: shards are on the host */
    struct zpp_by_nccl by_nccl;
    struct zpp_grad_blocks blocks;
    unsigned char *grads_alone; /* one rank beside an accelerator: buckets, private memory */
    size_t grads_alone_bytes;
    bool delays_steps; /* files have two places for what a step touches (step_delayed.h) */
    pthread_mutex_t grad_pool_lock; /* guards `grad_pool` and shard_bytes: reductions borrow, steps give back */
    struct zpp_pooled_grad grad_pool[ZPP_POOLED_GRADS];
    size_t shard_bytes, carry_bytes, kept_bucket_bytes, back_bytes;
    struct zpp_grad_file grad_file; /* of the store nvme */
};

/* The CPU: what ranks tell each other by memory lies there, and what goes to files. */
static inline zpp_device *zpp_zero_host(const zpp_zero *zero) {
    return zero->options.host ? zero->options.host : zero->options.device;
}

/* The device of shards: of parameters, of gradients, and of the optimizer's states. */
static inline zpp_device *zpp_zero_shards_device(const zpp_zero *zero) {
    return zero->options.shards == ZPP_SHARDS_ON_DEVICE ? zero->options.device : zpp_zero_host(zero);
}

/* Rank `rank`'s part of the shards of parameters, and of the buckets; without peers it is private memory. */
static inline unsigned char *zpp_params_of_rank(const zpp_zero *zero, int rank) {
    return zero->params ? zpp_region_base(zero->params, rank) : zero->alone;
}
static inline unsigned char *zpp_grads_of_rank(const zpp_zero *zero, int rank) {
    return zero->grads ? zpp_region_base(zero->grads, rank) : zero->grads_alone;
}

/* Shard `shard` of a unit in the region of the parameters: it is that member's of the unit's group. */
static inline unsigned char *zpp_params_of_member(const zpp_zero *zero, const struct zpp_unit *unit, int shard) {
    return zpp_params_of_rank(zero, unit->group->members[shard]) + unit->region_offset_bytes;
}

/* One rank whose shards are where it computes: gradients are not reduced. */
static inline bool zpp_zero_keeps_local_grads(const zpp_zero *zero) {
    return zero->ranks == 1 && zpp_zero_shards_device(zero) == zero->options.device;
}

/* Stages 0 and 1: the reduced gradient is a part of the bucket. */
static inline bool zpp_keeps_buckets(const zpp_zero *zero) { return zero->options.stage <= 1; }

/* True if some units stay in memory where others have parts in files. */
bool zpp_zero_holds(const zpp_zero *zero);

/* True if the job has more ranks than those that partition the units. */
static inline bool zpp_zero_has_job(const zpp_zero *zero) {
    return zero->options.job && zero->options.job != zero->options.comm;
}

/* True if a reduction adds to the shard. Stage 1: this rank's bucket was not refilled, so its shard still is the
 * gradient so far; else the carry has it. */
static inline bool zpp_reduce_accumulates(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return grad->has && (zero->options.stage >= 2 || (zero->options.stage == 1 && grad->empty));
}

/* Return the factor of a sum of the unit's gradients, divided by `divisor`. */
static inline double zpp_grad_factor(const zpp_zero *zero, const struct zpp_unit *unit, double divisor) {
    if (unit->grad_dtype == ZPP_F64) return zero->grad_scale / divisor;
    return (double)((float)zero->grad_scale / (float)divisor);
}

/* --- parts of seal and destroy ------------------------------------------------------------------------------------ */
zpp_status zpp_trace_init(struct zpp_trace *trace, int units, struct zpp_err *err);
void zpp_trace_fini(struct zpp_trace *trace);
/* For zpp_zero_find: after addresses of moving units were set or changed. */
void zpp_zero_sort_by_address(zpp_zero *zero);
zpp_status zpp_exchange_init(zpp_zero *zero, size_t board_offset_bytes, size_t board_bytes, struct zpp_err *err);
void zpp_exchange_fini(zpp_zero *zero);
void zpp_buffers_fini(zpp_zero *zero);
/* Describe a descriptor, for messages; `ctx` is the zpp_zero. */
void zpp_exchange_describe(void *ctx, const struct zpp_desc *desc, char *text, size_t capacity);

/* --- pinned.c ----------------------------------------------------------------------------------------------------- */
/* Page-lock host memory for the accelerator until destroy; nothing to do on the CPU. */
zpp_status zpp_pin(zpp_zero *zero, void *memory, size_t bytes, struct zpp_err *err);
void zpp_unpin_all(zpp_zero *zero);
/* Stagings of `bytes` each, page-locked; 0: none. Free them after zpp_unpin_all. */
zpp_status zpp_staging_make(zpp_zero *zero, size_t bytes, struct zpp_err *err);
void zpp_staging_free(zpp_zero *zero);

/* --- wire.c ------------------------------------------------------------------------------------------------------- */
zpp_status zpp_wire_seal(zpp_zero *zero, struct zpp_err *err);
void zpp_wire_fini(zpp_zero *zero);

/* True if gathers of sharded units are to read quantised copies. */
bool zpp_wire_quantises_params(const zpp_zero *zero);
/* Return an error where the unit's elements cannot be quantised. */
zpp_status zpp_wire_check_unit(const struct zpp_unit *unit, struct zpp_err *err);
/* Part of seal: a place for the quantised copy of this rank's shard, which peers read. make_qcopy fills it, after the
 * shard was written. */
zpp_status zpp_wire_add_qcopy(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
void zpp_wire_make_qcopy(zpp_zero *zero, const struct zpp_unit *unit);
/* Return its bytes, and where a rank has it. */
size_t zpp_wire_param_qcopy_bytes(const zpp_zero *zero, const struct zpp_unit *unit);
unsigned char *zpp_wire_qcopy_of(const zpp_zero *zero, const struct zpp_unit *unit, int rank);
/* memory[elems] = the values of every rank's quantised copy of the unit. */
void zpp_wire_gather(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *memory);

/* True if gradients are to travel as quantised copies. */
bool zpp_wire_quantises_grads(const zpp_zero *zero);
/* Between parameters lies what the memory held before, which must not widen the scale of a block. Return what of
 * elements [begin, end) of the unit lies before parameter `index`; index `params`: behind the last one. */
struct zpp_gap {
    size_t from, to; /* elements of the unit; equal: none */
};
struct zpp_gap zpp_wire_gap(const struct zpp_unit *unit, size_t index, size_t begin, size_t end);
/* Zeros there, in a whole bucket or in this rank's shard of the parameters. */
void zpp_wire_clear_gaps(const struct zpp_unit *unit, unsigned char *bucket);
void zpp_wire_clear_shard(const struct zpp_unit *unit);
/* Every shard of the unit's bucket becomes its quantised copy, at the front of the shard's place. */
void zpp_wire_quantise_bucket(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *bucket);
/* True if the unit's gradients travel in fewer bits than they add in, and not as quantised copies. */
static inline bool zpp_wire_narrows(const struct zpp_unit *unit) {
    return unit->wire_dtype != unit->grad_dtype;
}
/* Return the bytes of one shard as it travels then. */
static inline size_t zpp_wire_shard_bytes(const struct zpp_unit *unit) {
    return unit->shard_elems * zpp_dtype_bytes(unit->wire_dtype);
}
/* Every shard of the unit's bucket becomes its elements of wire_dtype, at the front of the shard's place. */
void zpp_wire_narrow(const zpp_zero *zero, const struct zpp_unit *unit, unsigned char *bucket);
/* A copy of such a shard, until the next call. */
const void *zpp_wire_aside(zpp_zero *zero, const struct zpp_unit *unit, const void *shard);
/* Return the bytes of the quantised copy of one shard. */
size_t zpp_wire_qcopy_bytes(const zpp_zero *zero, const struct zpp_unit *unit);
/* to = (sum of the quantised copies) * factor, or to += that; `elems` of dtype. */
void zpp_wire_add(zpp_zero *zero, const void *const *qcopies, int count, float factor, void *to, zpp_dtype dtype,
                  bool accumulate, size_t elems);

/* --- wire_device.c ------------------------------------------------------------------------------------------------ */
/* On the compute stream: zeros between the parameters of this rank's shard, as its quantised copy wants them; and that
 * copy. */
zpp_status zpp_wire_device_clear_shard(zpp_zero *zero, const struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_wire_device_make_qcopy(zpp_zero *zero, const struct zpp_unit *unit, void *qcopy, struct zpp_err *err);
/* On the gather stream: to[shard_elems] = the values of a quantised copy, of any rank. */
zpp_status zpp_wire_device_read_qcopy(zpp_zero *zero, const struct zpp_unit *unit, const void *qcopy, void *to,
                                      struct zpp_err *err);
struct zpp_sum_op;
/* Return the bytes of the area behind a bucket, and of each rank's shard there; 0: gradients travel as they add. */
size_t zpp_wire_device_bytes(const zpp_zero *zero, const struct zpp_unit *unit);
size_t zpp_wire_device_stride(const zpp_zero *zero, const struct zpp_unit *unit);
/* Fill the area from the unit's gradients, on the compute stream. */
zpp_status zpp_wire_device_pack(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *grads, unsigned char *area,
                                struct zpp_err *err);
/* Launch a sum of shards in areas; it sets sum->dtype. */
zpp_status zpp_wire_device_sum(zpp_zero *zero, const struct zpp_unit *unit, struct zpp_sum_op *sum,
                               struct zpp_err *err);

/* --- by_nccl.c ---------------------------------------------------------------------------------------------------- */
/* True if NCCL moves what accelerators exchange: then ranks compare what they do by collectives, as over hosts. */
static inline bool zpp_zero_by_nccl(const zpp_zero *zero) { return zero->by_nccl.nccl; }
/* In order on `stream`: dst[ranks * bytes] = src of every rank of the group, which may be its place in dst. All of them
 * enqueue it at the same place of the program. `object`: what it is, for messages and the comparison of ranks. */
zpp_status zpp_by_nccl_all_gather(const struct zpp_group *group, zpp_stream *stream, uint32_t object, void *dst,
                                  const void *src, size_t bytes, struct zpp_err *err);

/* --- internode.c -------------------------------------------------------------------------------------------------- */
static inline bool zpp_internode(const zpp_comm *comm) { return comm && zpp_comm_hosts(comm) > 1; }

/* The number of the unit in its collectives: two models of one shape have two. */
uint32_t zpp_internode_object(const zpp_zero *zero, const struct zpp_unit *unit);
/* What the communicator's thread does before a gather begins and after it ended (comm.h), with the unit; NULL: nothing.
 * And where the unit comes; NULL: to its memory. */
struct zpp_internode_sides {
    zpp_status (*before)(void *unit, const struct zpp_wait *wait, struct zpp_err *err);
    zpp_status (*after)(void *unit, struct zpp_err *err);
    void *to;
};
/* Submit as unit->gather_work: the unit's shards, quantised on the way where unit->quantised. */
zpp_status zpp_internode_gather(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_internode_sides *sides,
                                struct zpp_err *err);
/* placement.h's wait, for that gather. */
zpp_status zpp_internode_gather_wait(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                     struct zpp_err *err);
/* The exact shards into the unit's memory; returns when they are there. */
zpp_status zpp_internode_gather_now(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                    struct zpp_err *err);
/* End what is under way, whatever its state, because what it reads and writes is about to go. */
void zpp_internode_drop(zpp_comm *comm, zpp_work **work);
/* AGAIN (`wait` NULL) while it runs; then its status, and *work is freed and NULL. NULL is fine. */
zpp_status zpp_internode_await(zpp_work **work, const struct zpp_wait *wait, struct zpp_err *err);
/* Begin the maximum over the unit's ranks of `count` flags, the first bytes of grad->internode_memory. */
zpp_status zpp_internode_submit_flags(zpp_zero *zero, struct zpp_unit_grad *grad, size_t count, struct zpp_err *err);
/* Note which parameters have a gradient on any rank, of grad->internode_memory. Return false if none has. */
bool zpp_internode_merge_present(struct zpp_unit_grad *grad);
/* A few bytes of every rank, with what they are for. */
zpp_status zpp_internode_exchange(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                                  const struct zpp_wait *wait, struct zpp_err *err);

#endif
