/* SPDX-License-Identifier: Apache-2.0
 *
 * A ZeRO-3 in which no host waits, not even for other ranks, on the simulated GPU. Copies pull the peers' shards, one
 * kernel sums the peers' buckets in rank order, and the order between ranks is counters that streams write and wait
 * for:
 *
 *   gather   await written[p] (p's shards are of this step), await the memory; copy shards
 *   compute  await the gather; use it. In the backward: await taken[p] (my bucket is free), gradient -> bucket,
 *            signal posted[me]
 *   reduce   await posted[p]; sum in rank order; signal taken[me]. After the last: update, signal written[me]
 *
 * Ranks are devices of this process with three streams each, so a schedule is one of 2^(3 ranks) and nothing is left to
 * chance. Five units share memory for three. Results are compared with plain loops, bit for bit, and each wait is left
 * out in turn.
 */
#include <math.h>

#include "sim_gpu.h"

enum { MOST = 3, UNITS = 5, ELEMS = 16, SLOTS = 3, BUCKETS = 2, STEPS = 3, STREAMS = 3 };
enum mutant { NONE, WRITTEN, MEMORY, GATHERED, TAKEN, POSTED, AWAIT_FIRST };
enum { HANG_MS = 300, LONG_MS = 20000 };
static const uint64_t RELEASED = UINT64_C(1) << 62; /* not the largest number: the comparison is cyclic */

static int ranks;
static float shards[MOST][UNITS][ELEMS], buckets[MOST][BUCKETS][MOST * ELEMS], grads[MOST][UNITS][ELEMS];
static float full[MOST][SLOTS][MOST * ELEMS], state[MOST];
static uint64_t written[MOST], posted[MOST], taken[MOST];
static int halted; /* a rank is dead: kernels behind released waits look here first */

static struct rank {
    sim_stream compute, gather, reduce;
    sim_event gathered[SLOTS], released[SLOTS];
} rank_of[MOST];

/* --- kernels ------------------------------------------------------------------------------------------------------ */

struct job {
    int rank, unit, slot, bucket, step;
};

static void enqueue(sim_stream stream, void (*run)(void *arg), struct job like) {
    struct job *job = malloc(sizeof *job);
    CHECK(job != NULL);
    *job = like;
    CHECK_EQUAL(SIM(sim_enqueue)(stream, run, job, "a kernel"), 0);
}

static void use(void *arg) {
    const struct job *job = arg;
    float sum = 0;
    for (int i = 0; i < ranks * ELEMS; i++) sum += full[job->rank][job->slot][i] * (float)(i % 7 + 1);
    state[job->rank] = tanhf(state[job->rank] + sum / 100 + (float)(job->rank + job->step));
    free(arg);
}

static void make_gradient(void *arg) {
    const struct job *job = arg;
    float *bucket = buckets[job->rank][job->bucket];
    for (int i = 0; i < ranks * ELEMS; i++) {
        bucket[i] = sinf(full[job->rank][job->slot][i] + state[job->rank] + (float)i);
    }
    free(arg);
}

static void sum_buckets(void *arg) {
    const struct job *job = arg;
    for (int i = 0; i < ELEMS; i++) {
        float sum = 0;
        for (int p = 0; p < ranks; p++) sum += buckets[p][job->bucket][job->rank * ELEMS + i];
        grads[job->rank][job->unit][i] = sum;
    }
    free(arg);
}

static void update(void *arg) {
    const struct job *job = arg;
    for (int u = 0; u < UNITS && !__atomic_load_n(&halted, __ATOMIC_ACQUIRE); u++) {
        for (int i = 0; i < ELEMS; i++) shards[job->rank][u][i] -= 0.01f * grads[job->rank][u][i];
    }
    free(arg);
}

static void poison(void *arg) {
    const struct job *job = arg;
    memset(full[job->rank][job->slot], 0xff, sizeof full[0][0]);
    free(arg);
}

/* --- one step of one rank: everything is enqueued, nothing is waited for ------------------------------------------ */

static void await_all(sim_stream stream, uint64_t *counters, uint64_t value) {
    for (int p = 0; p < ranks; p++) {
        uint64_t *const counter = &counters[p];
        CHECK_EQUAL(SIM(sim_enqueue_wait_values)(stream, &counter, &value, 1), 0);
    }
}

static void signal(sim_stream stream, uint64_t *counter, uint64_t value) {
    CHECK_EQUAL(SIM(sim_enqueue_write_value)(stream, counter, value), 0);
}

