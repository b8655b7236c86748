/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator's own state, shared by the sources of csrc/zero, and by no other folder.
 */
#ifndef ZPP_ZERO_INTERNAL_H
#define ZPP_ZERO_INTERNAL_H

#include <pthread.h>

#include "../base/mem.h"
#include "../base/timeline.h"
#include "exchange.h"
#include "offload/unit_file.h"
#include "reduce.h"
#include "offload/grad_file.h"
#include "trace.h"
#include "wire.h"
#include "zero.h"

struct zpp_zero {
    struct zpp_zero_options options;
    int rank, ranks;
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
    struct zpp_unit **moving; /* by address */
    int moving_count;
    zpp_range *range;           /* gathered units on cpu, at addresses that never change */
    zpp_unit_file *unit_file;   /* parameters in a file; NULL without any */
    unsigned char *moving_base; /* addresses of units that move: of `range`, or the mapping of `unit_file` */

    zpp_comm *intranode; /* hpZ: the ranks of this host; NULL without */
    unsigned char *secondary;
    size_t secondary_bytes;

    /* gathering */
    zpp_stream *compute, *gather;
    zpp_stream *arrive; /* nvme units: their reads end here, in order; `gather` begins them */
    struct zpp_aio_fault fault; /* of the last read that failed */
    struct zpp_trace trace;
    size_t full_bytes, full_peak_bytes, ahead_bytes; /* see unit.c */
    int kept_units;
    bool forward_read; /* of the units in a file that this pass needs forward, each was read or is being read */
    uint64_t gather_ns; /* what needed a unit waited for it so long */

    /* gradients */
    zpp_stream *reduce;
    zpp_event *acked; /* the last wait for peers to let go of a bucket */
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
    bool shares_backward; /* another coordinator may be in this backward: see take_bucket */
    bool over_bound;      /* ... and a bucket was waited for in vain: this backward goes beyond bucket_bytes */
    uint32_t number;      /* of the coordinators on this communicator, in their order */
    bool stepping; /* between step_begin and step_end */
    uint64_t backward_ns, step_ns; /* when they began, for zeropp.trace */
    double grad_scale;
    const struct zpp_grad_store *store; /* where reduced gradients live */
    bool delays_steps; /* files have two places for what a step touches (step_delayed.h) */
    pthread_mutex_t grad_pool_lock; /* guards `grad_pool` and shard_bytes: reductions borrow, steps give back */
    struct zpp_pooled_grad grad_pool[ZPP_POOLED_GRADS];
    size_t shard_bytes, carry_bytes, kept_bucket_bytes, back_bytes;
    struct zpp_grad_file grad_file; /* of the store nvme */
};

/* Stages 0 and 1: the reduced gradient is a part of the bucket. */
static inline bool zpp_keeps_buckets(const zpp_zero *zero) { return zero->options.stage <= 1; }

/* True if a reduction adds to the shard. Stage 1: this rank's bucket was not refilled, so its shard still is the
 * gradient so far; else the carry has it. */
static inline bool zpp_reduce_accumulates(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return grad->has && (zero->options.stage >= 2 || (zero->options.stage == 1 && grad->empty));
}

/* What a sum over `ranks` of the unit's gradients is multiplied with. */
static inline double zpp_grad_factor(const zpp_zero *zero, const struct zpp_unit *unit, int ranks) {
    if (unit->grad_dtype == ZPP_F64) return zero->grad_scale / ranks;
    return (double)((float)zero->grad_scale / (float)ranks);
}

#endif
