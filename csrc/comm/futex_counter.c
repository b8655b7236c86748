/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting on counters in shared memory, in three stages: spin (about 50 us; a running peer answers within that time),
 * a few yields where ranks outnumber cores (the peer needs this core), then futex sleeps of at most 100 ms. Longer
 * spins are worse: on a loaded machine the spinning rank occupies the core that the other one needs (prototype:
 * 160-350 us a unit with 20,000 rounds). Two ranks that share a core although others are idle sleep at once: that is 2
 * to 10 times faster than spinning first, and the wake-up moves the sleeper to an idle core, which a yield does not. A
 * yield also gives way to other programs (Linux 6.17 forfeits the rest of the caller's time slice: 120 us a call).
 */
#include "futex_counter.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum { YIELDS_CROWDED = 20 };
static const uint64_t LOOK_NS = 100000000u, LOG_NS = 10000000000u;

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long futex(_Atomic uint32_t *counter, int op, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, counter, op, value, timeout, NULL, 0);
}

static void wake(struct zpp_counter *counter) {
    /* The store before and this load are sequentially consistent, and so are the sleeper's: at least one side sees the
     * other's store. Release and acquire would not do, neither on x86 nor on Arm: both may let the load go first. */
    if (atomic_load(&counter->sleepers)) futex(&counter->value, FUTEX_WAKE, INT32_MAX, NULL);
}

/* Return 1 + the core of this thread, 0 if unknown. A few ns: glibc reads it from memory that the kernel keeps up to
 * date. */
static uint16_t cpu_here(void) { return (uint16_t)(sched_getcpu() + 1); }

void zpp_counter_raise(struct zpp_counter *counter, uint32_t value) {
    atomic_store_explicit(&counter->cpu, cpu_here(), memory_order_relaxed);
    atomic_store(&counter->value, value);
    wake(counter);
}

void zpp_counter_add(struct zpp_counter *counter) {
    atomic_store_explicit(&counter->cpu, cpu_here(), memory_order_relaxed);
    atomic_fetch_add(&counter->value, 1);
    wake(counter);
}

/* Sleep until the counter changes, a signal comes, or the next check is due. */
static void sleep_on(struct zpp_counter *counter, uint32_t target, uint64_t sleep_ns) {
    const struct timespec timeout = {(time_t)(sleep_ns / 1000000000u), (long)(sleep_ns % 1000000000u)};
    atomic_fetch_add(&counter->sleepers, 1);
    const uint32_t value = atomic_load(&counter->value);
    if ((int32_t)(value - target) < 0) futex(&counter->value, FUTEX_WAIT, value, &timeout);
    atomic_fetch_sub(&counter->sleepers, 1);
}

static void describe(const struct zpp_wait_ctx *wait_ctx, char *text, size_t capacity) {
    if (wait_ctx->describe)
        wait_ctx->describe(wait_ctx->ctx, text, capacity);
    else
        snprintf(text, capacity, "a wait");
}

/* --- the slow part ----------------------------------------------------------------------------------------------- */

/* Write the ranks that have not reached the wait target as text for messages. Return how many there are, and the
 * lowest in `*first`. */
static int absent_ranks(const struct zpp_comm *comm, const struct zpp_wait_target *wait_target, int rank, char *text,
                        size_t capacity, int *first) {
    int count = 0;
    size_t used = 0;
    text[0] = '\0';
    for (int r = 0; r < comm->ranks; r++) {
        const bool reached = wait_target ? zpp_counter_reached(zpp_target_counter(wait_target, r), wait_target->target)
                                         : r != rank;
        if (r == comm->rank || reached) continue;
        if (!count++) *first = r;
        if (used < capacity) used += (size_t)snprintf(text + used, capacity - used, "%s%d", count > 1 ? ", " : "",
                                                 zpp_label(comm, r));
    }
    return count;
}

static zpp_status record_lost(struct zpp_wait_ctx *wait_ctx, int rank, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    char doing[256];
    zpp_status status;
    describe(wait_ctx, doing, sizeof doing);
    if (zpp_peer_left(comm, rank))
        status = zpp_comm_fail(comm, ZPP_PEER, rank, err,
                               "comm: rank %d left the group \"%s\" while rank %d waited for it in %s",
                               zpp_label(comm, rank), comm->name, zpp_label(comm, comm->rank), doing);
    else
        status = zpp_comm_fail(comm, ZPP_PEER, rank, err,
                               "comm: rank %d (process %d) of group \"%s\" died while rank %d waited for it in %s",
                               zpp_label(comm, rank), (int)comm->peer[rank].pid, comm->name,
                               zpp_label(comm, comm->rank), doing);
    zpp_linked_spread(comm);
    return status;
}

/* End the wait if a rank died or left without reaching the wait target. The counter is read again after that check,
 * because a rank may have raised it before it left. */
