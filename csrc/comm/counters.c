/* SPDX-License-Identifier: Apache-2.0
 *
 * See counters.h.
 */
#include "counters.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { LINE_BYTES = 64, LOOK_NS = 20000000 };

/* One rank's part of the region. Streams write `value`; hosts write it only to release the waits for it. */
struct word {
    _Alignas(LINE_BYTES) uint64_t value;
};
struct part {
    struct word words[ZPP_COUNTERS_MOST];
    struct word halt;
};

struct zpp_counters {
    zpp_comm *comm;
    zpp_device *device;
    zpp_region *region;
    const char *const *doing; /* [words] */
    int words, rank, ranks;
    int pinned;                                  /* parts of so many ranks */
    _Atomic uint64_t awaited[ZPP_COUNTERS_MOST]; /* the highest value that a stream of this rank waits for */
    /* the thread that looks */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t ending;
    bool started, ends, released;
    uint64_t missing_since_ns[ZPP_RANKS_MAX]; /* 0: the rank has reached all that is waited for */
};

static struct part *part_of(const zpp_counters *counters, int rank) { return zpp_region_base(counters->region, rank); }

/* --- the thread that looks ---------------------------------------------------------------------------------------- */

/* Halt words first, so that no kernel behind a released wait misses its own. */
static void release_all(zpp_counters *counters) {
    for (int rank = 0; rank < counters->ranks; rank++)
        __atomic_store_n(&part_of(counters, rank)->halt.value, 1, __ATOMIC_SEQ_CST);
    for (int rank = 0; rank < counters->ranks; rank++)
        for (int word = 0; word < counters->words; word++) {
            uint64_t *value = &part_of(counters, rank)->words[word].value;
            const uint64_t seen = __atomic_load_n(value, __ATOMIC_RELAXED);
            const uint64_t awaited = atomic_load(&counters->awaited[word]);
            if (seen < ZPP_STREAM_COUNTER_RELEASED)
                __atomic_store_n(value, (seen > awaited ? seen : awaited) + ZPP_STREAM_COUNTER_RELEASED,
                                 __ATOMIC_SEQ_CST);
        }
    counters->released = true;
}

/* Return the first word of the rank that a stream of this rank waits for; the number of words: none. */
static int missing_word(const zpp_counters *counters, int rank) {
    int word = 0;
    while (word < counters->words && zpp_stream_counter_reached(&part_of(counters, rank)->words[word].value,
                                                             atomic_load(&counters->awaited[word])))
        word++;
    return word;
}

/* From when on a rank counts as late for a word. If this rank has not reached the word either, its own GPU may be what
 * the others wait for, and so they have one timeout more to say so. */
static uint64_t late_since(const zpp_counters *counters, int word, uint64_t since_ns) {
    const uint64_t *own = &part_of(counters, counters->rank)->words[word].value;
    const uint64_t later_ns = since_ns + zpp_comm_timeout_ns(counters->comm), now_ns = zpp_now_ns();
    if (zpp_stream_counter_reached(own, atomic_load(&counters->awaited[word]))) return since_ns;
    return later_ns < now_ns ? later_ns : now_ns;
}

/* Has a rank that streams wait for died, left or stopped? It may have written its words and left since, so they are
 * read again after that check. */
static zpp_status look_at_rank(zpp_counters *counters, int rank) {
    struct zpp_err ignored = ZPP_ERR_INIT; /* the comm error has it for all ranks */
    uint64_t *since_ns = &counters->missing_since_ns[rank];
    const bool missing = missing_word(counters, rank) < counters->words;
    const bool gone = missing && zpp_comm_peer_gone(counters->comm, rank);
    const int word = missing ? missing_word(counters, rank) : counters->words;
    if (word == counters->words) {
        *since_ns = 0;
        return ZPP_OK;
    }
    if (!*since_ns) *since_ns = zpp_now_ns();
    return zpp_comm_check_peer(counters->comm, rank, gone, late_since(counters, word, *since_ns),
                               counters->doing[word], &ignored);
}

static void look(zpp_counters *counters) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    zpp_status status = zpp_comm_health(counters->comm, &ignored);
    for (int rank = 0; rank < counters->ranks && status == ZPP_OK; rank++)
        if (rank != counters->rank) status = look_at_rank(counters, rank);
    if (status != ZPP_OK || counters->released) release_all(counters);
}

