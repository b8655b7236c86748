/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards on the device (csrc/zero/on_device.h) over the simulated GPU: each rank is a thread with a GPU of its own, and
 * the same program runs on the coordinator of the CPU. The computation is made of copies and sums of base/device.h and
 * stream_sum.h, so both must give the same bits in every schedule of compute, gather and sums streams: lazy and eager,
 * with random progress, with one hardware queue. No host waits for a GPU between two steps.
 *
 * Each wait of the design is left out in turn (sim_leave_out), and then some schedule must give other bits.
 *
 * test_zero_device seeds 1000 [first seed]: so many schedules with random progress. A failure prints the seed of its
 * batch.
 */
#include <stdatomic.h>

#include "../../csrc/comm/stream_sum.h"
#include "../../csrc/comm/counters.h"
#include "../../csrc/zero/step_ahead.h"
#include "../../csrc/zero/zero.h"
#include "ranks.h"
#include "sim_gpu.h"

enum {
    MOST_RANKS = 4,
    UNITS = 5,
    PARAMS = 3,
    STEPS = 3,
    STATE = 32,
    STREAMS = 3,
    MOST_ELEMS = 4096,
    MOST_UNITS_BYTES = 8
};
static const struct zpp_wait patience = {60000000000u, NULL, NULL};
static const size_t param_elems[UNITS][PARAMS] = {
    {160, 256, 132}, {1200, 128, 201}, {280, 128, 800}, {128, 180, 363}, {256, 520, 128}};

struct shape {
    int ranks, stage;
    bool narrow;     /* bf16 */
    bool each_micro; /* every backward reduces; else gradients are held back */
    size_t prefetch_bytes, bucket_bytes;
    bool on_cpu;
    bool travels_narrow; /* gradients add in fp32 and travel in bf16 */
    int grads_bits;      /* 8 or 4: gradients travel quantised */
    bool measures; /* the norm of all ranks goes into what is computed next; there is no run on the CPU to compare */
    int parts;     /* units 1 and 3 differ between so many groups of ranks; 0: no unit does */
    int params_bits; /* 8 or 4: parameters travel quantised */
};

/* What all ranks share in a run. */
struct run {
    struct shape shape;
    const uint64_t *lazy_bits; /* schedules, one bit a stream; NULL: one on the CPU */
    int schedules;
    uint64_t seed;
    unsigned char *wanted, *result; /* [MOST_RANKS * RESULT_BYTES]; wanted NULL: nothing is compared */
    int wrong;
    int numbers[MOST_RANKS * STREAMS]; /* of the simulated streams */
};
enum { RESULT_BYTES = UNITS * MOST_ELEMS * 4 };

struct rank {
    struct test_rank *me;
    struct run *run;
    zpp_device *host, *device;
    zpp_zero *zero;
    zpp_event *idle;
    void *state, *grads[UNITS][PARAMS], *initial[UNITS];
    zpp_stream *compute;
    sim_stream native; /* that compute follows */
    struct zpp_stepper stepper;
    struct zpp_step_unit units[UNITS];
    zpp_step_ahead *ahead; /* NULL: nothing is measured */
};

static zpp_dtype dtype_of(const struct shape *shape) { return shape->narrow ? ZPP_BF16 : ZPP_F32; }

/* --- set-up ------------------------------------------------------------------------------------------------------- */

static void open_devices(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_device_cpu_create(&rank->host, &err));
    if (rank->run->shape.on_cpu) CHECK_OK(zpp_device_cpu_create(&rank->device, &err));
    else CHECK_OK(zpp_device_cuda_create(rank->me->rank, &rank->device, &err));
}

/* The number of the group in which this rank has another part of a unit than its neighbour; 0: all ranks. */
static int add_group(struct rank *rank) {
    const struct shape *shape = &rank->run->shape;
    struct zpp_err err = ZPP_ERR_INIT;
    int part_of[MOST_RANKS], group = 0;
    for (int r = 0; r < shape->ranks && shape->parts; r++) part_of[r] = r % shape->parts;
    const struct zpp_group_spec spec = {"parts", part_of, 0.0};
    if (shape->parts) CHECK_OK(zpp_zero_add_group(rank->zero, &spec, &group, &err));
    return group;
}

