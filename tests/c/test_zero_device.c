/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards on the device (csrc/zero/on_device.h) over the simulated GPU: each rank is a thread with a GPU of its own, and
 * the same program runs on the coordinator of the CPU. The computation is made of copies and sums of base/device.h and
 * stream_sum.h, so both must give the same bits in every schedule of compute, gather and sums streams: lazy and eager,
 * with random progress, with one hardware queue. No host waits for a GPU between two steps.
 *
 * The same where NCCL moves the bytes, on one host and over several, also of units of groups that have one each.
 *
 * Each wait of the design is left out in turn (sim_leave_out), and then some schedule must give other bits.
 *
 * test_zero_device seeds 1000 [first seed]: so many schedules with random progress. A failure prints the seed of its
 * batch.
 */
#include <stdatomic.h>

#include "../../csrc/comm/counters.h"
#include "zero_device_rank.h"

/* --- schedules ---------------------------------------------------------------------------------------------------- */

struct number_arg {
    int *number;
};

static zpp_status note_number(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    *((struct number_arg *)arg)->number = SIM(sim_stream_number)(native);
    return ZPP_OK;
}

/* The coordinator's own streams, which nothing but this test asks for. */
#include "../../csrc/zero/internal.h"
#include "../../csrc/zero/on_device.h"

static void note_streams(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_by_nccl *by = &rank->zero->by_nccl;
    int *numbers = &rank->run->numbers[rank->me->rank * STREAMS];
    zpp_stream *const streams[] = {rank->zero->compute, rank->zero->gather, rank->zero->on_device->sums};
    for (int i = 0; i < STREAMS - 1; i++) {
        const struct number_arg arg = {&numbers[i]};
        CHECK_OK(zpp_stream_launch(streams[i], note_number, &arg, sizeof arg, &err));
    }
    numbers[STREAMS - 1] = by->nccl ? SIM(sim_stream_number)(zpp_nccl_stream(by->nccl)) : -1;
    for (int i = 0; i < rank->zero->groups_count; i++) {
        const struct zpp_group *group = rank->zero->groups[i];
        CHECK((group->nccl != NULL) == (by->nccl && group->ranks > 1));
        if (group->nccl) CHECK(zpp_nccl_stream(group->nccl) == zpp_nccl_stream(by->nccl));
    }
    CHECK((zpp_zero_gather_way(rank->zero, NULL) == ZPP_GATHER_NCCL) == (rank->run->shape.hosts != NULL));
    test_join(rank->me);
}

static void set_schedule(struct rank *rank, int number) {
    const struct run *run = rank->run;
    const uint64_t bits = run->lazy_bits[number], seed = run->seed ? run->seed + (uint64_t)number : 0;
    uint64_t lazy = 0;
    test_join(rank->me);
    for (int i = 0; i < run->shape.ranks * STREAMS; i++)
        if (bits >> i & 1 && run->numbers[i] >= 0) lazy |= UINT64_C(1) << run->numbers[i];
    if (rank->me->rank == 0) SIM(sim_set_schedule)(lazy, seed);
    test_join(rank->me);
}

static void run_rank(struct test_rank *me) {
    struct rank rank = {.me = me, .run = me->arg};
    struct run *run = me->arg;
    open_rank(&rank);
    if (!run->shape.on_cpu) note_streams(&rank);
    for (int i = 0; i < run->schedules; i++) {
        fill(&rank);
        if (!run->shape.on_cpu) set_schedule(&rank, i);
        for (int step = 0; step < STEPS; step++) train_step(&rank, step);
        collect_result(&rank);
        compare(&rank);
    }
    close_rank(&rank);
}

static const struct run *mutated; /* NULL: nothing is left out; see below */

