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
 */
#ifndef ZPP_ZERO_ON_DEVICE_H
#define ZPP_ZERO_ON_DEVICE_H

#include "../comm/counters.h"
#include "../comm/device_region.h"
#include "reduce.h"

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
    zpp_counters *counters; /* NULL: one rank */
    /* parameters (placement/on_device.c) */
    zpp_device_region *params; /* shards, and replicated units whole; NULL: one rank has them in `alone` */
    void *alone;
    size_t params_bytes;
    uint64_t steps, gathers_after; /* steps so far; the gather stream runs after so many of them, of all ranks */
    /* gradients (reduce_device.c) */
    zpp_device_region *grads; /* stages 0 and 1: all buckets; 2 and 3: an arena, and a place to send from */
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

#endif