static void add_units(struct rank *rank) {
    const struct shape *shape = &rank->run->shape;
    struct zpp_err err = ZPP_ERR_INIT;
    const int group = add_group(rank);
    for (int u = 0; u < UNITS; u++) {
        const bool whole = shape->stage < 3 || u == 0; /* a small unit is not sharded */
        char name[16];
        int index;
        snprintf(name, sizeof name, "unit%d", u);
        const struct zpp_unit_spec spec = {.name = name,
                                           .dtype = dtype_of(shape),
                                           .params = PARAMS,
                                           .param_elems = param_elems[u],
                                           .trainable = true,
                                           .group = u % 2 ? group : 0,
                                           .place = whole ? ZPP_PLACE_WHOLE : ZPP_PLACE_SHARD,
                                           .grad_dtype = shape->travels_narrow ? ZPP_F32 : dtype_of(shape),
                                           .wire_dtype = shape->travels_narrow ? ZPP_BF16 : dtype_of(shape)};
        CHECK_OK(zpp_zero_add_unit(rank->zero, &spec, &index, &err));
    }
}

static void *device_memory(struct rank *rank, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    void *memory;
    CHECK_OK(zpp_device_alloc(rank->device, bytes, &memory, &err));
    return memory;
}

static void settle(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_event_record(rank->idle, rank->compute, &err));
    CHECK_OK(zpp_event_sync(rank->idle, &patience, &err));
}

/* The same values on all ranks of a group, small and of both signs, exact in bf16. */
static void make_initial(struct rank *rank) {
    for (int u = 0; u < UNITS; u++) {
        const struct zpp_unit *unit = zpp_zero_unit(rank->zero, u);
        unsigned char *values = calloc(unit->elems, unit->elem_bytes);
        CHECK(values != NULL && unit->elems <= MOST_ELEMS);
        for (size_t i = 0; i < unit->elems; i++) {
            const float value = (float)((int)((i * 7 + (size_t)(u * 13 + unit->group->part * 5)) % 23) - 11) / 16;
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            if (unit->elem_bytes == 4) ((uint32_t *)(void *)values)[i] = bits;
            else ((uint16_t *)(void *)values)[i] = (uint16_t)(bits >> 16);
        }
        rank->initial[u] = values;
    }
}

static void open_ahead(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (int u = 0; u < UNITS; u++) rank->units[u].unit = zpp_zero_unit(rank->zero, u);
    rank->stepper = (struct zpp_stepper){.zero = rank->zero, .units = rank->units, .units_count = UNITS};
    CHECK(zpp_step_ahead_works(rank->zero));
    CHECK_OK(zpp_step_ahead_create(&rank->stepper, 1.0, 0, &patience, &rank->ahead, &err));
}

static void open_rank(struct rank *rank) {
    const struct shape *shape = &rank->run->shape;
    struct zpp_err err = ZPP_ERR_INIT;
    open_devices(rank);
    const struct zpp_zero_options options = {.stage = shape->stage,
                                             .comm = rank->me->comm,
                                             .device = rank->device,
                                             .host = shape->on_cpu ? NULL : rank->host,
                                             .shards = ZPP_SHARDS_ON_DEVICE,
                                             .prefetch_bytes = shape->prefetch_bytes,
                                             .bucket_bytes = shape->bucket_bytes};
    CHECK_OK(zpp_zero_create(&options, &rank->zero, &err));
    CHECK_OK(zpp_zero_set_wire(rank->zero, shape->params_bits, shape->grads_bits, 64, &err));
    rank->compute = zpp_zero_compute(rank->zero);
    if (!shape->on_cpu) {
        CHECK_EQUAL(SIM(sim_stream_create)(rank->me->rank, &rank->native), 0);
        zpp_stream_adopt(rank->compute, rank->native);
    }
    add_units(rank);
    CHECK_OK(zpp_event_create(rank->device, &rank->idle, &err));
    CHECK_OK(zpp_zero_seal(rank->zero, &err));
    zpp_zero_set_grad_scale(rank->zero, 0.5);
    rank->state = device_memory(rank, STATE * 4);
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < PARAMS; p++) rank->grads[u][p] = device_memory(rank, param_elems[u][p] * 4);
    make_initial(rank);
    if (shape->measures) open_ahead(rank);
}

