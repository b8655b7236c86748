/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange of rows in memory of GPUs (csrc/comm/rows_device.c) over the simulated GPU: each rank is a thread with a
 * GPU of its own. The same tokens go through an exchange in host memory, and all results must have its bits in every
 * schedule of the ranks' streams: lazy and eager, with random progress, with one hardware queue.
 */
#include <stdatomic.h>

#include "../../csrc/comm/rows.h"
#include "mix.h"
#include "ranks.h"
#include "sim_gpu.h"

enum {
    MOST_RANKS = 3,
    WIDTH = 40,
    K = 2,
    EXPERTS_A_RANK = 2,
    MOST_TOKENS = 24,
    MOST_ROWS = MOST_RANKS * MOST_TOKENS * K,
    ROUNDS = 3,
    ELEM_BYTES = 4,
    DEVICE_BYTES = 64 << 20,
    NUMBERS = ZPP_ROWS_NUMBERS + 3 * MOST_RANKS + 1,
};
static const struct zpp_wait patience = {60000000000u, NULL, NULL};

/* What one call of a layer has: in host memory, or in device memory but for `numbers`. */
struct arrays {
    unsigned char x[MOST_TOKENS * WIDTH * ELEM_BYTES], grad_y[MOST_TOKENS * WIDTH * ELEM_BYTES];
    float weights[MOST_TOKENS * K];
    int64_t slots[MOST_TOKENS * K];
    struct zpp_moe_taken taken[MOST_ROWS];
    /* results */
    unsigned char rows[MOST_ROWS * WIDTH * ELEM_BYTES], y[MOST_TOKENS * WIDTH * ELEM_BYTES];
    unsigned char grad_made[MOST_ROWS * WIDTH * ELEM_BYTES], grad_x[MOST_TOKENS * WIDTH * ELEM_BYTES];
    float grad_weights[MOST_TOKENS * K], dots[MOST_ROWS];
};

struct run {
    int ranks;
    zpp_dtype dtype;
    const uint64_t *lazy; /* schedules: a bit a rank */
    int schedules;
    uint64_t seed;
    atomic_int wrong;
    int numbers[MOST_RANKS]; /* of the ranks' streams */
};

struct rank {
    struct test_rank *me;
    struct run *run;
    zpp_device *device;
    zpp_rows *rows, *host_rows;
    zpp_stream *compute;
    sim_stream native;
    zpp_event *idle;
    struct arrays *on_device, *host, *wanted;
    int64_t numbers[NUMBERS];
    size_t tokens;
    int32_t chosen[MOST_TOKENS * K];
};

/* --- set-up ------------------------------------------------------------------------------------------------------- */

static void *host_memory(size_t bytes) {
    void *memory = calloc(1, bytes);
    CHECK(memory != NULL);
    return memory;
}

static void open_rank(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    void *memory;
    bool opened = false;
    uint32_t layer;
    CHECK_OK(zpp_device_cuda_create(rank->me->rank, &rank->device, &err));
    CHECK_OK(zpp_stream_create(rank->device, ZPP_STREAM_HOST, "compute", &rank->compute, &err));
    CHECK_OK(zpp_event_create(rank->device, &rank->idle, &err));
    CHECK_EQUAL(SIM(sim_stream_create)(rank->me->rank, &rank->native), 0);
    zpp_stream_adopt(rank->compute, rank->native);
    rank->run->numbers[rank->me->rank] = SIM(sim_stream_number)(rank->native);
    CHECK_OK(zpp_device_alloc(rank->device, sizeof *rank->on_device, &memory, &err));
    rank->on_device = memory;
    rank->host = host_memory(sizeof *rank->host);
    rank->wanted = host_memory(sizeof *rank->wanted);
    CHECK_OK(zpp_rows_create(rank->me->comm, &rank->rows, &err));
    CHECK_OK(zpp_rows_create(rank->me->comm, &rank->host_rows, &err));
    CHECK_OK(zpp_rows_add_layer(rank->rows, "blocks.0", &layer, &err));
    CHECK_OK(zpp_rows_add_layer(rank->host_rows, "blocks.0", &layer, &err));
    CHECK_OK(zpp_rows_open_device(rank->rows, rank->device, &patience, &opened, &err));
    CHECK(opened);
}

static void close_rank(struct rank *rank) {
    zpp_rows_destroy(rank->rows);
    zpp_rows_destroy(rank->host_rows);
    zpp_stream_destroy(rank->compute);
    zpp_event_destroy(rank->idle);
    CHECK_EQUAL(SIM(sim_stream_destroy)(rank->native), 0);
    zpp_device_free(rank->device, rank->on_device, sizeof *rank->on_device);
    zpp_device_destroy(rank->device);
    free(rank->host);
    free(rank->wanted);
}