static void gather(int r, int unit, int visit, int step, enum mutant without) {
    struct rank *me = &rank_of[r];
    const int slot = visit % SLOTS;
    if (visit % (2 * UNITS) == 0 && without != WRITTEN) await_all(me->gather, written, (uint64_t)step);
    if (visit >= SLOTS && without != MEMORY) SIM(sim_stream_wait)(me->gather, me->released[slot]);
    for (int p = 0; p < ranks; p++) {
        SIM(sim_enqueue_copy)(me->gather, full[r][slot] + p * ELEMS, shards[p][unit], sizeof shards[p][unit]);
    }
    SIM(sim_event_record)(me->gathered[slot], me->gather);
    if (without != GATHERED) SIM(sim_stream_wait)(me->compute, me->gathered[slot]);
}

static void release(int r, int slot) {
    enqueue(rank_of[r].compute, poison, (struct job){.rank = r, .slot = slot});
    SIM(sim_event_record)(rank_of[r].released[slot], rank_of[r].compute);
}

static void reduce(int r, int unit, int slot, int step, uint64_t number, enum mutant without) {
    struct rank *me = &rank_of[r];
    const struct job job = {r, unit, slot, (int)(number % BUCKETS), step};
    if (without == AWAIT_FIRST) await_all(me->reduce, posted, number);
    if (number > BUCKETS && without != TAKEN) await_all(me->compute, taken, number - BUCKETS);
    enqueue(me->compute, make_gradient, job);
    release(r, slot);
    signal(me->compute, &posted[r], number);
    if (without != POSTED && without != AWAIT_FIRST) await_all(me->reduce, posted, number);
    enqueue(me->reduce, sum_buckets, job);
    signal(me->reduce, &taken[r], number);
}