static void close_rank(struct rank *rank) {
    settle(rank);
    test_join(rank->me); /* peers may still read this rank's memory */
    zpp_step_ahead_destroy(rank->ahead);
    zpp_device_free(rank->device, rank->state, STATE * 4);
    for (int u = 0; u < UNITS; u++) {
        for (int p = 0; p < PARAMS; p++) zpp_device_free(rank->device, rank->grads[u][p], param_elems[u][p] * 4);
        free(rank->initial[u]);
    }
    zpp_event_destroy(rank->idle);
    zpp_zero_destroy(rank->zero);
    if (rank->native) SIM(sim_stream_destroy)(rank->native);
    zpp_device_destroy(rank->device);
    zpp_device_destroy(rank->host);
}

/* Write the values that a run begins with: outside of a step, as a checkpoint does. */
static void fill(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (int u = 0; u < UNITS; u++) {
        const struct zpp_unit *unit = zpp_zero_unit(rank->zero, u);
        const unsigned char *values = rank->initial[u];
        const bool whole = unit->place == ZPP_PLACE_WHOLE;
        const size_t shard_bytes = unit->shard_elems * unit->elem_bytes;
        CHECK_OK(zpp_stream_copy(rank->compute, whole ? unit->whole : unit->shard,
                                 whole ? values : values + (size_t)unit->group->rank * shard_bytes,
                                 whole ? unit->elems * unit->elem_bytes : shard_bytes, &err));
    }
    CHECK_OK(zpp_stream_fill(rank->compute, rank->state, 0, STATE * 4, &err));
    settle(rank);
    CHECK_OK(zpp_zero_publish(rank->zero, &err));
    test_join(rank->me);
}

/* --- the computation ---------------------------------------------------------------------------------------------- */

static void add_up(struct rank *rank, void *to, const void *from, size_t elems, float scale, bool accumulate) {
    struct zpp_err err = ZPP_ERR_INIT;
    const zpp_dtype dtype = dtype_of(&rank->run->shape);
    const struct zpp_sum_op sum = {.dst = to,
                                   .src = &from,
                                   .sources = 1,
                                   .elems = elems,
                                   .scale = scale,
                                   .dtype = dtype,
                                   .dst_dtype = dtype,
                                   .accumulate = accumulate};
    CHECK_OK(zpp_stream_sum(rank->compute, &sum, &err));
}

static unsigned char *param_of(const struct zpp_unit *unit, int p) {
    return unit->whole + unit->offset_elems[p] * unit->elem_bytes;
}

static void need(struct rank *rank, int u, enum zpp_phase phase) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_zero_need(rank->zero, u, phase, &patience, &err));
}

static void release(struct rank *rank, int u) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_zero_release(rank->zero, u, &err));
}

static void forward(struct rank *rank, int step) {
    for (int u = 0; u < UNITS; u++) {
        const struct zpp_unit *unit = zpp_zero_unit(rank->zero, u);
        need(rank, u, ZPP_PHASE_FORWARD);
        for (int p = 0; p < PARAMS; p++)
            add_up(rank, rank->state, param_of(unit, p), STATE, 0.125f * (float)(1 + (step + p) % 3), true);
        zpp_zero_count_use(rank->zero, u, false);
        release(rank, u);
    }
}

static bool has_gradient(int rank, int u, int p, int step, int micro) {
    return u == 1 || (rank * 3 + u * 5 + p * 7 + step * 11 + micro * 13) % 4 != 0;
}

static void give_gradients(struct rank *rank, int u, int step, int micro) {
    const int r = rank->me->rank;
    const struct zpp_unit *unit = zpp_zero_unit(rank->zero, u);
    struct zpp_err err = ZPP_ERR_INIT;
    for (int p = 0; p < PARAMS; p++) {
        void *grad = rank->grads[u][p];
        if (!has_gradient(r, u, p, step, micro)) continue;
        add_up(rank, grad, param_of(unit, p), param_elems[u][p], 0.25f * (float)(r + 1), false);
        add_up(rank, grad, rank->state, STATE, 0.0625f, true);
        /* stage 0: autograd adds to the gradient where it lies */
        CHECK_OK(zpp_zero_grad(rank->zero, u, (size_t)p, grad, false, &patience, &err));
    }
}