static void settle(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_event_record(rank->idle, rank->compute, &err));
    CHECK_OK(zpp_event_sync(rank->idle, &patience, &err));
}

/* --- one layer, forward and backward ------------------------------------------------------------------------------ */

/* Numbers of every dtype that are finite there, and choices of which some are dropped. Later rounds have more tokens,
 * so that the published memory grows. */
static void make_tokens(struct rank *rank, uint32_t round) {
    const uint32_t base = mix(round * 31u + (uint32_t)rank->me->rank);
    uint16_t *const halves[] = {(uint16_t *)(void *)rank->host->x, (uint16_t *)(void *)rank->host->grad_y};
    rank->tokens = round == 0 && rank->me->rank == 1 ? 0 : 3 + base % 4 + 7 * round;
    CHECK(rank->tokens <= MOST_TOKENS);
    for (int which = 0; which < 2; which++)
        for (size_t i = 0; i < sizeof rank->host->x / 2; i++)
            halves[which][i] = (uint16_t)(0x3c00 + mix(base + 777u * (uint32_t)which + (uint32_t)i) % 0x180);
    for (uint32_t a = 0; a < MOST_TOKENS * K; a++) {
        rank->chosen[a] = (int32_t)(mix(base + 555 + a) % (uint32_t)(rank->me->ranks * EXPERTS_A_RANK + 1)) - 1;
        rank->host->weights[a] = (float)(mix(base + 999 + a) % 97) / 64.0f;
    }
}

static struct zpp_rows_dispatch dispatch_of(const struct rank *rank) {
    return (struct zpp_rows_dispatch){.tokens = rank->tokens,
                                      .width_elems = WIDTH,
                                      .k = K,
                                      .experts = (size_t)rank->me->ranks * EXPERTS_A_RANK,
                                      .dtype = rank->run->dtype,
                                      .x = rank->host->x,
                                      .chosen = rank->chosen};
}

/* What comes after the rows are there: experts that change nothing. */
static void rest(const struct rank *rank, zpp_rows *rows, struct arrays *at, int64_t *numbers,
                 const struct zpp_rows_by *by) {
    struct zpp_err err = ZPP_ERR_INIT;
    (void)rank;
    const struct zpp_rows_plan plan = {numbers, NULL, at->taken, at->slots};
    const struct zpp_rows_grads grads = {at->grad_y, at->weights, true, at->rows, at->grad_made, at->grad_weights,
                                         at->dots};
    CHECK_OK(zpp_rows_combine(rows, &plan, at->rows, at->weights, at->y, by, &patience, &err));
    CHECK_OK(zpp_rows_combine_backward(rows, &plan, &grads, by, &patience, &err));
    CHECK_OK(zpp_rows_dispatch_backward(rows, &plan, at->grad_made, at->grad_x, by, &patience, &err));
}

static void run_on_host(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct arrays *at = rank->wanted;
    const struct zpp_rows_dispatch dispatch = dispatch_of(rank);
    int64_t numbers[NUMBERS];
    int32_t ends[EXPERTS_A_RANK];
    size_t here;
    *at = *rank->host;
    const struct zpp_rows_plan plan = {numbers, ends, at->taken, at->slots};
    CHECK_OK(zpp_rows_dispatch_begin(rank->host_rows, &dispatch, NULL, &patience, &here, &err));
    CHECK(here <= MOST_ROWS);
    CHECK_OK(zpp_rows_dispatch_end(rank->host_rows, &plan, at->rows, NULL, &err));
    rest(rank, rank->host_rows, at, numbers, NULL);
    memset(at->dots, 0, sizeof at->dots);
}

/* The plan is in the host's arrays then, and on its way to the device. */
static void plan_on_device(struct rank *rank, const struct zpp_rows_by *by) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_rows_dispatch dispatch = dispatch_of(rank);
    int32_t ends[EXPERTS_A_RANK];
    size_t here;
    const struct zpp_rows_plan plan = {rank->numbers, ends, rank->host->taken, rank->host->slots};
    CHECK_OK(zpp_rows_dispatch_begin(rank->rows, &dispatch, by, &patience, &here, &err));
    CHECK_OK(zpp_rows_dispatch_end(rank->rows, &plan, NULL, by, &err));
    CHECK_OK(zpp_stream_copy(rank->compute, rank->on_device, rank->host, sizeof *rank->host, &err));
}

