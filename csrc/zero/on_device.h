/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards on the device: parameters, reduced gradients and states of the optimizer live in the memory of GPUs that the
 * ranks of a host map (docs/design/0039-shards-on-the-device.md). No host waits for a GPU, its own or a peer's: streams
 * wait for events of this rank, and for counters of all ranks (counters.h).
 *
 *   stream    does                                   after                            and then signals
 *   compute   the caller's kernels
 *             gradients into the bucket n            taken of the place's last use
 *             a bucket goes out                                                       written n
 *             the norm n                                                              measured n
 *             its sum over all ranks                 measured n of all
 *             the step s                             read s of all                    stepped s
 *   sums      the sum of all ranks' buckets n        written n of all                 taken n
 *             its unit's step inside the backward
 *             stage 0: the sums of the others        taken n of all                   copied n
 *   gather    copies of all ranks' shards            stepped s of all; the memory
 *             a step begins                                                           read s
 *
 * A reduction begins on `sums` once all ranks have posted its descriptor, which they do after they enqueued `written`.
 * Barriers of the hosts stand between `read` and the step, and between `stepped` and the next gather. So every await is
 * enqueued after the signals that answer it.
 *
 * Where a rank cannot map the memory of all others, NCCL moves the bytes (docs/design/0052-gpus-of-several-hosts.md).
 * Then there are no counters, and each rank's memory is its own:
 *
 *   compute   gradients into the bucket n            the exchange n, which reads its place's last use
 *             the norm n, exchanged by NCCL
 *             the step s                             this rank's gathers before it
 *   sums      the exchange of shards of bucket n     the bucket is filled
 *             the sum n of what came; stage 0: an all-gather of the sums
 *   gather    an all-gather of shards                step s of this rank; the memory
 *
 * All ranks enqueue the same calls of NCCL in the same order, that of the program: never when something has arrived.
 * Units of a group are moved by the group's own communicator of NCCL, on the stream of all of them.
 */
#ifndef ZPP_ZERO_ON_DEVICE_H
#define ZPP_ZERO_ON_DEVICE_H

#include "../comm/counters.h"
#include "../comm/device_region.h"
#include "grad_path.h"

/* The words of counters.h. */
enum zpp_counter {
    ZPP_COUNTER_WRITTEN, /* the bucket of reduction n is filled */
    ZPP_COUNTER_TAKEN,   /* this rank's sum n is made, and reads no bucket any more */
    ZPP_COUNTER_COPIED,  /* stage 0: this rank has copied all sums n */
    ZPP_COUNTER_STEPPED, /* this rank's shards have the values of step n */
    ZPP_COUNTER_MEASURED, /* this rank's sums of squares of norm n are where its peers read them */
    ZPP_COUNTER_READ,    /* this rank has read all that it will read of the values before step n */
    ZPP_COUNTERS
};

/* Memory of reduced shards that a step inside the backward gives back. */
struct zpp_device_grad {
    void *memory;
    size_t bytes;
    bool used;
};

/* Made by the placement, and ended by it after all streams. */
struct zpp_on_device {
    zpp_counters *counters; /* NULL: one rank, or NCCL */
    const uint64_t *halt;   /* for kernels: not 0 once waits were released by a failure; NULL: nothing is waited for */
    struct zpp_grad_path by_nccl; /* the path nccl (by_nccl.c) */
    /* parameters (placement/on_device.c) */
    zpp_device_region *params; /* shards, and replicated units whole; NULL: one rank has them in `alone` */
    void *alone;
    size_t params_bytes;
    uint64_t steps, gathers_after; /* steps so far; the gather stream runs after so many of them, of all ranks */
    zpp_event *stepped;            /* NCCL: the last step of this rank */
    unsigned char *qcopies;        /* NCCL: every rank's quantised copy of one unit's shard; NULL: they travel exact */
    size_t qcopies_bytes;
    /* gradients (reduce_device.c) */
    zpp_device_region *grads; /* stages 0 and 1: all buckets; 2 and 3: an arena, and a place to send from */
    unsigned char *buckets;   /* NCCL: the same, in memory of this rank; then what comes from the peers, and zeros */
    size_t buckets_bytes;
    zpp_stream *sums;
    zpp_event *summed;
    uint64_t reductions;         /* launched so far */
    uint64_t settled;            /* the compute stream runs after everybody's sum of this reduction and those before */
    size_t sending_offset_bytes; /* that place */
    struct zpp_unit_grad *sent;  /* whose gradient was there last; NULL: nobody's */
    struct zpp_device_grad *pool; /* of the store device_pooled */
    int pool_count, pool_used;
    size_t pool_capacity;
};

/* --- by_nccl.c ---------------------------------------------------------------------------------------------------- */
/* Part of create, collective: counters and copies, or NCCL, as the options ask. */
zpp_status zpp_on_device_join(zpp_zero *zero, const char *const *doing, struct zpp_err *err);
void zpp_on_device_leave(zpp_zero *zero); /* after all streams */

/* --- reduce_device.c, for by_nccl.c ------------------------------------------------------------------------------- */
/* Bytes from one rank's shard of the unit to the next, as gradients travel. */
size_t zpp_device_stride(const zpp_zero *zero, const struct zpp_unit *unit);
/* Where peers look for this rank's gradients of the unit. */
unsigned char *zpp_device_place(const zpp_zero *zero, const struct zpp_unit_grad *grad);
/* On the compute stream: what peers read comes to that place. */
zpp_status zpp_device_put(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);
/* On the stream of the sums: this rank's shard is the sum of `sources`, or that is added to it. */
zpp_status zpp_device_add(zpp_zero *zero, struct zpp_unit_grad *grad, const void *const *sources, int count,
                          struct zpp_err *err);

#endif