static void *run_looks(void *arg) {
    zpp_counters *counters = arg;
    pthread_mutex_lock(&counters->lock);
    while (!counters->ends) {
        const struct timespec next = zpp_moment_in(LOOK_NS);
        pthread_cond_timedwait(&counters->ending, &counters->lock, &next);
        look(counters);
    }
    pthread_mutex_unlock(&counters->lock);
    return NULL;
}

/* --- creation ----------------------------------------------------------------------------------------------------- */

static zpp_status open_counters(zpp_counters *counters, struct zpp_err *err) {
    zpp_status status =
        zpp_region_create(counters->comm, ZPP_REGION_PER_RANK, sizeof(struct part), &counters->region, err);
    while (status == ZPP_OK && counters->pinned < counters->ranks) {
        status = zpp_device_pin(counters->device, part_of(counters, counters->pinned), sizeof(struct part), err);
        if (status == ZPP_OK) counters->pinned++;
    }
    if (status != ZPP_OK) return status;
    counters->started = pthread_create(&counters->thread, NULL, run_looks, counters) == 0;
    if (counters->started) return ZPP_OK;
    return zpp_fail(err, ZPP_OS, "comm: no thread to watch the counters of %d ranks (`ulimit -u`)", counters->ranks);
}

zpp_status zpp_counters_create(zpp_comm *comm, zpp_device *device, const char *const *doing, int words,
                               zpp_counters **out, struct zpp_err *err) {
    zpp_counters *counters = calloc(1, sizeof *counters);
    if (!counters)
        return zpp_fail(err, ZPP_NOMEM, "comm: no memory for the counters of %d ranks", zpp_comm_ranks(comm));
    counters->comm = comm;
    counters->device = device;
    counters->doing = doing;
    counters->words = words;
    counters->rank = zpp_comm_rank(comm);
    counters->ranks = zpp_comm_ranks(comm);
    pthread_mutex_init(&counters->lock, NULL);
    zpp_cond_init(&counters->ending);
    const zpp_status status = open_counters(counters, err);
    if (status != ZPP_OK) zpp_counters_destroy(counters);
    else *out = counters;
    return status;
}

void zpp_counters_destroy(zpp_counters *counters) {
    if (!counters) return;
    pthread_mutex_lock(&counters->lock);
    counters->ends = true;
    pthread_cond_signal(&counters->ending);
    pthread_mutex_unlock(&counters->lock);
    if (counters->started) pthread_join(counters->thread, NULL);
    while (counters->pinned > 0) zpp_device_unpin(counters->device, part_of(counters, --counters->pinned));
    zpp_region_destroy(counters->region);
    pthread_cond_destroy(&counters->ending);
    pthread_mutex_destroy(&counters->lock);
    free(counters);
}

/* --- use ---------------------------------------------------------------------------------------------------------- */

zpp_status zpp_counters_signal(zpp_counters *counters, zpp_stream *stream, int word, uint64_t value,
                               struct zpp_err *err) {
    return zpp_stream_signal(stream, &part_of(counters, counters->rank)->words[word].value, value, err);
}

zpp_status zpp_counters_await_some(zpp_counters *counters, zpp_stream *stream, int word, uint64_t value,
                                   const int *ranks, int count, struct zpp_err *err) {
    const uint64_t *words[ZPP_RANKS_MAX];
    for (int at = 0; at < count; at++) words[at] = &part_of(counters, ranks[at])->words[word].value;
    const zpp_status status = zpp_stream_await_all(stream, words, (size_t)count, value, NULL, err);
    uint64_t seen = atomic_load(&counters->awaited[word]);
    while (seen < value && !atomic_compare_exchange_weak(&counters->awaited[word], &seen, value)) {
    }
    return status;
}

zpp_status zpp_counters_await(zpp_counters *counters, zpp_stream *stream, int word, uint64_t value,
                              struct zpp_err *err) {
    int all[ZPP_RANKS_MAX];
    for (int rank = 0; rank < counters->ranks; rank++) all[rank] = rank;
    return zpp_counters_await_some(counters, stream, word, value, all, counters->ranks, err);
}

bool zpp_counters_reached(const zpp_counters *counters, int word, uint64_t value) {
    bool reached = true;
    for (int rank = 0; rank < counters->ranks && reached; rank++)
        reached = zpp_stream_counter_reached(&part_of(counters, rank)->words[word].value, value);
    return reached;
}

const uint64_t *zpp_counters_halt(const zpp_counters *counters) {
    return &part_of(counters, counters->rank)->halt.value;
}
