/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients to shards. Each unit's gradients collect in a bucket that the peers can read; a complete bucket goes out in
 * one fixed order of units, the same on every rank, whatever became ready first, and never blocks the backward thread.
 * Rank r adds shard r of all ranks' buckets, in rank order, in place: one read per byte.
 *
 * A bucket:   | gradient, elems of grad_dtype | touched, one byte a parameter |     (untouched parameters are zeros)
 * What travels in fewer bits (wire_dtype, or wire.c's quantised copies) is made of it in place, shard by shard.
 *
 * stages 2, 3   the shard is memory of its own, or in a file (grad_file.c); the bucket is given back once every
 *               peer has read it
 * stage 1       the bucket stays, and its own shard is the reduced one (4 + 12/N bytes a parameter need that)
 * stage 0       as stage 1, then every rank copies the other reduced shards from where they were made (all-reduce)
 */
#ifndef ZPP_ZERO_REDUCE_H
#define ZPP_ZERO_REDUCE_H

#include "zero.h"

/* --- places of buckets (bucket.c) --------------------------------------------------------------------------------- */
/* Where buckets lie inside this rank's part of the gradient region: first fit from the front, so that few pages are
 * ever touched. Where fragmentation leaves no place, the caller falls back to one of the unit's own behind it. */
struct zpp_bucket_span { size_t offset_bytes, bytes; };
struct zpp_buckets {
    struct zpp_bucket_span *used; /* sorted by offset; capacity for one per unit */
    size_t count, spans_capacity;
    size_t capacity_bytes, used_bytes, peak_bytes;
    size_t touched_bytes; /* from the front on: memory that was written to, and stays */
};

bool zpp_buckets_init(struct zpp_buckets *buckets, size_t units, size_t capacity_bytes);
void zpp_buckets_fini(struct zpp_buckets *buckets);
enum { ZPP_BUCKET_ALIGN_BYTES = 64 };
#define ZPP_BUCKET_NONE SIZE_MAX

struct zpp_unit_grad {
    size_t elem_bytes; /* of the bucket and of `shard`, both of unit->grad_dtype */
    size_t bucket_bytes;
    size_t area_offset_bytes; /* in the bucket: what peers read in place of the gradients; 0: nothing */
    size_t mapping_offset_bytes; /* a place of its own behind the arena */

    /* this backward */
    uint8_t *seen; /* [params] */
    size_t missing;
    int uses;
    bool partial;
    enum zpp_grad_state state; /* written by unit.c */

    /* the bucket */
    struct zpp_grad_block *block; /* where gradients collect before they go to it (grad_offload.c); NULL: nowhere */
    size_t bucket_offset_bytes; /* ZPP_BUCKET_NONE: none */
    bool at_mapping;
    bool listed; /* in the coordinator's list of buckets that are out */
    struct zpp_unit_grad *next_out;
    bool empty; /* goes out without a bucket: no gradient on this rank */
    size_t touched_params;

    /* the reduction under way: written before the launch, then by the operation until `done` */
    struct zpp_unit *unit;
    zpp_zero *zero;
    int round; /* see reduce_shm.c */
    uint64_t seq, copy_seq;
    uint64_t pass;
    uint64_t *peer_offsets; /* [ranks] */
    zpp_event *written, *done;
    /* on a device (reduce_device.c) */
    uint64_t number;           /* of the reduction that went out last */
    size_t flags_offset_bytes; /* in the host's region `zero->grads` */
    void *own;                 /* a bucket outside of the arena; NULL until the arena was full once */
    /* over several hosts (internode.c) */
    zpp_work *internode_flags, *internode_sum;
    unsigned char *internode_memory;

    /* the result */
    unsigned char *shard;
    unsigned char *back_shard; /* the back buffer, which a delayed step reads (step_delayed.h); in a file: */
    int back_file_index;       /* its number there */
    size_t back_offset_bytes;
    unsigned char
        *carry; /* stage 1: the shard from before, while a second backward of the same step refills the bucket */
    bool carries;
    uint8_t *present;     /* [params] */
    bool has;
    bool dropped;         /* it had one since the last step, which a step inside the backward has dropped */
    uint64_t origins;     /* ranks whose gradients were not finite (origin.c) */
    /* where it lives in a file (grad_file.c) */
    int file_index;            /* its number there */
    size_t unit_file_offset_bytes;
    int order_at;         /* its place in the order of reductions */
    int grad_file_state;      /* enum zpp_grad_file_state */
    bool changed;         /* since it was read */
    bool lost;            /* by a read or write that failed before its reduction ended */
    uint8_t *stale;       /* [params]: the file has a gradient that was forgotten */
    bool any_stale;
    struct zpp_unit_grad *next_written;
};

/* Return the bytes of a unit's gradients: of all of them, or of one shard. */
static inline size_t zpp_grad_whole_bytes(const struct zpp_unit_grad *grad) {
    return grad->unit->elems * grad->elem_bytes;
}
static inline size_t zpp_grad_shard_bytes(const struct zpp_unit_grad *grad) {
    return grad->unit->shard_elems * grad->elem_bytes;
}

/* Of a unit on the board of exchange.c: struct zpp_shard_norm (step_plan.h). */
enum { ZPP_NORM_BYTES = 32 };

/* Part of create, seal and destroy. */
zpp_status zpp_reduce_add_unit(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_reduce_seal(zpp_zero *zero, struct zpp_err *err);
/* True if a reduction or an exchange is under way that has not ended. */
bool zpp_reduce_pending(const zpp_zero *zero);
void zpp_reduce_drop_unit(zpp_zero *zero, struct zpp_unit *unit);
/* How many units of the order of reductions went out. */
int zpp_reduce_sent(const zpp_zero *zero);
/* True if one gradient lets one unit go out at most. With NCCL and steps inside the backward a sum is enqueued, and has
 * memory, when its unit goes out: at the same place of the program on all ranks. Steps give the memory back. */
bool zpp_reduce_sends_singly(const zpp_zero *zero);
/* The backward is over: of the order of reductions so many units go out now, as far as they did not yet. */
zpp_status zpp_reduce_send_until(zpp_zero *zero, int count, const struct zpp_wait *wait, struct zpp_err *err);
/* The backward is over: what did not go out does so now. zpp_zero_settle waits for it. */
zpp_status zpp_reduce_send_rest(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err);

enum { ZPP_POOLED_GRADS = 2 }; /* see grad_memory.c */
struct zpp_pooled_grad {
    void *memory; /* NULL: none */
    size_t bytes;
};

/* internode.c: a unit's bucket goes out over several hosts, and the operation that ends it: the sum is in the shard.
 * `arg` points at a struct zpp_unit_grad pointer. */
zpp_status zpp_reduce_net_launch(zpp_zero *zero, struct zpp_unit_grad *grad, const uint8_t *touched,
                                 unsigned char *bucket, struct zpp_err *err);
zpp_status zpp_reduce_net_finish(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err);

/* A round of a reduction. OK: it is over; AGAIN and errors leave the reduction in it. */
typedef zpp_status (*zpp_reduce_round)(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                                       struct zpp_err *err);
/* Go on in round grad->round of `all`, which NULL ends. */
zpp_status zpp_reduce_run_rounds(const zpp_reduce_round *all, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                                 struct zpp_err *err);
/* reduce_shm.c: the reduction on one host, as one operation on the reduce stream. */
zpp_status zpp_reduce_shm(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err);
/* Parts of it: this rank's descriptor, and every rank's, of which peer_offsets are kept. */
#define ZPP_NO_BUCKET UINT64_MAX
struct zpp_desc zpp_reduce_desc(const struct zpp_unit_grad *grad, uint64_t kind);
zpp_status zpp_reduce_read_peers(zpp_zero *zero, struct zpp_unit_grad *grad, zpp_desc_ring *ring, uint64_t kind,
                                 uint64_t seq, const struct zpp_wait *wait, struct zpp_err *err);
void zpp_reduce_count_traffic(const zpp_zero *zero, const struct zpp_unit_grad *grad);

/* --- buckets of units (bucket.c) ---------------------------------------------------------------------------------- */
/* The unit's bucket (stage 0: what p.grad is a view of); NULL without one. Behind the gradient, one byte a parameter:
 * has this rank a gradient of it? */
unsigned char *zpp_bucket_of(const zpp_zero *zero, const struct zpp_unit *unit);
uint8_t *zpp_bucket_flags(const zpp_zero *zero, const struct zpp_unit *unit);
/* A bucket for the gradients of this backward, after the peers have read the one before. AGAIN: `wait` is NULL, and
 * bucket_bytes are in use. */
zpp_status zpp_bucket_take(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err);
void zpp_bucket_give(zpp_zero *zero, struct zpp_unit_grad *grad);
/* What is launched on the compute stream from now on runs after all that read the unit's bucket. AGAIN: `wait` is NULL,
 * and a host has not enqueued it yet. */
zpp_status zpp_bucket_wait_idle(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                                struct zpp_err *err);
/* It goes out: it is given back by a later sweep. */
void zpp_bucket_list(zpp_zero *zero, struct zpp_unit_grad *grad);
/* Give back the buckets whose reduction is over on all ranks. Returns the oldest that is still read, or NULL. */
struct zpp_unit_grad *zpp_bucket_sweep(zpp_zero *zero);
void zpp_bucket_drop_carry(zpp_zero *zero, struct zpp_unit_grad *grad);
/* Add the gradient of the backward before, where that was kept: grad->carry, to the shard at `to`. */
void zpp_bucket_add_carry(const struct zpp_unit_grad *grad, unsigned char *to);

/* --- whose gradient was not finite (origin.c) --------------------------------------------------------------------- */
/* A set of ranks: one bit each; the last one stands for rank 63 and all above. */
enum { ZPP_ORIGIN_BITS = 64 };
static inline uint64_t zpp_origin_bit(int rank) {
    return (uint64_t)1 << (rank < ZPP_ORIGIN_BITS ? rank : ZPP_ORIGIN_BITS - 1);
}

/* True if any of elements [begin, begin + elems) of the unit, which `data` has, is infinite or NaN. Only parameters are
 * looked at: the memory between them has no defined contents. */
bool zpp_origin_nonfinite_params(const struct zpp_unit *unit, const void *data, zpp_dtype dtype, size_t begin,
                                 size_t elems);

/* Return the first element that is infinite or NaN; one is. */
size_t zpp_origin_first_nonfinite(const void *data, zpp_dtype dtype, size_t elems);

/* What add_shards of reduce_shm.c adds: `count` sources of ranks `from`, to `to`, which may be one of the sources. */
struct zpp_sources {
    const void *const *data;
    const int *from;
    int count;
    double factor;
    bool accumulate;
};
/* As zpp_reduce_sources, or zpp_wire_add where gradients travel as quantised copies. Returns the ranks whose elements
 * were not finite, of those elements whose sum is not. */
uint64_t zpp_origin_add(zpp_zero *zero, const struct zpp_unit *unit, const struct zpp_sources *sources, void *to);
/* Keep what was found, for zpp_zero_origins; before `has` is set. */
void zpp_origin_note(const zpp_zero *zero, struct zpp_unit_grad *grad, uint64_t origins);

#endif