/* Return how many schedules have another result than the CPU, or than the first run where norms are measured. */
static int wrong_schedules(const struct shape *shape, const uint64_t *lazy_bits, int schedules, uint64_t seed) {
    static unsigned char wanted[MOST_RANKS * RESULT_BYTES], result[MOST_RANKS * RESULT_BYTES];
    memset(wanted, 0, sizeof wanted);
    memset(result, 0, sizeof result);
    static const uint64_t eager[1];
    struct run first = {.shape = *shape, .schedules = 1, .lazy_bits = eager, .result = wanted};
    first.shape.on_cpu = !shape->measures;
    first.shape.hosts = NULL;
    first.even = shape->hosts && shape->stage == 3;
    run_ranks(shape->ranks, run_rank, &first);
    struct run gpu = {.shape = *shape,
                      .schedules = schedules,
                      .lazy_bits = lazy_bits,
                      .seed = seed,
                      .wanted = wanted,
                      .result = result,
                      .even = first.even};
    mutated = &gpu;
    run_ranks_timeout(shape->ranks, shape->hosts && *shape->hosts ? shape->hosts : NULL, 60 * TEST_SECOND_NS, run_rank,
                      &gpu);
    mutated = NULL;
    return gpu.wrong;
}

enum { SCHEDULES = 10 };

/* All eager, all lazy, each kind of stream alone, and some at random. */
static void draw_schedules(uint64_t *bits, int ranks, uint64_t seed) {
    uint64_t kinds[STREAMS] = {0};
    for (int i = 0; i < ranks * STREAMS; i++) kinds[i % STREAMS] |= UINT64_C(1) << i;
    const uint64_t all = kinds[0] | kinds[1] | kinds[2] | kinds[3];
    const uint64_t first[] = {0, all, kinds[0], kinds[1] | kinds[3], kinds[2], all & ~kinds[0]};
    for (int i = 0; i < SCHEDULES; i++) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        bits[i] = i < 6 ? first[i] : (seed >> 33) & all;
    }
}

static const struct shape shapes[] = {
    {2, 3, false, false, 1 << 20, 0, false, false, 0, false, 0, 0, NULL},
    {3, 3, true, false, 2000, 6000, false, false, 0, false, 0, 0, NULL},
    {2, 3, false, true, 0, 8000, false, false, 0, false, 0, 0, NULL},
    {2, 2, false, false, 0, 0, false, false, 0, false, 0, 0, NULL},
    {3, 2, false, true, 0, 9000, false, false, 0, false, 0, 0, NULL},
    {2, 1, false, false, 0, 0, false, false, 0, false, 0, 0, NULL},
    {3, 1, true, true, 0, 0, false, false, 0, false, 0, 0, NULL},
    {2, 0, false, false, 0, 0, false, false, 0, false, 0, 0, NULL},
    {3, 0, true, false, 0, 0, false, false, 0, false, 0, 0, NULL},
    {2, 2, false, false, 1 << 20, 0, false, false, 0, false, 0, 0, NULL},
    {2, 0, false, false, 1 << 20, 0, false, false, 0, false, 0, 0, NULL},
    {2, 3, false, false, 3000, 0, false, false, 0, false, 0, 0, NULL},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, true, 0, 0, NULL},
    {2, 3, false, false, 1 << 20, 0, false, false, 8, false, 0, 0, NULL},
    {3, 2, false, true, 0, 9000, false, false, 4, false, 0, 0, NULL},
    {3, 3, true, true, 2000, 6000, false, false, 8, false, 0, 0, NULL},
    {2, 3, false, false, 1 << 20, 0, false, true, 0, false, 0, 0, NULL},
    {3, 1, false, true, 0, 0, false, true, 0, false, 0, 0, NULL},
    {2, 0, false, false, 0, 0, false, true, 0, false, 0, 0, NULL},
    {3, 2, false, true, 0, 9000, false, true, 0, false, 0, 0, NULL},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, false, 2, 0, NULL},
    {4, 3, false, false, 2000, 6000, false, false, 0, false, 2, 0, NULL},
    {4, 2, true, true, 0, 9000, false, false, 0, false, 2, 0, NULL},
    {2, 1, false, false, 0, 0, false, false, 0, false, 2, 0, NULL},
    {4, 0, false, false, 0, 0, false, false, 0, false, 2, 0, NULL},
    {4, 3, false, false, 1 << 20, 0, false, false, 8, false, 2, 0, NULL},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, false, 0, 8, NULL},
    {3, 3, true, true, 2000, 6000, false, false, 8, false, 0, 4, NULL},
    {2, 3, false, false, 0, 0, false, false, 0, false, 0, 8, NULL},
    {4, 3, false, false, 1 << 20, 0, false, false, 0, false, 2, 8, NULL},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, false, 0, 0, "ab"}, /* 30 */
    {3, 3, true, false, 2000, 6000, false, false, 0, false, 0, 0, "aab"},
    {2, 3, false, true, 0, 8000, false, false, 0, false, 0, 0, ""},
    {3, 2, false, true, 0, 9000, false, false, 0, false, 0, 0, "aba"},
    {3, 1, true, true, 0, 0, false, false, 0, false, 0, 0, "abc"},
    {2, 0, false, false, 1 << 20, 0, false, false, 0, false, 0, 0, "ab"},
    {4, 0, true, false, 0, 0, false, false, 0, false, 0, 0, "aabb"},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, true, 0, 0, "ab"},
    {3, 2, false, true, 0, 9000, false, true, 0, false, 0, 0, ""},
    {3, 3, true, true, 2000, 6000, false, false, 8, false, 0, 4, "abb"},
    {2, 3, false, false, 3000, 0, false, false, 0, false, 0, 0, "ab"}, /* 40 */
    {2, 2, false, false, 1 << 20, 0, false, false, 0, false, 0, 0, "ab"},
    {4, 3, false, false, 2000, 6000, false, false, 0, false, 2, 0, "aabb"},
    {4, 2, true, true, 0, 9000, false, false, 0, false, 2, 0, ""},
    {2, 1, false, false, 0, 0, false, false, 0, false, 2, 0, "ab"},
    {4, 0, false, false, 0, 0, false, false, 0, false, 2, 0, "aabb"}, /* 45 */
    {4, 3, false, false, 1 << 20, 0, false, false, 8, false, 2, 8, "abab"},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, false, 2, 0, "ab"},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static void has_the_bits_of_the_cpu_in_every_schedule(void) {
    for (size_t i = 0; i < SHAPES; i++) {
        uint64_t bits[SCHEDULES];
        draw_schedules(bits, shapes[i].ranks, i + 1);
        CHECK_EQUAL(wrong_schedules(&shapes[i], bits, SCHEDULES, 0), 0);
        CHECK_EQUAL(wrong_schedules(&shapes[i], bits + 4, 2, i + 1), 0); /* with random progress */
    }
}