static void run_on_device(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct arrays *at = rank->on_device;
    const struct zpp_rows_by by = {NULL, true, rank->native};
    plan_on_device(rank, &by);
    const struct zpp_rows_plan plan = {rank->numbers, NULL, at->taken, NULL};
    CHECK_OK(zpp_rows_take(rank->rows, &plan, at->x, at->rows, &by, &patience, &err));
    rest(rank, rank->rows, at, rank->numbers, &by);
}

static void compare(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct arrays *found = host_memory(sizeof *found);
    CHECK_OK(zpp_stream_fill(rank->compute, rank->on_device->dots, 0, sizeof found->dots, &err));
    CHECK_OK(zpp_stream_copy(rank->compute, found, rank->on_device, sizeof *found, &err));
    settle(rank);
    if (memcmp(found, rank->wanted, sizeof *found) != 0) atomic_fetch_add(&rank->run->wrong, 1);
    free(found);
}

/* --- schedules ---------------------------------------------------------------------------------------------------- */

static void set_schedule(struct rank *rank, int number) {
    const struct run *run = rank->run;
    uint64_t lazy = 0;
    test_join(rank->me);
    for (int r = 0; r < run->ranks; r++)
        if (run->lazy[number] >> r & 1) lazy |= UINT64_C(1) << run->numbers[r];
    if (rank->me->rank == 0) SIM(sim_set_schedule)(lazy, run->seed);
    test_join(rank->me);
}

static void run_rank(struct test_rank *me) {
    struct rank rank = {.me = me, .run = me->arg};
    open_rank(&rank);
    for (int i = 0; i < rank.run->schedules; i++) {
        set_schedule(&rank, i);
        for (uint32_t round = 0; round < ROUNDS; round++) {
            make_tokens(&rank, round);
            run_on_host(&rank);
            run_on_device(&rank);
            test_join(me); /* nobody has run what others wait for yet, if its stream is lazy */
            compare(&rank);
        }
    }
    test_join(me);
    close_rank(&rank);
}

enum { SCHEDULES = 8 };
static const uint64_t lazy[SCHEDULES] = {0, 1, 2, 3, 4, 5, 6, 7};

static int wrong_results(int ranks, zpp_dtype dtype, int schedules, uint64_t seed) {
    struct run run = {.ranks = ranks, .dtype = dtype, .lazy = lazy, .schedules = schedules, .seed = seed};
    run_ranks(ranks, run_rank, &run);
    return run.wrong;
}

static void has_the_bits_of_host_memory_in_every_schedule(void) {
    static const zpp_dtype dtypes[] = {ZPP_F32, ZPP_BF16, ZPP_F16};
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(wrong_results(2, dtypes[i], 4, 0), 0);
        CHECK_EQUAL(wrong_results(3, dtypes[i], SCHEDULES, (uint64_t)i), 0);
    }
    CHECK_EQUAL(wrong_results(1, ZPP_F32, 2, 0), 0);
}

static void ends_with_one_hardware_queue(void) {
    SIM(sim_set_one_queue)(true);
    CHECK_EQUAL(wrong_results(3, ZPP_F32, 1, 0), 0);
    SIM(sim_set_one_queue)(false);
}

/* --- without its wait --------------------------------------------------------------------------------------------- */

static bool leave_out(const struct sim_wait *wait) { return wait->counter != NULL; }

static void is_wrong_without_its_wait(void) {
    *SIM(sim_leave_out) = leave_out;
    const int wrong = wrong_results(3, ZPP_F32, SCHEDULES, 0);
    *SIM(sim_leave_out) = NULL;
    printf("\n  without \"kernels of rows wait for written\": %d wrong results", wrong);
    CHECK(wrong > 0);
}

/* --- faults: the GPU of rank 1 stops before its tokens are written ------------------------------------------------ */

static atomic_int goes_on;

static bool stop(void *arg) {
    (void)arg;
    return atomic_load(&goes_on);
}