/* `dies`: the rank stops in the middle of its backward. */
static void one_step(int r, int step, enum mutant without, bool dies) {
    int visit = step * 2 * UNITS;
    for (int unit = 0; unit < UNITS; unit++, visit++) {
        gather(r, unit, visit, step, without);
        enqueue(rank_of[r].compute, use, (struct job){r, unit, visit % SLOTS, 0, step});
        release(r, visit % SLOTS);
    }
    for (int unit = UNITS - 1; unit >= 0; unit--, visit++) {
        if (dies && unit == UNITS / 2) return;
        gather(r, unit, visit, step, without);
        reduce(r, unit, visit % SLOTS, step, (uint64_t)(step * UNITS + UNITS - unit), without);
    }
    enqueue(rank_of[r].reduce, update, (struct job){.rank = r, .step = step});
    signal(rank_of[r].reduce, &written[r], (uint64_t)step + 1);
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

static void reset(void) {
    for (int r = 0; r < ranks; r++)
        for (int u = 0; u < UNITS; u++)
            for (int i = 0; i < ELEMS; i++) shards[r][u][i] = (float)((r * 131 + u * 17 + i * 7) % 23) / 23 - 0.4f;
    memset(buckets, 0xff, sizeof buckets);
    memset(grads, 0xff, sizeof grads);
    memset(full, 0xff, sizeof full);
    memset(state, 0, sizeof state);
    for (int p = 0; p < MOST; p++) written[p] = posted[p] = taken[p] = 0;
    halted = 0;
}

static struct job *job_of(struct job like) {
    struct job *job = malloc(sizeof *job);
    CHECK(job != NULL);
    *job = like;
    return job;
}

static void copy_unit(int r, int unit) {
    for (int p = 0; p < ranks; p++) memcpy(full[r][0] + p * ELEMS, shards[p][unit], sizeof shards[p][unit]);
}

static void plain_loops(float wanted[MOST][UNITS][ELEMS]) {
    reset();
    for (int step = 0; step < STEPS; step++) {
        for (int u = 0; u < UNITS; u++)
            for (int r = 0; r < ranks; r++) {
                copy_unit(r, u);
                use(job_of((struct job){r, u, 0, 0, step}));
            }
        for (int u = UNITS - 1; u >= 0; u--) {
            for (int r = 0; r < ranks; r++) {
                copy_unit(r, u);
                make_gradient(job_of((struct job){r, u, 0, 0, step}));
            }
            for (int r = 0; r < ranks; r++) sum_buckets(job_of((struct job){r, u, 0, 0, step}));
        }
        for (int r = 0; r < ranks; r++) update(job_of((struct job){.rank = r, .step = step}));
    }
    memcpy(wanted, shards, sizeof shards);
}

/* Bit n of `schedule` is the n-th of all ranks' streams. */
static uint64_t lazy_streams(unsigned schedule) {
    uint64_t lazy = 0;
    for (int i = 0; i < STREAMS * ranks; i++) {
        const struct rank *rank = &rank_of[i / STREAMS];
        const sim_stream streams[STREAMS] = {rank->compute, rank->gather, rank->reduce};
        if (schedule >> i & 1) lazy |= UINT64_C(1) << SIM(sim_stream_number)(streams[i % STREAMS]);
    }
    return lazy;
}

static void enqueue_steps(unsigned schedule, enum mutant without, int dead) {
    reset();
    SIM(sim_set_schedule)(lazy_streams(schedule), 0);
    for (int step = 0; step < STEPS; step++)
        for (int r = 0; r < ranks; r++)
            if (r != dead || step <= 1) one_step(r, step, without, r == dead && step == 1);
}

static void open_ranks(int count) {
    ranks = count;
    for (int r = 0; r < ranks; r++) {
        struct rank *rank = &rank_of[r];
        if (rank->compute) continue;
        sim_stream *streams[STREAMS] = {&rank->compute, &rank->gather, &rank->reduce};
        for (int i = 0; i < STREAMS; i++) CHECK_EQUAL(SIM(sim_stream_create)(r, streams[i]), 0);
        for (int i = 0; i < SLOTS; i++) {
            CHECK_EQUAL(SIM(sim_event_create)(&rank->gathered[i]), 0);
            CHECK_EQUAL(SIM(sim_event_create)(&rank->released[i]), 0);
        }
    }
}

/* Events of a run before are of no meaning to the next one: all are complete then. */
static unsigned wrong_schedules(enum mutant without, unsigned stride) {
    static float wanted[MOST][UNITS][ELEMS];
    char stuck[1000];
    unsigned wrong = 0;
    plain_loops(wanted);
    for (unsigned schedule = 0; schedule < 1u << STREAMS * ranks; schedule += stride) {
        enqueue_steps(schedule, without, -1);
        CHECK(SIM(sim_finish_within)(LONG_MS, stuck, sizeof stuck));
        wrong += memcmp(shards, wanted, sizeof shards) != 0;
    }
    return wrong;
}

static void right_in_all_schedules(void) {
    open_ranks(2);
    CHECK_EQUAL(wrong_schedules(NONE, 1), 0);
    open_ranks(3);
    CHECK_EQUAL(wrong_schedules(NONE, 9), 0);
}

static void wrong_without_one_of_its_waits(void) {
    open_ranks(2);
    for (enum mutant without = WRITTEN; without <= POSTED; without++) CHECK(wrong_schedules(without, 1) > 0);
}

static void in_one_queue_signals_go_before_the_awaits_that_they_answer(void) {
    char stuck[1000];
    open_ranks(2);
    SIM(sim_set_one_queue)(true);
    CHECK_EQUAL(wrong_schedules(NONE, 64), 0);
    enqueue_steps(0, AWAIT_FIRST, -1);
    CHECK(!SIM(sim_finish_within)(HANG_MS, stuck, sizeof stuck));
    CHECK(strstr(stuck, "a wait for a counter") != NULL);
    SIM(sim_set_one_queue)(false); /* with a queue each the streams go on */
    SIM(sim_finish)();
}

static void a_dead_rank_ends_the_waits_for_it(void) {
    char stuck[1000];
    enum { DEAD = 1 };
    open_ranks(2);
    enqueue_steps(0, NONE, DEAD);
    CHECK(!SIM(sim_finish_within)(HANG_MS, stuck, sizeof stuck));
    __atomic_store_n(&halted, 1, __ATOMIC_RELEASE);
    uint64_t *const counters[] = {&written[DEAD], &posted[DEAD], &taken[DEAD]};
    for (int i = 0; i < 3; i++) __atomic_store_n(counters[i], RELEASED, __ATOMIC_RELEASE);
    float before[UNITS][ELEMS];
    memcpy(before, shards[0], sizeof before);
    CHECK(SIM(sim_finish_within)(LONG_MS, stuck, sizeof stuck));
    CHECK(memcmp(before, shards[0], sizeof before) == 0); /* no update from garbage */
}

int main(int argc, char **argv) {
    setenv("SIM_DEVICES", "3", 1);
    setenv("SIM_IDLE_MS", "1000", 1); /* everything is enqueued within it */
    sim_gpu_load();
    static const struct test_case cases[] = {
        TEST(right_in_all_schedules),
        TEST(wrong_without_one_of_its_waits),
        TEST(in_one_queue_signals_go_before_the_awaits_that_they_answer),
        TEST(a_dead_rank_ends_the_waits_for_it),
        {0},
    };
    return test_main(argc, argv, cases);
}