static void backward(struct rank *rank, int step, int micro, bool reduce) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_zero_backward_begin(rank->zero, reduce, &err));
    for (int u = UNITS - 1; u >= 0; u--) {
        need(rank, u, ZPP_PHASE_BACKWARD);
        give_gradients(rank, u, step, micro);
        release(rank, u);
    }
    CHECK_OK(zpp_zero_backward_end(rank->zero, &patience, &err));
    CHECK_OK(zpp_zero_end_pass(rank->zero, &err));
}

/* p -= g / 8, of this rank's pieces. */
static void update(struct rank *rank) {
    const bool whole = rank->run->shape.stage == 0;
    for (int u = 0; u < UNITS; u++) {
        const struct zpp_unit *unit = zpp_zero_unit(rank->zero, u);
        const uint8_t *present = NULL;
        const unsigned char *grad = zpp_zero_grad_shard(rank->zero, u, &present);
        const int shard = whole ? 0 : unit->group->rank;
        const size_t begin = (size_t)shard * unit->shard_elems;
        struct zpp_unit shape = *unit;
        struct zpp_piece pieces[PARAMS];
        if (whole) shape.shard_elems = shape.elems;
        const size_t count = grad ? zpp_unit_pieces(&shape, shard, pieces) : 0;
        for (size_t i = 0; i < count; i++) {
            const size_t at = (pieces[i].offset_elems - begin) * unit->elem_bytes;
            if (!present[pieces[i].param]) continue;
            add_up(rank, (whole ? unit->whole : unit->shard) + at, grad + at, pieces[i].elems, -0.125f, true);
        }
    }
}

/* Reads before a step that no gradient waits for. Where parameters travel quantised, the exact values are read, too. */
static void evaluate(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (int u = 0; u < UNITS; u++) {
        need(rank, u, ZPP_PHASE_EVAL);
        const unsigned char *param = param_of(zpp_zero_unit(rank->zero, u), 1);
        add_up(rank, rank->state, param, STATE, 0.25f, true);
        CHECK_OK(zpp_zero_make_exact(rank->zero, u, &err));
        if (rank->run->shape.params_bits) add_up(rank, rank->state, param, STATE, 0.125f, true);
        release(rank, u);
    }
    CHECK_OK(zpp_zero_end_pass(rank->zero, &err));
}

/* The square root of the sums of all ranks, at once in what is computed next. */
static void measure(struct rank *rank) {
    const struct zpp_clip_rule rule = {.scale = 1.0};
    struct zpp_err err = ZPP_ERR_INIT;
    if (!rank->ahead) return;
    CHECK_OK(zpp_step_ahead_measure(rank->ahead, &rule, &patience, &err));
    add_up(rank, rank->state, &zpp_step_ahead_record(rank->ahead)->norm_f32, 1, 0.001f, true);
}

static void train_step(struct rank *rank, int step) {
    const struct shape *shape = &rank->run->shape;
    const int micros = shape->stage == 0 ? 1 : 1 + step % 2;
    struct zpp_err err = ZPP_ERR_INIT;
    for (int micro = 0; micro < micros; micro++) {
        forward(rank, step);
        backward(rank, step, micro, micro == micros - 1 || shape->each_micro);
    }
    evaluate(rank);
    measure(rank);
    CHECK_OK(zpp_zero_step_begin(rank->zero, 7, NULL, &patience, &err));
    update(rank);
    CHECK_OK(zpp_zero_step_end(rank->zero, false, &patience, &err));
    zpp_zero_clear_grads(rank->zero);
}

/* --- results ------------------------------------------------------------------------------------------------------ */

