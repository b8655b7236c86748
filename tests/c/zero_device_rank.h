/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank of test_zero_device.c: its coordinator, on the simulated GPU or on the CPU, a computation made of copies and
 * sums, and what it leaves. Ranks are threads with a GPU each.
 */
#ifndef ZPP_TESTS_ZERO_DEVICE_RANK_H
#define ZPP_TESTS_ZERO_DEVICE_RANK_H

#include "../../csrc/comm/stream_sum.h"
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
    STREAMS = 4,
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
    const char *hosts; /* NCCL: one letter a rank for its host; "": all are on one. NULL: copies */
};

/* What all ranks share in a run. */
struct run {
    struct shape shape;
    const uint64_t *lazy_bits; /* schedules, one bit a stream; NULL: one on the CPU */
    int schedules;
    uint64_t seed;
    unsigned char *wanted, *result; /* [MOST_RANKS * RESULT_BYTES]; wanted NULL: nothing is compared */
    int wrong;
    bool even; /* all ranks have gradients of the same parameters: NCCL's calls come in one order where units move */
    int numbers[MOST_RANKS * STREAMS]; /* of the simulated streams */
};
enum { RESULT_BYTES = UNITS * MOST_ELEMS * 4 };

struct rank {
    struct test_rank *me;
    struct run *run;
    zpp_device *host, *device;
    zpp_zero *zero;
    zpp_comm *part; /* of the group of this rank, where NCCL moves the bytes */
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
    if (shape->hosts && shape->parts && shape->ranks > shape->parts) {
        char name[32];
        snprintf(name, sizeof name, "part %d", part_of[rank->me->rank]);
        rank->part = test_part(rank->me, name, rank->me->rank / shape->parts, shape->ranks / shape->parts);
        CHECK_OK(zpp_zero_set_group_comm(rank->zero, group, rank->part, &err));
    }
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
                                             .gather = shape->hosts && !*shape->hosts ? ZPP_GATHER_NCCL
                                                                                      : ZPP_GATHER_AUTO,
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
    zpp_comm_destroy(rank->part);
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
        if (!has_gradient(rank->run->even ? 0 : r, u, p, step, micro)) continue;
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

#endif