/* Schedules with random progress, from a seed on. Those of one batch share ranks and a shape. */
static int run_seeds(uint64_t first, uint64_t count) {
    uint64_t bits[SCHEDULES];
    for (uint64_t seed = first; seed < first + count; seed += SCHEDULES) {
        const struct shape *shape = &shapes[seed / SCHEDULES % SHAPES];
        draw_schedules(bits, shape->ranks, seed);
        const int wrong = wrong_schedules(shape, bits, SCHEDULES, seed);
        if (wrong) {
            fprintf(stderr, "seed %llu: wrong in %d of %d\n", (unsigned long long)seed, wrong, SCHEDULES);
            return 1;
        }
    }
    printf("%llu schedules from seed %llu\n", (unsigned long long)count, (unsigned long long)first);
    return 0;
}

static void ends_with_one_hardware_queue(void) {
    const uint64_t bits[1] = {0};
    SIM(sim_set_one_queue)(true);
    for (size_t i = 0; i < SHAPES; i++) CHECK_EQUAL(wrong_schedules(&shapes[i], bits, 1, 0), 0);
    SIM(sim_set_one_queue)(false);
}

/* --- without one of its waits ------------------------------------------------------------------------------------- */

enum stream_kind { COMPUTE, GATHER, SUMS, BY_NCCL, NO_STREAM = -1 };