/* Of each rank, its parameters without what lies between them: whole units, and shards. */
static void collect_result(struct rank *rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    unsigned char *at = rank->run->result + (size_t)rank->me->rank * RESULT_BYTES;
    unsigned char *copy = malloc(MOST_ELEMS * 4);
    CHECK(copy != NULL);
    for (int u = 0; u < UNITS; u++, at += MOST_ELEMS * 4) {
        const struct zpp_unit *unit = zpp_zero_unit(rank->zero, u);
        const bool whole = unit->place == ZPP_PLACE_WHOLE;
        const int shard = whole ? 0 : unit->group->rank;
        const size_t begin = (size_t)shard * unit->shard_elems;
        struct zpp_piece pieces[PARAMS];
        struct zpp_unit shape = *unit;
        if (whole) shape.shard_elems = shape.elems;
        const size_t count = zpp_unit_pieces(&shape, shard, pieces);
        CHECK_OK(zpp_stream_copy(rank->compute, copy, whole ? unit->whole : unit->shard,
                                 shape.shard_elems * unit->elem_bytes, &err));
        settle(rank);
        for (size_t i = 0; i < count; i++)
            memcpy(at + pieces[i].offset_elems * unit->elem_bytes,
                   copy + (pieces[i].offset_elems - begin) * unit->elem_bytes, pieces[i].elems * unit->elem_bytes);
    }
    free(copy);
    test_join(rank->me);
}

static void compare(struct rank *rank) {
    struct run *run = rank->run;
    if (rank->me->rank == 0 && run->wanted)
        run->wrong += memcmp(run->wanted, run->result, MOST_RANKS * RESULT_BYTES) != 0;
    test_join(rank->me);
}

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
    zpp_stream *const streams[STREAMS] = {rank->zero->compute, rank->zero->gather, rank->zero->on_device->sums};
    for (int i = 0; i < STREAMS; i++) {
        const struct number_arg arg = {&rank->run->numbers[rank->me->rank * STREAMS + i]};
        CHECK_OK(zpp_stream_launch(streams[i], note_number, &arg, sizeof arg, &err));
    }
    test_join(rank->me);
}

static void set_schedule(struct rank *rank, int number) {
    const struct run *run = rank->run;
    const uint64_t bits = run->lazy_bits[number], seed = run->seed ? run->seed + (uint64_t)number : 0;
    uint64_t lazy = 0;
    test_join(rank->me);
    for (int i = 0; i < run->shape.ranks * STREAMS; i++)
        if (bits >> i & 1) lazy |= UINT64_C(1) << run->numbers[i];
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

static const struct run *mutated; /* see below */

/* Return how many schedules have another result than the CPU, or than the first run where norms are measured. */
static int wrong_schedules(const struct shape *shape, const uint64_t *lazy_bits, int schedules, uint64_t seed) {
    static unsigned char wanted[MOST_RANKS * RESULT_BYTES], result[MOST_RANKS * RESULT_BYTES];
    memset(wanted, 0, sizeof wanted);
    memset(result, 0, sizeof result);
    static const uint64_t eager[1];
    struct run first = {.shape = *shape, .schedules = 1, .lazy_bits = eager, .result = wanted};
    first.shape.on_cpu = !shape->measures;
    run_ranks(shape->ranks, run_rank, &first);
    struct run gpu = {.shape = *shape,
                      .schedules = schedules,
                      .lazy_bits = lazy_bits,
                      .seed = seed,
                      .wanted = wanted,
                      .result = result};
    mutated = &gpu;
    run_ranks(shape->ranks, run_rank, &gpu);
    return gpu.wrong;
}

enum { SCHEDULES = 10 };

/* All eager, all lazy, each kind of stream alone, and some at random. */
static void draw_schedules(uint64_t *bits, int ranks, uint64_t seed) {
    uint64_t kinds[STREAMS] = {0};
    for (int i = 0; i < ranks * STREAMS; i++) kinds[i % STREAMS] |= UINT64_C(1) << i;
    const uint64_t all = kinds[0] | kinds[1] | kinds[2];
    const uint64_t first[] = {0, all, kinds[0], kinds[1], kinds[2], all & ~kinds[0]};
    for (int i = 0; i < SCHEDULES; i++) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        bits[i] = i < 6 ? first[i] : (seed >> 33) & all;
    }
}

