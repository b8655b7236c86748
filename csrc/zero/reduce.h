/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients to shards. Each unit's gradients collect in a bucket that the peers can read; a complete bucket goes out in
 * one fixed order of units, the same on every rank, whatever became ready first, and never blocks the backward thread.
 * Rank r adds shard r of all ranks' buckets, in rank order, in place: one read per byte.
 *
 * A bucket:   | gradient, elems of grad_dtype | touched, one byte a parameter |     (untouched parameters are zeros)
 * What travels in fewer bits (wire_dtype, or wire.h's quantised copies) is made of it in place, shard by shard.
 *
 * stages 2, 3   the shard is memory of its own, or in a file (grad_file.h); the bucket is given back once every peer
 * has
 *               read it
 * stage 1       the bucket stays, and its own shard is the reduced one (4 + 12/N bytes a parameter need that)
 * stage 0       as stage 1, then every rank copies the other reduced shards from where they were made (all-reduce)
 */
#ifndef ZPP_ZERO_REDUCE_H
#define ZPP_ZERO_REDUCE_H

#include "bucket.h"
#include "zero.h"

struct zpp_unit_grad {
    size_t elem_bytes; /* of the bucket and of `shard`, both of unit->grad_dtype */
    size_t bucket_bytes;
    size_t mapping_offset_bytes; /* a place of its own behind the arena */

    /* this backward */
    uint8_t *seen; /* [params] */
    size_t missing;
    int uses;
    bool partial;
    enum zpp_grad_state state; /* written by unit.c */

    /* the bucket */
    size_t bucket_offset_bytes; /* ZPP_BUCKET_NONE: none */
    bool at_mapping;
    bool listed; /* in the coordinator's list of buckets that are out */
    struct zpp_unit_grad *next_out;
    bool empty; /* goes out without a bucket: no gradient on this rank */
    size_t touched_params;

    /* the reduction under way: written before the launch, then by the operation until `done` */
    struct zpp_unit *unit;
    zpp_zero *zero;
    int round; /* quantise (wire.h), post, read and add; stage 0: post again, copy the others */
    uint64_t seq, copy_seq;
    uint64_t pass;
    uint64_t *peer_offsets; /* [ranks] */
    zpp_event *written, *done;
    /* over several hosts (reduce_net.c) */
    zpp_work *internode_flags, *internode_sum;
    unsigned char *internode_memory;

    /* the result */
    unsigned char *shard;
    unsigned char *back_shard; /* the back buffer, which a delayed step reads (step_delayed.h); in a file: */
    int back_file_index;       /* its number there */
    size_t back_offset_bytes;
    unsigned char
        *carry; /* stage 1: the shard from before, while a second backward of the same step refills the bucket */
    uint8_t *present;     /* [params] */
    bool has;
    uint64_t origins;     /* ranks whose gradients were not finite (origin.h) */
    /* where it lives in a file (grad_file.h) */
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

/* Of a unit's gradients: all of them, or one shard. */
static inline size_t zpp_grad_whole_bytes(const struct zpp_unit_grad *grad) {
    return grad->unit->elems * grad->elem_bytes;
}
static inline size_t zpp_grad_shard_bytes(const struct zpp_unit_grad *grad) {
    return grad->unit->shard_elems * grad->elem_bytes;
}

/* Part of create, seal and destroy. */
zpp_status zpp_reduce_add_unit(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
zpp_status zpp_reduce_seal(zpp_zero *zero, struct zpp_err *err);
/* Is a reduction or an exchange under way that has not ended? */
bool zpp_reduce_pending(const zpp_zero *zero);
/* Memory for a unit's reduced gradient, where it is not lent. */
zpp_status zpp_reduce_make_shard(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);
/* unfreeze.c: the order of reductions, of what is trainable, or also of what sleeps. */
void zpp_reduce_list_order(zpp_zero *zero, bool sleeping);
void zpp_reduce_drop_unit(zpp_zero *zero, struct zpp_unit *unit);

/* grad_pool.c: memory for a shard that has none (where shards are lent), of one that was given back where that fits;
 * and back. The first is called by reductions, wherever they run, the second by the coordinator's thread. */
enum { ZPP_POOLED_GRADS = 2 };
struct zpp_pooled_grad {
    void *memory; /* NULL: none */
    size_t bytes;
};
zpp_status zpp_grad_pool_take(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);
void zpp_grad_pool_give(zpp_zero *zero, struct zpp_unit_grad *grad);
void zpp_grad_pool_drop(zpp_zero *zero);

/* reduce_net.c: a unit's bucket goes out over several hosts, and the operation that ends it: the sum is in the shard.
 * `arg` points at a struct zpp_unit_grad pointer. */
zpp_status zpp_reduce_net_launch(zpp_zero *zero, struct zpp_unit_grad *grad, const uint8_t *touched,
                                 unsigned char *bucket, struct zpp_err *err);
zpp_status zpp_reduce_net_finish(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err);

/* Where parameter `param`'s gradient lies in the unit's bucket (stage 0: what p.grad is a view of); NULL without one.
 */
unsigned char *zpp_reduce_bucket(const zpp_zero *zero, const struct zpp_unit *unit);

#endif