/* A wait of the design: for a counter of that word, or of one stream for an event of another. */
static const struct mutant {
    const char *name;
    int word; /* -1: an event */
    int stream, after;
    int shape; /* of the table above, in which it counts */
} mutants[] = {
    {"sums wait for written", ZPP_COUNTER_WRITTEN, NO_STREAM, NO_STREAM, 0},
    {"a bucket waits for taken", ZPP_COUNTER_TAKEN, NO_STREAM, NO_STREAM, 4},
    {"stage 1: a bucket waits for taken", ZPP_COUNTER_TAKEN, NO_STREAM, NO_STREAM, 6},
    {"stage 0: copies wait for taken", ZPP_COUNTER_TAKEN, NO_STREAM, NO_STREAM, 7},
    {"stage 0: a bucket waits for copied", ZPP_COUNTER_COPIED, NO_STREAM, NO_STREAM, 10},
    {"gathers wait for stepped", ZPP_COUNTER_STEPPED, NO_STREAM, NO_STREAM, 0},
    {"copies after a step wait for stepped", ZPP_COUNTER_STEPPED, NO_STREAM, NO_STREAM, 3},
    {"a step waits for read", ZPP_COUNTER_READ, NO_STREAM, NO_STREAM, 0},
    {"a norm waits for measured", ZPP_COUNTER_MEASURED, NO_STREAM, NO_STREAM, 12},
    {"sums wait for quantised copies", ZPP_COUNTER_WRITTEN, NO_STREAM, NO_STREAM, 13},
    {"quantised copies wait for taken", ZPP_COUNTER_TAKEN, NO_STREAM, NO_STREAM, 14},
    {"narrow gradients wait for taken", ZPP_COUNTER_TAKEN, NO_STREAM, NO_STREAM, 17},
    {"compute waits for ready", -1, COMPUTE, GATHER, 0},
    {"a gather waits for its memory", -1, GATHER, COMPUTE, 11},
    {"a step waits for the sums", -1, COMPUTE, SUMS, 0},
    {"compute waits for copies after a step", -1, COMPUTE, GATHER, 9},
    {"gathers wait for quantised copies", ZPP_COUNTER_STEPPED, NO_STREAM, NO_STREAM, 26},
    {"quantised copies wait for read", ZPP_COUNTER_READ, NO_STREAM, NO_STREAM, 26},
    {"exact values wait for computation", -1, GATHER, COMPUTE, 26},
    {"computation waits for exact values", -1, COMPUTE, GATHER, 26},
    {"an exchange waits for the bucket", -1, SUMS, COMPUTE, 30},
    {"NCCL waits for the place of an exchange", -1, BY_NCCL, SUMS, 33},
    {"sums wait for the exchange", -1, SUMS, BY_NCCL, 33},
    {"stage 0: compute waits for the sums of all", -1, COMPUTE, SUMS, 35},
    {"a bucket waits for its exchange", -1, COMPUTE, SUMS, 33},
    {"NCCL waits for the memory of a gather, and for a step", -1, BY_NCCL, GATHER, 30},
    {"a gather waits for a step of this rank", -1, GATHER, COMPUTE, 30},
    {"a gather waits for NCCL", -1, GATHER, BY_NCCL, 30},
    {"compute waits for a gather by NCCL", -1, COMPUTE, GATHER, 40},
    {"compute waits for copies after a step by NCCL", -1, COMPUTE, GATHER, 41},
    {"a norm waits for NCCL", -1, COMPUTE, BY_NCCL, 37},
    {"NCCL waits for the sums of a norm", -1, BY_NCCL, COMPUTE, 37},
};
static const struct mutant *mutant;

static int kind_of(sim_stream stream) {
    const int number = SIM(sim_stream_number)(stream);
    for (int i = 0; i < mutated->shape.ranks * STREAMS; i++)
        if (mutated->numbers[i] == number) return i % STREAMS;
    return NO_STREAM;
}

static bool leave_out(const struct sim_wait *wait) {
    if (!mutated) return false;
    if (wait->counter) return (int)((uintptr_t)wait->counter % 4096 / 64) == mutant->word;
    return mutant->word < 0 && kind_of(wait->stream) == mutant->stream && kind_of(wait->after) == mutant->after;
}

static void is_wrong_without_one_of_its_waits(void) {
    for (size_t i = 0; i < sizeof mutants / sizeof mutants[0]; i++) {
        const struct shape *shape = &shapes[mutants[i].shape];
        uint64_t bits[SCHEDULES];
        draw_schedules(bits, shape->ranks, i + 100);
        mutant = &mutants[i];
        *SIM(sim_leave_out) = leave_out;
        int wrong = 0, schedules = 0;
        for (uint64_t seed = 0; seed < 5 && !wrong; seed++, schedules += SCHEDULES)
            wrong = wrong_schedules(shape, bits, SCHEDULES, seed);
        *SIM(sim_leave_out) = NULL;
        printf("\n  without \"%s\": wrong in %d of %d schedules", mutant->name, wrong, schedules);
        fflush(stdout);
        CHECK(wrong > 0);
    }
}