static const struct shape shapes[] = {
    {2, 3, false, false, 1 << 20, 0, false, false, 0, false, 0, 0},
    {3, 3, true, false, 2000, 6000, false, false, 0, false, 0, 0},
    {2, 3, false, true, 0, 8000, false, false, 0, false, 0, 0},
    {2, 2, false, false, 0, 0, false, false, 0, false, 0, 0},
    {3, 2, false, true, 0, 9000, false, false, 0, false, 0, 0},
    {2, 1, false, false, 0, 0, false, false, 0, false, 0, 0},
    {3, 1, true, true, 0, 0, false, false, 0, false, 0, 0},
    {2, 0, false, false, 0, 0, false, false, 0, false, 0, 0},
    {3, 0, true, false, 0, 0, false, false, 0, false, 0, 0},
    {2, 2, false, false, 1 << 20, 0, false, false, 0, false, 0, 0},
    {2, 0, false, false, 1 << 20, 0, false, false, 0, false, 0, 0},
    {2, 3, false, false, 3000, 0, false, false, 0, false, 0, 0},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, true, 0, 0},
    {2, 3, false, false, 1 << 20, 0, false, false, 8, false, 0, 0},
    {3, 2, false, true, 0, 9000, false, false, 4, false, 0, 0},
    {3, 3, true, true, 2000, 6000, false, false, 8, false, 0, 0},
    {2, 3, false, false, 1 << 20, 0, false, true, 0, false, 0, 0},
    {3, 1, false, true, 0, 0, false, true, 0, false, 0, 0},
    {2, 0, false, false, 0, 0, false, true, 0, false, 0, 0},
    {3, 2, false, true, 0, 9000, false, true, 0, false, 0, 0},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, false, 2, 0},
    {4, 3, false, false, 2000, 6000, false, false, 0, false, 2, 0},
    {4, 2, true, true, 0, 9000, false, false, 0, false, 2, 0},
    {2, 1, false, false, 0, 0, false, false, 0, false, 2, 0},
    {4, 0, false, false, 0, 0, false, false, 0, false, 2, 0},
    {4, 3, false, false, 1 << 20, 0, false, false, 8, false, 2, 0},
    {2, 3, false, false, 1 << 20, 0, false, false, 0, false, 0, 8},
    {3, 3, true, true, 2000, 6000, false, false, 8, false, 0, 4},
    {2, 3, false, false, 0, 0, false, false, 0, false, 0, 8},
    {4, 3, false, false, 1 << 20, 0, false, false, 0, false, 2, 8},
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

enum stream_kind { COMPUTE, GATHER, SUMS, NO_STREAM = -1 };

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
};
static const struct mutant *mutant;

static int kind_of(sim_stream stream) {
    const int number = SIM(sim_stream_number)(stream);
    for (int i = 0; i < mutated->shape.ranks * STREAMS; i++)
        if (mutated->numbers[i] == number) return i % STREAMS;
    return NO_STREAM;
}

static bool leave_out(const struct sim_wait *wait) {
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
    for (int aborts = 0; aborts < 2; aborts++) {
        struct fault fault = {.run = {.shape = {.ranks = 2, .stage = 3, .prefetch_bytes = 1 << 20}}, .aborts = aborts};
        atomic_store(&goes_on, 0);
        SIM(sim_set_schedule)(0, 0);
        run_ranks_timeout(2, NULL, aborts ? 60 * TEST_SECOND_NS : TEST_SECOND_NS, run_fault, &fault);
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

int main(int argc, char **argv) {
    sim_gpu_load_for_threads("4");
    static const struct test_case cases[] = {
        TEST(has_the_bits_of_the_cpu_in_every_schedule), TEST(ends_with_one_hardware_queue),
        TEST(is_wrong_without_one_of_its_waits),         TEST(a_rank_that_stops_ends_the_waits_for_it),
        TEST(one_rank_shards_nothing_on_its_device),     {0},
    };
    if (argc > 1 && !strcmp(argv[1], "seeds"))
        return run_seeds(argc > 3 ? strtoull(argv[3], NULL, 10) : 1, argc > 2 ? strtoull(argv[2], NULL, 10) : 1000);
    return test_main(argc, argv, cases);
}