static zpp_status check_lost_peers(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target,
                                   struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank || zpp_counter_reached(zpp_target_counter(wait_target, r), wait_target->target)) continue;
        if (!zpp_peer_gone(comm, r)
            || zpp_counter_reached(zpp_target_counter(wait_target, r), wait_target->target)) continue;
        return record_lost(wait_ctx, r, err);
    }
    return ZPP_OK;
}

static uint64_t timeout_of(const struct zpp_wait_ctx *wait_ctx) {
    return wait_ctx->wait ? wait_ctx->wait->timeout_ns : wait_ctx->comm->timeout_ns;
}

static zpp_status late(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target, int rank,
                       uint64_t waited_ns, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    char doing[256], absent[128];
    int first = rank;
    const int count = absent_ranks(comm, wait_target, rank, absent, sizeof absent, &first);
    const char *who = count > 1 ? "ranks" : "rank";
    if (!count) return ZPP_OK; /* all have come meanwhile */
    describe(wait_ctx, doing, sizeof doing);
    /* torch's tests, and callers, recognise a timeout by the words "Timed out waiting". */
    const double waited_s = (double)waited_ns / 1e9, waited_ms = (double)waited_ns / 1e6;
    if (!wait_ctx->fatal)
        return zpp_fail_rank(err, ZPP_TIMEOUT, zpp_label(comm, first),
                             "comm: %s %s of group \"%s\" did not come to %s within %.3g s. Timed out waiting %.0fms",
                             who, absent, comm->name, doing, waited_s, waited_ms);
    const zpp_status status =
        zpp_comm_fail(comm, ZPP_TIMEOUT, first, err,
                      "comm: %s %s of group \"%s\" did not come to %s within %.3g s. Timed out waiting %.0fms; if "
                      "that is no fault, allow a longer timeout",
                      who, absent, comm->name, doing, waited_s, waited_ms);
    zpp_linked_spread(comm);
    return status;
}

static void log_absent(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target, int rank,
                       uint64_t waited_ns) {
    struct zpp_comm *comm = wait_ctx->comm;
    char doing[256], absent[128], message[512];
    int first = rank;
    const int count = absent_ranks(comm, wait_target, rank, absent, sizeof absent, &first);
    if (!count || !comm->log) return;
    describe(wait_ctx, doing, sizeof doing);
    snprintf(message, sizeof message, "zeropp: rank %d of group \"%s\" has waited %.0f s in %s for rank%s %s",
             zpp_label(comm, comm->rank), comm->name, (double)waited_ns / 1e9, doing, count > 1 ? "s" : "", absent);
    comm->log(comm->log_ctx, message);
}

static zpp_status tick(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err) {
    if (!wait_ctx->wait || !wait_ctx->wait->tick) return ZPP_OK;
    const zpp_status status = wait_ctx->wait->tick(wait_ctx->wait->ctx, err);
    if (status == ZPP_OK || !wait_ctx->fatal) return status;
    /* Half of the collective is published, so the group's state would be undefined if this rank went on. The caller
     * gets the tick's own error, the peers one that names this rank. */
    struct zpp_err told = ZPP_ERR_INIT;
    char doing[256];
    describe(wait_ctx, doing, sizeof doing);
    (void)zpp_comm_fail(wait_ctx->comm, ZPP_ABORTED, wait_ctx->comm->rank, &told,
                        "comm: rank %d was interrupted in %s; group \"%s\" ends",
                        zpp_label(wait_ctx->comm, wait_ctx->comm->rank), doing, wait_ctx->comm->name);
    return status;
}

/* Run the checks of a wait, about every 100 ms. `wait_target` may be NULL; then the wait is for `rank`. */
static zpp_status check(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target, int rank,
                        struct zpp_err *err) {
    const uint64_t now_ns = zpp_now_ns();
    const uint64_t timeout_ns = timeout_of(wait_ctx);
    const bool due = now_ns >= wait_ctx->check_ns;
    if (due) zpp_linked_spread(wait_ctx->comm);
    zpp_status status = zpp_comm_check(wait_ctx->comm, err);
    if (status != ZPP_OK) return status;
    if (due) {
        wait_ctx->check_ns = now_ns + LOOK_NS;
        status = wait_target ? check_lost_peers(wait_ctx, wait_target, err) : ZPP_OK;
        if (status == ZPP_OK) status = tick(wait_ctx, err);
        if (status != ZPP_OK) return status;
    }
    if (now_ns >= wait_ctx->log_ns) {
        log_absent(wait_ctx, wait_target, rank, now_ns - wait_ctx->start_ns);
        wait_ctx->log_ns = now_ns + 6 * LOG_NS;
    }
    if (timeout_ns && now_ns - wait_ctx->start_ns >= timeout_ns)
        return late(wait_ctx, wait_target, rank, now_ns - wait_ctx->start_ns, err);
    return ZPP_OK;
}

static void begin_slow(struct zpp_wait_ctx *wait_ctx) {
    if (wait_ctx->start_ns) return;
    wait_ctx->start_ns = zpp_now_ns();
    wait_ctx->check_ns = wait_ctx->start_ns + LOOK_NS;
    wait_ctx->log_ns = wait_ctx->start_ns + LOG_NS;
}