/* --- faults: the GPU of rank 1 stops in the middle of a backward -------------------------------------------------- */

static atomic_int goes_on;

static bool stop(void *arg) {
    (void)arg;
    return atomic_load(&goes_on);
}

struct fault {
    struct run run;
    bool aborts; /* rank 1 ends the group; else rank 0's wait reaches the timeout */
};

/* Fresh memory of the simulated GPU is 0xff. */
static void check_untouched(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_unit *unit = zpp_zero_unit(rank->zero, 1);
    unsigned char copy[256];
    const unsigned char *grad = zpp_zero_grad_shard(rank->zero, 1, NULL);
    CHECK(grad != NULL && unit->shard_elems * unit->elem_bytes >= sizeof copy);
    CHECK_OK(zpp_stream_copy(rank->compute, copy, grad, sizeof copy, &err));
    settle(rank);
    for (size_t i = 0; i < sizeof copy; i++) CHECK_EQUAL(copy[i], 0xff);
}

static void run_fault(struct test_rank *me) {
    struct fault *fault = me->arg;
    struct rank rank = {.me = me, .run = &fault->run};
    struct zpp_err err = ZPP_ERR_INIT;
    open_rank(&rank);
    fill(&rank);
    forward(&rank, 0);
    if (me->rank == 1) CHECK_EQUAL(SIM(sim_enqueue_attempt)(rank.native, stop, NULL, "a kernel that stops"), 0);
    backward(&rank, 0, 0, true);
    if (me->rank == 1 && fault->aborts) zpp_comm_abort(me->comm, "no space on disk");
    if (me->rank == 0) {
        const uint64_t began_ns = zpp_now_ns();
        settle(&rank);
        CHECK(zpp_now_ns() - began_ns < 5 * TEST_SECOND_NS);
        if (fault->aborts) CHECK_FAILS(zpp_comm_health(me->comm, &err), ZPP_ABORTED, "rank 1 aborted");
        else CHECK_FAILS(zpp_comm_health(me->comm, &err), ZPP_TIMEOUT, "rank 1 of group");
        CHECK_EQUAL(err.rank, 1);
        check_untouched(&rank);
        CHECK_FAILS(zpp_zero_step_begin(rank.zero, 7, NULL, &patience, &err), fault->aborts ? ZPP_ABORTED : ZPP_TIMEOUT,
                    "rank 1");
        atomic_store(&goes_on, 1);
    }
    test_join(me);
    close_rank(&rank);
}

static void a_rank_that_stops_ends_the_waits_for_it(void) {
    for (int number = 0; number < 3; number++) {
        const bool aborts = number > 0;
        const char *hosts = number == 2 ? "ab" : NULL;
        struct fault fault = {.run = {.shape = {.ranks = 2, .stage = 3, .prefetch_bytes = 1 << 20, .hosts = hosts},
                                      .even = hosts != NULL},
                              .aborts = aborts};
        atomic_store(&goes_on, 0);
        SIM(sim_set_schedule)(0, 0);
        run_ranks_timeout(2, hosts, aborts ? 60 * TEST_SECOND_NS : TEST_SECOND_NS, run_fault, &fault);
    }
}

/* With one rank no counter orders gathers after a step, so there is nothing to gather. */
static void one_rank_shards_nothing_on_its_device(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *host, *device;
    zpp_zero *zero;
    int index;
    CHECK_OK(zpp_device_cpu_create(&host, &err));
    CHECK_OK(zpp_device_cuda_create(0, &device, &err));
    const struct zpp_zero_options options = {
        .stage = 3, .device = device, .host = host, .shards = ZPP_SHARDS_ON_DEVICE};
    CHECK_OK(zpp_zero_create(&options, &zero, &err));
    struct zpp_unit_spec spec = {
        .name = "unit0", .params = PARAMS, .param_elems = param_elems[0], .place = ZPP_PLACE_SHARD};
    CHECK_FAILS(zpp_zero_add_unit(zero, &spec, &index, &err), ZPP_INVALID, "cannot shard unit unit0: world size is 1");
    spec.place = ZPP_PLACE_WHOLE;
    CHECK_OK(zpp_zero_add_unit(zero, &spec, &index, &err));
    zpp_zero_destroy(zero); /* before seal */
    zpp_device_destroy(device);
    zpp_device_destroy(host);
}

