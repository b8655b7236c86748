/* SPDX-License-Identifier: Apache-2.0
 *
 * A futex counter: a counter in shared memory that one rank raises and others wait for. Raising it costs one exchange,
 * and a system call only if somebody sleeps on it. Waiting spins for a bounded time (not at all if the writer shares
 * this core: then it cannot run meanwhile), may yield, then sleeps in the kernel (futex), and from then on checks about
 * every 100 ms whether the wait still makes sense: comm error, dead peers, tick, timeout. Counters wrap; they are
 * compared by signed distance.
 */
#ifndef ZPP_COMM_FUTEX_COUNTER_H
#define ZPP_COMM_FUTEX_COUNTER_H

#include <stdatomic.h>
#include <stdbool.h>
#include "../base/wait.h"

struct zpp_comm;

struct zpp_counter {
    _Atomic uint32_t value;
    /* On the same line: the writer that stores `value` owns it anyway. */
    _Atomic uint16_t sleepers;
    _Atomic uint16_t cpu; /* 1 + the core where the writer ran when it raised the counter last; 0 = unknown. A hint. */
};

/* Acquire: what the writer wrote before it raised the counter is seen after this returns true. */
static inline bool zpp_counter_reached(const struct zpp_counter *counter, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&counter->value, memory_order_acquire) - target) >= 0;
}

void zpp_counter_raise(struct zpp_counter *counter, uint32_t value); /* a release, and more: see wake(); one writer */
void zpp_counter_add(struct zpp_counter *counter);                   /* by one; any number of writers */

/* One wait of one call, which may look at several counters one after the other. Lives on the caller's stack. */
struct zpp_wait_ctx {
    struct zpp_comm *comm;
    const struct zpp_wait *wait; /* NULL: try, unless `own_timeout` */
    bool own_timeout;            /* collectives: NULL means the communicator's timeout */
    bool fatal; /* collectives: a timeout or interruption leaves the group unusable, so it is a comm error */
    /* What the caller is doing, for messages: "all_reduce(float32, 16 elements, sum) #7". */
    void (*describe)(const void *ctx, char *text, size_t capacity);
    const void *ctx;
    uint64_t start_ns, check_ns, log_ns; /* 0 until the wait gets slow */
};

/* Counters at one offset of every rank's memory: counter r = (struct zpp_counter *)(base[r] + offset). */
struct zpp_wait_target {
    void *const *base;
    size_t offset_bytes;
    uint32_t target;
};

static inline struct zpp_counter *zpp_target_counter(const struct zpp_wait_target *wait_target, int rank) {
    return (struct zpp_counter *)(void *)((uint8_t *)wait_target->base[rank] + wait_target->offset_bytes);
}

/* Wait until the counter of `rank` has reached the target. Peers that died without reaching it end the wait, whichever
 * they are. */
zpp_status zpp_await(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target, int rank,
                     struct zpp_err *err);
/* The same for every rank but the caller's. */
zpp_status zpp_await_all(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target, struct zpp_err *err);
/* Spin, then sleep until the counter has reached the target, a signal comes or sleep_ns, at most 100 ms, have passed;
 * true if it has. For waits whose condition is not the counter itself: the caller looks (zpp_wait_check) when this
 * returns false. */
bool zpp_counter_sleep(struct zpp_wait_ctx *wait_ctx, struct zpp_counter *counter, uint32_t target,
                       uint64_t sleep_ns);

#endif