static uint64_t sleep_until_check(const struct zpp_wait_ctx *wait_ctx) {
    const uint64_t timeout_ns = timeout_of(wait_ctx), now_ns = zpp_now_ns();
    uint64_t until_ns = wait_ctx->check_ns;
    if (timeout_ns && wait_ctx->start_ns + timeout_ns < until_ns) until_ns = wait_ctx->start_ns + timeout_ns;
    return until_ns > now_ns ? until_ns - now_ns : 1;
}

zpp_status zpp_wait_check(struct zpp_wait_ctx *wait_ctx, int rank, bool gone, struct zpp_err *err) {
    begin_slow(wait_ctx);
    wait_ctx->check_ns = 0; /* the caller slept already */
    const zpp_status status = check(wait_ctx, NULL, rank, err);
    return status == ZPP_OK && gone ? record_lost(wait_ctx, rank, err) : status;
}

static zpp_status await_slow(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target, int rank,
                             struct zpp_err *err) {
    struct zpp_counter *counter = zpp_target_counter(wait_target, rank);
    begin_slow(wait_ctx);
    for (int i = wait_ctx->comm->crowded ? YIELDS_CROWDED : 0; i > 0; i--) {
        sched_yield();
        if (zpp_counter_reached(counter, wait_target->target)) return ZPP_OK;
    }
    for (;;) {
        errno = 0;
        sleep_on(counter, wait_target->target, sleep_until_check(wait_ctx));
        if (zpp_counter_reached(counter, wait_target->target)) return ZPP_OK;
        if (errno == EINTR) wait_ctx->check_ns = 0; /* a signal: run the tick at once */
        const zpp_status status = check(wait_ctx, wait_target, rank, err);
        if (status != ZPP_OK) return status;
    }
}

/* --- the fast part ----------------------------------------------------------------------------------------------- */

/* Return how often to spin: 0 where the scheduler put both ranks on one core, because the peer runs only when the
 * waiting rank sleeps. */
static int spin_rounds(const struct zpp_wait_ctx *wait_ctx, const struct zpp_counter *counter) {
    const uint16_t there = atomic_load_explicit(&counter->cpu, memory_order_relaxed);
    return there && there == cpu_here() ? 0 : wait_ctx->comm->spin_rounds;
}

zpp_status zpp_await(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target, int rank,
                     struct zpp_err *err) {
    const struct zpp_counter *counter = zpp_target_counter(wait_target, rank);
    if (zpp_counter_reached(counter, wait_target->target)) return ZPP_OK;
    if (!wait_ctx->wait && !wait_ctx->own_timeout) {
        const zpp_status status = zpp_comm_check(wait_ctx->comm, err);
        return status == ZPP_OK ? ZPP_AGAIN : status;
    }
    for (int i = spin_rounds(wait_ctx, counter); i > 0; i--) {
        pause_cpu();
        if (zpp_counter_reached(counter, wait_target->target)) return ZPP_OK;
    }
    return await_slow(wait_ctx, wait_target, rank, err);
}

bool zpp_counter_sleep(struct zpp_wait_ctx *wait_ctx, struct zpp_counter *counter, uint32_t target,
                       uint64_t sleep_ns) {
    for (int i = spin_rounds(wait_ctx, counter); i > 0; i--) {
        if (zpp_counter_reached(counter, target)) return true;
        pause_cpu();
    }
    begin_slow(wait_ctx);
    sleep_on(counter, target, sleep_ns < LOOK_NS ? sleep_ns : LOOK_NS);
    return zpp_counter_reached(counter, target);
}

zpp_status zpp_await_all(struct zpp_wait_ctx *wait_ctx, const struct zpp_wait_target *wait_target,
                         struct zpp_err *err) {
    for (int r = 0; r < wait_ctx->comm->ranks; r++) {
        if (r == wait_ctx->comm->rank) continue;
        const zpp_status status = zpp_await(wait_ctx, wait_target, r, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

/* --- waits outside of this library -------------------------------------------------------------------------------- */

bool zpp_comm_peer_gone(const zpp_comm *comm, int rank) { return zpp_peer_gone(comm, rank); }

static void describe_text(const void *ctx, char *text, size_t capacity) {
    snprintf(text, capacity, "%s", (const char *)ctx);
}

zpp_status zpp_comm_check_peer(zpp_comm *comm, int rank, bool gone, uint64_t start_ns, const char *doing,
                               struct zpp_err *err) {
    const struct zpp_wait wait = {comm->timeout_ns, NULL, NULL};
    struct zpp_wait_ctx wait_ctx = {.comm = comm,
                                    .wait = &wait,
                                    .fatal = true,
                                    .describe = describe_text,
                                    .ctx = doing,
                                    .start_ns = start_ns,
                                    .log_ns = UINT64_MAX};
    return zpp_wait_check(&wait_ctx, rank, gone, err);
}