/* Rank 0 has enqueued what waits for rank 1. Memory that was never written is 0xff. */
static void run_fault(struct test_rank *me) {
    struct rank rank = {.me = me, .run = me->arg};
    struct zpp_err err = ZPP_ERR_INIT;
    unsigned char row[WIDTH * ELEM_BYTES];
    open_rank(&rank);
    const struct zpp_rows_by by = {NULL, true, rank.native};
    make_tokens(&rank, 1);
    plan_on_device(&rank, &by);
    CHECK_OK(zpp_stream_fill(rank.compute, rank.on_device->rows, 0xff, sizeof row, &err));
    if (me->rank == 1) CHECK_EQUAL(SIM(sim_enqueue_attempt)(rank.native, stop, NULL, "a kernel that stops"), 0);
    const struct zpp_rows_plan plan = {rank.numbers, NULL, rank.on_device->taken, NULL};
    CHECK_OK(zpp_rows_take(rank.rows, &plan, rank.on_device->x, rank.on_device->rows, &by, &patience, &err));
    if (me->rank == 0) {
        const uint64_t began_ns = zpp_now_ns();
        CHECK_OK(zpp_stream_copy(rank.compute, row, rank.on_device->rows, sizeof row, &err));
        settle(&rank);
        CHECK(zpp_now_ns() - began_ns < 10 * TEST_SECOND_NS);
        for (size_t i = 0; i < sizeof row; i++) CHECK_EQUAL(row[i], 0xff);
        CHECK_FAILS(zpp_rows_take(rank.rows, &plan, rank.on_device->x, rank.on_device->rows, &by, &patience, &err),
                    ZPP_TIMEOUT, "rank 1 of group \"test\"");
        CHECK(strstr(err.text, "the rows of an exchange"));
        CHECK_EQUAL(err.rank, 1);
        atomic_store(&goes_on, 1);
    }
    test_join(me);
    close_rank(&rank);
}

static void a_rank_that_stops_ends_the_wait_for_it(void) {
    struct run run = {.ranks = 2, .dtype = ZPP_F32};
    atomic_store(&goes_on, 0);
    SIM(sim_set_schedule)(0, 0);
    run_ranks_timeout(2, NULL, 2 * TEST_SECOND_NS, run_fault, &run);
}

/* --- where GPUs cannot share memory ------------------------------------------------------------------------------- */

/* Rank 1 has no memory left: nobody uses the device, each knows why, and rows go on in host memory. */
static void run_refused(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct rank rank = {.me = me, .run = me->arg, .host = host_memory(sizeof *rank.host)};
    uint32_t layer;
    void *memory = NULL;
    bool opened = true;
    rank.wanted = host_memory(sizeof *rank.wanted);
    CHECK_OK(zpp_device_cuda_create(me->rank, &rank.device, &err));
    if (me->rank == 1) CHECK_OK(zpp_device_alloc(rank.device, DEVICE_BYTES - 8192, &memory, &err));
    CHECK_OK(zpp_rows_create(me->comm, &rank.host_rows, &err));
    CHECK_OK(zpp_rows_add_layer(rank.host_rows, "blocks.0", &layer, &err));
    CHECK_OK(zpp_rows_open_device(rank.host_rows, rank.device, &patience, &opened, &err));
    CHECK(!opened);
    CHECK_EQUAL(err.status, me->rank == 1 ? ZPP_NOMEM : ZPP_NOT_BUILT);
    CHECK(strstr(err.text, me->rank == 1 ? "memory that ranks share" : "rank 1 of group \"test\" has no memory left"));
    make_tokens(&rank, 1);
    run_on_host(&rank);
    const struct zpp_rows_dispatch dispatch = dispatch_of(&rank);
    const struct zpp_rows_by by = {NULL, true, NULL};
    size_t here;
    CHECK_FAILS(zpp_rows_dispatch_begin(rank.host_rows, &dispatch, &by, &patience, &here, &err), ZPP_STATE,
                "rows of a GPU before zpp_rows_open_device");
    test_join(me);
    zpp_rows_destroy(rank.host_rows);
    if (memory) zpp_device_free(rank.device, memory, DEVICE_BYTES - 8192);
    zpp_device_destroy(rank.device);
    free(rank.host);
    free(rank.wanted);
}

static void without_memory_on_one_rank_rows_cross_on_the_host(void) {
    struct run run = {.ranks = 2, .dtype = ZPP_F32};
    run_ranks(2, run_refused, &run);
}

int main(int argc, char **argv) {
    setenv("SIM_DEVICE_BYTES", "67108864", 1); /* DEVICE_BYTES */
    sim_gpu_load_for_threads("3");
    static const struct test_case cases[] = {
        TEST(has_the_bits_of_host_memory_in_every_schedule),
        TEST(ends_with_one_hardware_queue),
        TEST(is_wrong_without_its_wait),
        TEST(a_rank_that_stops_ends_the_wait_for_it),
        TEST(without_memory_on_one_rank_rows_cross_on_the_host),
        {0},
    };
    return test_main(argc, argv, cases);
}