/* --- which way ---------------------------------------------------------------------------------------------------- */

enum { MOST_BLOCKS = 256 };
struct blocks {
    void *memory[MOST_BLOCKS];
    size_t bytes[MOST_BLOCKS];
    int count;
};

/* All memory of a GPU, so that it can make no page that peers map. */
static void take_all_memory(zpp_device *device, struct blocks *blocks) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (size_t bytes = 1 << 25; bytes >= 256; bytes /= 2)
        while (blocks->count < MOST_BLOCKS &&
               zpp_device_alloc(device, bytes, &blocks->memory[blocks->count], &err) == ZPP_OK)
            blocks->bytes[blocks->count++] = bytes;
    CHECK(blocks->count < MOST_BLOCKS);
}

static void see_way(struct test_rank *me) {
    struct rank rank = {.me = me, .run = &(struct run){.shape = {.stage = 3}}};
    struct blocks blocks = {.count = 0};
    struct zpp_err err = ZPP_ERR_INIT;
    const char *why = NULL;
    open_devices(&rank);
    struct zpp_zero_options options = {
        .stage = 3, .comm = me->comm, .device = rank.device, .host = rank.host, .shards = ZPP_SHARDS_ON_DEVICE};
    CHECK_OK(zpp_zero_create(&options, &rank.zero, &err));
    CHECK_EQUAL(zpp_zero_gather_way(rank.zero, &why), me->host[0] ? ZPP_GATHER_NCCL : ZPP_GATHER_COPY);
    CHECK(strstr(why, me->host[0] ? "on several hosts" : "map each other's memory"));
    test_join(me);
    zpp_zero_destroy(rank.zero);
    if (me->rank == 1) take_all_memory(rank.device, &blocks);
    if (!me->host[0]) CHECK_OK(zpp_zero_create(&options, &rank.zero, &err));
    while (blocks.count-- > 0)
        zpp_device_free(rank.device, blocks.memory[blocks.count], blocks.bytes[blocks.count]);
    if (!me->host[0]) {
        CHECK_EQUAL(zpp_zero_gather_way(rank.zero, &why), ZPP_GATHER_NCCL);
        CHECK(strstr(why, me->rank == 1 ? "no room for" : "rank 1 of group"));
        test_join(me);
        zpp_zero_destroy(rank.zero);
    } else {
        options.gather = ZPP_GATHER_COPY;
        CHECK_FAILS(zpp_zero_create(&options, &rank.zero, &err), ZPP_INVALID, "the GPUs of 2 hosts");
    }
    test_join(me);
    zpp_device_destroy(rank.device);
    zpp_device_destroy(rank.host);
}

static void copies_where_all_ranks_map_all(void) {
    run_ranks(2, see_way, NULL);
    run_hosts("ab", see_way, NULL);
}

int main(int argc, char **argv) {
    setenv("SIM_DEVICE_BYTES", "67108864", 1);
    sim_gpu_load_for_threads("4");
    static const struct test_case cases[] = {
        TEST(has_the_bits_of_the_cpu_in_every_schedule), TEST(ends_with_one_hardware_queue),
        TEST(is_wrong_without_one_of_its_waits),         TEST(a_rank_that_stops_ends_the_waits_for_it),
        TEST(one_rank_shards_nothing_on_its_device),     TEST(copies_where_all_ranks_map_all),
        {0},
    };
    if (argc > 1 && !strcmp(argv[1], "seeds"))
        return run_seeds(argc > 3 ? strtoull(argv[3], NULL, 10) : 1, argc > 2 ? strtoull(argv[2], NULL, 10) : 1000);
    return test_main(argc, argv, cases);
}
