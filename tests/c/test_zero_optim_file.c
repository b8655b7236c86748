/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizer states in a scratch file: the streamed step against the same step in memory, bit for bit; what it reads and
 * writes; and every call into the operating system failing once.
 */
#include "../../csrc/base/pool.h"
#include "../../csrc/zero/offload/optim_file.h"
#include "aio_common.h"
#include "planned_io.h"
#include "threads.h"

enum { SHARD = 5, STEPS = 4 };
/* One larger than a chunk of 1024, one that begins inside a chunk, some that are not round. */
static const size_t shard_elems[SHARD] = { 5000, 16, 1030, 40, 3001 };

/* --- the same states in memory ------------------------------------------------------------------------------------ */

static struct state {
    float *master, *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *grad;
    uint16_t *low; /* the parameters in bf16 */
    float *param;  /* where there is no master */
} plain[SHARD], tiered[SHARD];

static float *numbers(size_t elems, unsigned seed) {
    float *values = malloc(elems * sizeof *values);
    CHECK(values);
    for (size_t i = 0; i < elems; i++) values[i] = (float)((int)pattern(i, seed) - 128) / 64.0f;
    return values;
}

static void fill_state(struct state *state, size_t elems, unsigned seed) {
    *state = (struct state){ .master = numbers(elems, seed), .exp_avg = calloc(elems, 4),
                             .exp_avg_sq = calloc(elems, 4), .max_exp_avg_sq = calloc(elems, 4),
                             .grad = numbers(elems, seed + 1), .low = calloc(elems, 2),
                             .param = numbers(elems, seed) };
}

static void drop_state(struct state *state) {
    free(state->master);
    free(state->exp_avg);
    free(state->exp_avg_sq);
    free(state->max_exp_avg_sq);
    free(state->grad);
    free(state->low);
    free(state->param);
}

struct setup {
    double fraction;
    bool amsgrad, no_ring;
    size_t chunk_elems;
    bool backward_step;
    unsigned buffers;
    unsigned disks; /* 0: one file */
    bool checksums;
    int held; /* of the shards, the first ones: they stay in memory */
};

static bool has_master(int shard) {
    return shard != 2; /* both lines */
}

static zpp_optim_file *new_tier(const struct setup *setup) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    reset_plan();
    struct zpp_optim_file_options options = {
        .file = { .path = setup->disks ? "states" : in_folder("states"), .folders = disk_folders(setup->disks),
                  .folders_count = setup->disks, .stripe_bytes = 2 * 4096, .checksums = setup->checksums, .sys = &sys,
                  .log = count_log },
        .fraction = setup->fraction, .moments = setup->amsgrad ? 7 : 3, .chunk_elems = setup->chunk_elems,
        .backward_step = setup->backward_step, .buffers = setup->buffers };
    plan.no_ring = setup->no_ring;
    zpp_optim_file *optim_file = NULL;
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    for (int i = 0; i < SHARD; i++) {
        int shard = -1;
        CHECK_OK(zpp_optim_file_add(optim_file, shard_elems[i], has_master(i), &shard, &err));
        CHECK_EQUAL(shard, i);
        if (i + 1 == setup->held) zpp_optim_file_hold(optim_file);
        fill_state(&plain[i], shard_elems[i], 10u * (unsigned)i);
        fill_state(&tiered[i], shard_elems[i], 10u * (unsigned)i);
    }
    CHECK_OK(zpp_optim_file_seal(optim_file, &fault, &err));
    for (int i = 0; i < SHARD; i++)
        if (has_master(i))
            CHECK_OK(zpp_optim_file_copy(optim_file, i, ZPP_TIER_MASTER, 0, shard_elems[i], tiered[i].master, true,
                                         &fault, &err));
    return optim_file;
}

static void end_tier_on(zpp_optim_file *optim_file, unsigned disks) {
    zpp_optim_file_destroy(optim_file);
    if (!disks) CHECK_EQUAL(unlink(in_folder("states")), 0);
    for (unsigned disk = 0; disk < disks; disk++) CHECK_EQUAL(unlink(on_disk(disk, "states")), 0);
    for (int i = 0; i < SHARD; i++) {
        drop_state(&plain[i]);
        drop_state(&tiered[i]);
    }
}

static void end_tier(zpp_optim_file *optim_file) {
    end_tier_on(optim_file, 0);
}

/* Elements [first, first + elems) of a shard, as the optimizer's binding makes it. */
static struct zpp_optim_segment segment_of(struct state *state, int shard, size_t first, size_t elems, uint64_t step,
                                          bool amsgrad) {
    return (struct zpp_optim_segment){
        .param = has_master(shard) ? state->master + first : state->param + first,
        .grad = state->grad + first, .grad_dtype = ZPP_F32, .exp_avg = state->exp_avg + first,
        .exp_avg_sq = state->exp_avg_sq + first, .max_exp_avg_sq = amsgrad ? state->max_exp_avg_sq + first : NULL,
        .param_out = has_master(shard) ? state->low + first : NULL, .out_dtype = ZPP_BF16, .elems = elems, .step = step,
        .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .decoupled_decay = true };
}

/* One shard on both sides, in two pieces with a gap between: in memory it takes its step here. */
static void pieces_of(int i, uint64_t t, bool amsgrad, zpp_pool *pool, struct zpp_optim_file_piece pieces[2]) {
    const size_t half = shard_elems[i] / 2, starts[3] = { 0, half + 3, shard_elems[i] };
    static float mark; /* the optimizer file puts its own memory in its place */
    for (int part = 0; part < 2; part++) {
        const size_t first = starts[part], elems = (part ? starts[2] : half) - first;
        const struct zpp_optim_segment in_memory = segment_of(&plain[i], i, first, elems, t, amsgrad);
        zpp_optim_step(&in_memory, 1, 0.5f, pool);
        pieces[part] = (struct zpp_optim_file_piece){ segment_of(&tiered[i], i, first, elems, t, amsgrad), i, first };
        struct zpp_optim_segment *segment = &pieces[part].segment;
        if (has_master(i)) segment->param = NULL;
        segment->exp_avg = segment->exp_avg_sq = &mark;
    }
}

/* Both sides take one step; shard 3 has no gradient in the first. */
static zpp_status step(zpp_optim_file *optim_file, uint64_t t, bool amsgrad, zpp_pool *pool,
                       struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_optim_file_piece pieces[2 * SHARD];
    size_t count = 0;
    for (int i = 0; i < SHARD; i++) {
        if (i == 3 && t == 1) continue;
        pieces_of(i, t, amsgrad, pool, &pieces[count]);
        count += 2;
    }
    const struct zpp_step_files files = { 0 };
    return zpp_optim_file_step(optim_file, pieces, count, &files, 0.5f, pool, fault, err);
}

/* The same, shard by shard in some order; -1 stands for none. */
static zpp_status step_in_backward(zpp_optim_file *optim_file, uint64_t t, bool amsgrad, const int order[SHARD],
                                   zpp_pool *pool, struct zpp_aio_fault *fault, struct zpp_err *err) {
    zpp_status status = zpp_optim_file_backward_step_begin(optim_file, fault, err);
    for (int at = 0; at < SHARD && status == ZPP_OK; at++) {
        struct zpp_optim_file_piece pieces[2];
        if (order[at] < 0) continue;
        pieces_of(order[at], t, amsgrad, pool, pieces);
        status = zpp_optim_file_backward_step_unit(optim_file, pieces, 2, 0.5f, pool, fault, err);
        if (status == ZPP_OK) status = zpp_optim_file_backward_step_poll(optim_file, fault, err);
    }
    if (status == ZPP_OK) status = zpp_optim_file_backward_step_end(optim_file, fault, err);
    if (t % 2) zpp_optim_file_backward_step_ahead(optim_file); /* or the next begin does */
    return status;
}

static void check_kind(zpp_optim_file *optim_file, int shard, enum zpp_optim_file_kind kind, const float *wanted) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    float *seen = calloc(shard_elems[shard], sizeof *seen);
    CHECK_OK(zpp_optim_file_copy(optim_file, shard, kind, 0, 3, seen, false, &fault, &err)); /* in two parts */
    CHECK_OK(zpp_optim_file_copy(optim_file, shard, kind, 3, shard_elems[shard] - 3, seen + 3, false, &fault, &err));
    CHECK_EQUAL(memcmp(seen, wanted, shard_elems[shard] * sizeof *seen), 0);
    free(seen);
}

static void check_same(zpp_optim_file *optim_file, bool amsgrad) {
    for (int i = 0; i < SHARD; i++) {
        if (has_master(i)) {
            check_kind(optim_file, i, ZPP_TIER_MASTER, plain[i].master);
            CHECK_EQUAL(memcmp(tiered[i].low, plain[i].low, shard_elems[i] * 2), 0);
        }
        CHECK_EQUAL(memcmp(tiered[i].param, plain[i].param, shard_elems[i] * 4), 0);
        check_kind(optim_file, i, ZPP_TIER_EXP_AVG, plain[i].exp_avg);
        check_kind(optim_file, i, ZPP_TIER_EXP_AVG_SQ, plain[i].exp_avg_sq);
        if (amsgrad) check_kind(optim_file, i, ZPP_TIER_MAX_EXP_AVG_SQ, plain[i].max_exp_avg_sq);
    }
}

/* --- cases -------------------------------------------------------------------------------------------------------- */

static void steps_equal_memory(void) {
    static const struct setup setups[] = {
        { .fraction = 1.0, .chunk_elems = 1024 },
        { .fraction = 1.0, .amsgrad = true, .chunk_elems = 1024 },
        { .fraction = 0.5, .chunk_elems = 1024 },
        { .fraction = 1.0, .chunk_elems = 1024, .held = 2 },
        { .fraction = 0.5, .amsgrad = true, .chunk_elems = 1024, .held = 3 },
        { .fraction = 0.3, .amsgrad = true, .no_ring = true, .chunk_elems = 1024 },
        { .fraction = 1.0, .no_ring = true, .chunk_elems = 2048 },
        { .fraction = 1.0, .chunk_elems = 65536 },
        { .fraction = 0.01, .amsgrad = true, .chunk_elems = 1024 },
        { .fraction = 1.0, .amsgrad = true },
        { .fraction = 1.0, .chunk_elems = 1024, .disks = 2 },
        { .fraction = 0.5, .amsgrad = true, .chunk_elems = 1024, .disks = 3, .checksums = true },
        { .fraction = 1.0, .no_ring = true, .chunk_elems = 2048, .disks = 4, .checksums = true },
    };
    make_folder();
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++) {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault;
        zpp_pool *pool = NULL;
        CHECK_OK(zpp_pool_create(in_new_threads, i % 2 ? 2 : 1, &pool, &err));
        zpp_optim_file *optim_file = new_tier(&setups[i]);
        check_same(optim_file, setups[i].amsgrad); /* moments before their first step are zeros */
        for (uint64_t t = 1; t <= STEPS; t++) {
            CHECK_OK(step(optim_file, t, setups[i].amsgrad, pool, &fault, &err));
            check_same(optim_file, setups[i].amsgrad);
        }
        end_tier_on(optim_file, setups[i].disks);
        zpp_pool_destroy(pool);
    }
    remove_folder();
}

/* Shards in the order that is expected, in others, and not all of them; with few buffers, so that what was read ahead
 * and what has changed gives way, with as many as it takes, and with those chosen. */
static void backward_step_steps_equal_memory(void) {
    static const int orders[][SHARD] = { { 4, 3, 2, 1, 0 }, { 0, 1, 2, 3, 4 }, { 2, 4, 0, 3, 1 }, { 4, -1, 2, -1, 0 },
                                          { -1, 3, -1, 1, -1 } };
    static const struct setup setups[] = {
        { .fraction = 1.0, .chunk_elems = 1024, .backward_step = true, .buffers = 3 },
        { .fraction = 1.0, .amsgrad = true, .chunk_elems = 1024, .backward_step = true, .buffers = 4 },
        { .fraction = 0.5, .no_ring = true, .chunk_elems = 1024, .backward_step = true, .buffers = 3 },
        { .fraction = 1.0, .chunk_elems = 2048, .backward_step = true, .buffers = 64 },
        { .fraction = 1.0, .amsgrad = true, .backward_step = true },
        { .fraction = 0.3, .chunk_elems = 1024, .backward_step = true },
        { .fraction = 1.0, .chunk_elems = 1024, .backward_step = true, .held = 2 },
        { .fraction = 1.0, .amsgrad = true, .chunk_elems = 1024, .backward_step = true, .buffers = 4, .disks = 3,
          .checksums = true },
    };
    enum { ORDERS = sizeof orders / sizeof *orders };
    make_folder();
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++) {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault;
        zpp_pool *pool = NULL;
        CHECK_OK(zpp_pool_create(in_new_threads, i % 2 ? 2 : 1, &pool, &err));
        zpp_optim_file *optim_file = new_tier(&setups[i]);
        for (uint64_t t = 1; t <= 2 * ORDERS; t++) {
            CHECK_OK(step_in_backward(optim_file, t, setups[i].amsgrad, orders[(t + i) % ORDERS], pool, &fault, &err));
            check_same(optim_file, setups[i].amsgrad);
        }
        /* What is written from outside is not what was read ahead. */
        memset(plain[4].exp_avg, 0, shard_elems[4] * sizeof(float));
        CHECK_OK(zpp_optim_file_copy(optim_file, 4, ZPP_TIER_EXP_AVG, 0, shard_elems[4], plain[4].exp_avg, true, &fault,
                                     &err));
        CHECK_OK(step_in_backward(optim_file, 99, setups[i].amsgrad, orders[0], pool, &fault, &err));
        check_same(optim_file, setups[i].amsgrad);
        end_tier_on(optim_file, setups[i].disks);
        zpp_pool_destroy(pool);
    }
    remove_folder();
}

/* In the expected order every record is read and written once a step, also those that shards share. */
static void backward_step_bytes_are_counted(void) {
    static const int order[SHARD] = { 4, 3, 2, 1, 0 };
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    zpp_optim_file *optim_file = new_tier(&(struct setup){ .fraction = 1.0, .chunk_elems = 1024, .backward_step = true,
                                                          .buffers = 4 });
    struct zpp_optim_file_figures before, after;
    for (uint64_t t = 1; t <= 4; t++) {
        zpp_optim_file_figures(optim_file, &before);
        CHECK_OK(step_in_backward(optim_file, t, false, order, NULL, &fault, &err));
        zpp_optim_file_figures(optim_file, &after);
        CHECK_EQUAL(after.written_bytes - before.written_bytes, before.reserved_bytes);
    }
    CHECK_EQUAL(after.steps, 4);
    /* What the next step reads first may be on its way: four records at most. */
    const uint64_t records = 3 * before.reserved_bytes + 8 * 4096, ahead = 4 * 12 * 1024;
    CHECK(after.read_bytes >= records && after.read_bytes <= records + ahead);
    end_tier(optim_file);
    remove_folder();
}

/* Until the file has been read and written that much; false: not within ten seconds. */
static bool moved(const zpp_optim_file *optim_file, uint64_t read_bytes, uint64_t written_bytes) {
    struct zpp_optim_file_figures seen;
    for (int tries = 0; tries < 10000; tries++) {
        zpp_optim_file_figures(optim_file, &seen);
        if (seen.read_bytes >= read_bytes && seen.written_bytes >= written_bytes) return true;
        rest_1ms();
    }
    return false;
}

/* All buffers have left with the last shard: the next records are read when those are written, before the next shard
 * comes. */
static void backward_step_poll_reads_on(void) {
    static const int order[SHARD] = { 4, 3, 2, 1, 0 };
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    zpp_optim_file *optim_file = new_tier(&(struct setup){ .fraction = 1.0, .no_ring = true, .chunk_elems = 1024,
                                                          .backward_step = true,
                                               .buffers = 4 });
    CHECK_OK(zpp_optim_file_backward_step_poll(optim_file, &fault, &err)); /* no step is open */
    CHECK_OK(step_in_backward(optim_file, 1, false, order, NULL, &fault, &err));
    const uint64_t record = 12 * 1024;
    struct zpp_optim_file_figures before, after;
    struct zpp_optim_file_piece pieces[2];
    CHECK_OK(zpp_optim_file_backward_step_begin(optim_file, &fault, &err));
    atomic_store(&plan.writes_rest, true);
    pieces_of(4, 2, false, NULL, pieces);
    CHECK_OK(zpp_optim_file_backward_step_unit(optim_file, pieces, 2, 0.5f, NULL, &fault, &err));
    zpp_optim_file_figures(optim_file, &before);
    CHECK_OK(zpp_optim_file_backward_step_poll(optim_file, &fault, &err));
    zpp_optim_file_figures(optim_file, &after);
    CHECK_EQUAL(after.read_bytes, before.read_bytes); /* there is no buffer */
    atomic_store(&plan.writes_rest, false);
    CHECK(moved(optim_file, before.read_bytes, before.written_bytes + 3 * record));
    CHECK_OK(zpp_optim_file_backward_step_poll(optim_file, &fault, &err));
    CHECK(moved(optim_file, before.read_bytes + 2 * record, 0));
    for (int i = 3; i >= 0; i--) {
        pieces_of(i, 2, false, NULL, pieces);
        CHECK_OK(zpp_optim_file_backward_step_unit(optim_file, pieces, 2, 0.5f, NULL, &fault, &err));
    }
    CHECK_OK(zpp_optim_file_backward_step_end(optim_file, &fault, &err));
    check_same(optim_file, false);
    end_tier(optim_file);
    remove_folder();
}

static void backward_step_operations_fail_once(void) {
    static const int order[SHARD] = { 4, 3, 2, 1, 0 };
    make_folder();
    for (int turn = 0; turn < 4; turn++) {
        const bool write = turn & 1, no_ring = turn & 2;
        bool over = false;
        for (int n = 0; !over; n++) {
            struct zpp_err err = ZPP_ERR_INIT;
            struct zpp_aio_fault fault = { .wanted_bytes = 0 };
            zpp_optim_file *optim_file = new_tier(&(struct setup){ .fraction = 1.0, .chunk_elems = 1024,
                                                                  .no_ring = no_ring,
                                                       .backward_step = true, .buffers = 3 });
            CHECK_OK(step_in_backward(optim_file, 1, false, order, NULL, &fault, &err));
            atomic_store(write ? &plan.writes_left : &plan.reads_left, n);
            const zpp_status status = step_in_backward(optim_file, 2, false, order, NULL, &fault, &err);
            over = atomic_load(write ? &plan.writes_left : &plan.reads_left) > 0;
            atomic_store(write ? &plan.writes_left : &plan.reads_left, -1);
            CHECK_EQUAL(zpp_optim_file_inconsistent(optim_file), status != ZPP_OK);
            if (status != ZPP_OK) {
                CHECK_EQUAL(status, ZPP_TIER);
                CHECK(strstr(err.text, "/states\"") && strstr(err.text, "at offset") && fault.os_errno == EIO);
                CHECK_FAILS(step_in_backward(optim_file, 3, false, order, NULL, &fault, &err), ZPP_STATE,
                            "load a checkpoint");
                zpp_optim_file_recovered(optim_file);
                CHECK_OK(step_in_backward(optim_file, 4, false, order, NULL, &fault, &err));
            }
            end_tier(optim_file);
            CHECK(n < 40);
        }
    }
    remove_folder();
}

/* Bytes: the first step reads the masters alone; each later one reads and writes every record once. */
static void bytes_are_counted(void) {
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    zpp_optim_file *optim_file = new_tier(&(struct setup){ .fraction = 1.0, .chunk_elems = 1024 });
    /* Lines: shards 0, 1, 3, 4 begin at 0, 5008, 5024, 5072 and end at 8073; shard 2 alone has 1030. */
    const uint64_t with_master = 8 * 1024, without = 2 * 1024;
    struct zpp_optim_file_figures before, after;
    zpp_optim_file_figures(optim_file, &before);
    CHECK_EQUAL(before.reserved_bytes, with_master * 12 + without * 8);
    CHECK_EQUAL(before.file_bytes[ZPP_TIER_MASTER], 4 * (5000 + 16 + 40 + 3001));
    CHECK_EQUAL(before.file_bytes[ZPP_TIER_EXP_AVG], 4 * (5000 + 16 + 1030 + 40 + 3001));
    CHECK_EQUAL(before.held_bytes[ZPP_TIER_EXP_AVG] + before.held_bytes[ZPP_TIER_MASTER], 0);
    CHECK_EQUAL(before.buffer_bytes, 4 * 12 * 1024);
    CHECK_EQUAL(file_bytes(in_folder("states")), before.reserved_bytes);
    for (uint64_t t = 1; t <= 3; t++) {
        zpp_optim_file_figures(optim_file, &before);
        CHECK_OK(step(optim_file, t, false, NULL, &fault, &err));
        zpp_optim_file_figures(optim_file, &after);
        CHECK_EQUAL(after.read_bytes - before.read_bytes, t == 1 ? with_master * 4 : before.reserved_bytes);
        CHECK_EQUAL(after.written_bytes - before.written_bytes, before.reserved_bytes);
    }
    CHECK_EQUAL(after.steps, 3);
    end_tier(optim_file);
    remove_folder();
}

/* A full disk is found when the file is made, with its path, what was wanted and what is free. */
static void full_disk(void) {
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { .wanted_bytes = 0 };
    reset_plan();
    struct zpp_optim_file_options options = { .file.path = in_folder("states"), .file.sys = &sys,
                                              .fraction = 1.0, .moments = 3 };
    zpp_optim_file *optim_file = NULL;
    int shard;
    plan.reserve_error = ENOSPC;
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    CHECK_OK(zpp_optim_file_add(optim_file, 100000, false, &shard, &err));
    CHECK_FAILS(zpp_optim_file_seal(optim_file, &fault, &err), ZPP_TIER, "free some, or choose another folder");
    CHECK(strstr(fault.path, "/states") && fault.has_free && fault.os_errno == ENOSPC);
    CHECK_EQUAL(fault.wanted_bytes, 2 * 4 * (uint64_t)(98 * 1024));
    zpp_optim_file_destroy(optim_file);
    unlink(in_folder("states"));
    /* A file system that cannot reserve gets a file with holes. */
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    CHECK_OK(zpp_optim_file_add(optim_file, 100000, false, &shard, &err));
    plan.reserve_error = EOPNOTSUPP;
    CHECK_OK(zpp_optim_file_seal(optim_file, &fault, &err));
    CHECK_EQUAL(file_bytes(in_folder("states")), 2 * 4 * (uint64_t)(98 * 1024));
    /* A file that is there already is not overwritten. */
    zpp_optim_file *second = NULL;
    CHECK_OK(zpp_optim_file_create(&options, &second, &err));
    CHECK_FAILS(zpp_optim_file_seal(second, &fault, &err), ZPP_TIER, strerror(EEXIST));
    zpp_optim_file_destroy(second);
    zpp_optim_file_destroy(optim_file);
    remove_folder();
}

/* Of two disks the second is full; and of three each has its share. */
static void full_disk_of_several(void) {
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { .wanted_bytes = 0 };
    reset_plan();
    struct zpp_optim_file_options options = {
        .file = { .path = "states", .folders = disk_folders(2), .folders_count = 2, .sys = &sys }, .fraction = 1.0,
        .moments = 3 };
    zpp_optim_file *optim_file = NULL;
    int shard;
    plan.reserve_error = ENOSPC;
    atomic_store(&plan.reserves_left, 1);
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    CHECK_OK(zpp_optim_file_add(optim_file, 3 << 20, false, &shard, &err)); /* 24 MiB: twelve stripes */
    CHECK_FAILS(zpp_optim_file_seal(optim_file, &fault, &err), ZPP_TIER, "/disk1/states");
    CHECK(strstr(fault.path, "/disk1/states") && fault.has_free && fault.os_errno == ENOSPC);
    CHECK_EQUAL(fault.wanted_bytes, 12 << 20);
    zpp_optim_file_destroy(optim_file);
    for (unsigned disk = 0; disk < 2; disk++) CHECK_EQUAL(unlink(on_disk(disk, "states")), 0);
    reset_plan();
    options.file.folders = disk_folders(3);
    options.file.folders_count = 3;
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    CHECK_OK(zpp_optim_file_add(optim_file, 3 << 20, false, &shard, &err));
    CHECK_OK(zpp_optim_file_seal(optim_file, &fault, &err));
    for (unsigned disk = 0; disk < 3; disk++) CHECK_EQUAL(file_bytes(on_disk(disk, "states")), 8 << 20);
    zpp_optim_file_destroy(optim_file);
    remove_folder();
}

/* The n-th read or write of a step fails, for every n: file and offset are named, nothing is under way afterwards, and
 * the optimizer file is inconsistent until a load recovers it. */
static void every_operation_fails_once(void) {
    make_folder();
    for (int turn = 0; turn < 4; turn++) {
        const bool write = turn & 1, no_ring = turn & 2;
        for (int n = 0;; n++) {
            struct zpp_err err = ZPP_ERR_INIT;
            struct zpp_aio_fault fault = { .wanted_bytes = 0 };
            zpp_optim_file *optim_file = new_tier(&(struct setup){ .fraction = 1.0, .chunk_elems = 1024,
                                                                  .no_ring = no_ring });
            CHECK_OK(step(optim_file, 1, false, NULL, &fault, &err));
            atomic_store(write ? &plan.writes_left : &plan.reads_left, n);
            const zpp_status status = step(optim_file, 2, false, NULL, &fault, &err);
            atomic_store(write ? &plan.writes_left : &plan.reads_left, -1);
            CHECK_EQUAL(zpp_optim_file_inconsistent(optim_file), status != ZPP_OK);
            if (status != ZPP_OK) {
                CHECK_EQUAL(status, ZPP_TIER);
                CHECK(strstr(err.text, "/states\"") && strstr(err.text, strerror(EIO)));
                CHECK(strstr(err.text, "at offset"));
                CHECK(strstr(fault.path, "/states") && fault.os_errno == EIO && fault.wanted_bytes > 0);
                CHECK_FAILS(step(optim_file, 3, false, NULL, &fault, &err), ZPP_STATE, "load a checkpoint first");
                zpp_optim_file_recovered(optim_file);
                CHECK_OK(step(optim_file, 4, false, NULL, &fault, &err));
            }
            end_tier(optim_file);
            if (status == ZPP_OK) {
                CHECK_EQUAL(n, 10); /* ten records a step, each one operation */
                break;
            }
        }
    }
    remove_folder();
}

static void refuses_misuse(void) {
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct zpp_optim_file_options options = { .file.path = in_folder("states"), .fraction = 0.0 };
    zpp_optim_file *optim_file = NULL;
    CHECK_FAILS(zpp_optim_file_create(&options, &optim_file, &err), ZPP_INVALID, "fraction is 0");
    options.fraction = 1.0;
    options.chunk_elems = 1000;
    CHECK_FAILS(zpp_optim_file_create(&options, &optim_file, &err), ZPP_INVALID, "chunk_elems 1000");
    optim_file = new_tier(&(struct setup){ .fraction = 1.0 });
    int shard;
    float value = 0.0f;
    CHECK_FAILS(zpp_optim_file_add(optim_file, 1, false, &shard, &err), ZPP_STATE, "after seal");
    CHECK_FAILS(zpp_optim_file_copy(optim_file, 2, ZPP_TIER_MASTER, 0, 1, &value, false, &fault, &err), ZPP_INVALID,
                "none of");
    CHECK_FAILS(zpp_optim_file_copy(optim_file, 1, ZPP_TIER_EXP_AVG, 16, 1, &value, false, &fault, &err), ZPP_INVALID,
                "has 16");
    CHECK_FAILS(zpp_optim_file_copy(optim_file, 9, ZPP_TIER_EXP_AVG, 0, 1, &value, false, &fault, &err), ZPP_STATE,
                "there are 5");
    CHECK_FAILS(zpp_optim_file_backward_step_begin(optim_file, &fault, &err), ZPP_STATE,
                "not made for steps inside a backward");
    CHECK_FAILS(zpp_optim_file_backward_step_unit(optim_file, NULL, 0, 1.0f, NULL, &fault, &err), ZPP_STATE,
                "before the step has begun");
    CHECK_OK(zpp_optim_file_backward_step_end(optim_file, &fault, &err));
    end_tier(optim_file);
    optim_file = new_tier(&(struct setup){ .fraction = 1.0, .backward_step = true });
    CHECK_OK(zpp_optim_file_backward_step_begin(optim_file, &fault, &err));
    CHECK_FAILS(zpp_optim_file_backward_step_begin(optim_file, &fault, &err), ZPP_STATE, "in the middle of a step");
    end_tier(optim_file);
    zpp_optim_file_destroy(NULL);
    remove_folder();
}

/* What is told beforehand is what seal makes. */
static void plans_are_kept(void) {
    static const struct setup setups[] = {
        { .fraction = 1.0 }, { .fraction = 0.4, .amsgrad = true }, { .fraction = 1.0, .backward_step = true },
        { .fraction = 0.7, .backward_step = true },
    };
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++) {
        const struct zpp_optim_file_options options = { .fraction = setups[i].fraction,
                                                       .backward_step = setups[i].backward_step,
                                                  .moments = setups[i].amsgrad ? 7 : 3 };
        struct zpp_optim_file_shard_plan shards[SHARD];
        for (int at = 0; at < SHARD; at++)
            shards[at] = (struct zpp_optim_file_shard_plan){ shard_elems[at], has_master(at), false };
        struct zpp_optim_file_plan told;
        struct zpp_optim_file_figures made;
        CHECK_OK(zpp_optim_file_plan(&options, shards, SHARD, &told, &err));
        zpp_optim_file *optim_file = new_tier(&setups[i]);
        zpp_optim_file_figures(optim_file, &made);
        CHECK(made.buffer_bytes > 0 && told.chunk_elems > 0);
        CHECK_EQUAL(told.buffer_bytes, made.buffer_bytes);
        end_tier(optim_file);
    }
    remove_folder();
}

/* A large shard has records of its own: a step of some shards moves the states of those, and of no others. */
static void shards_that_are_not_stepped_do_not_move(void) {
    enum { LARGE = 3 };
    static const size_t elems[LARGE] = { 66000, 140000, 65536 };
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    static float mark;
    reset_plan();
    const struct zpp_optim_file_options options = { .file = { .path = in_folder("states"), .sys = &sys },
                                                   .fraction = 1.0, .moments = 3 };
    zpp_optim_file *optim_file = NULL;
    float *values = calloc(elems[1], sizeof *values);
    CHECK(values);
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    for (int i = 0; i < LARGE; i++) CHECK_OK(zpp_optim_file_add(optim_file, elems[i], true, &(int){ 0 }, &err));
    CHECK_OK(zpp_optim_file_seal(optim_file, &fault, &err));
    for (uint64_t t = 1; t <= 4; t++) { /* all, all, then without the second, then without the first */
        struct zpp_optim_file_piece pieces[LARGE];
        size_t count = 0, bytes = 0;
        for (int i = 0; i < LARGE; i++) {
            if ((t == 3 && i == 1) || (t == 4 && i == 0)) continue;
            bytes += 3 * sizeof(float) * ((elems[i] + 1023) / 1024 * 1024);
            pieces[count++] = (struct zpp_optim_file_piece){
                .shard = i,
                .segment = { .grad = values, .grad_dtype = ZPP_F32, .exp_avg = &mark, .exp_avg_sq = &mark,
                             .elems = elems[i], .step = t, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 } };
        }
        struct zpp_optim_file_figures before, after;
        const struct zpp_step_files files = { NULL, NULL, false };
        zpp_optim_file_figures(optim_file, &before);
        CHECK_OK(zpp_optim_file_step(optim_file, pieces, count, &files, 1.0f, NULL, &fault, &err));
        zpp_optim_file_figures(optim_file, &after);
        CHECK_EQUAL(after.written_bytes - before.written_bytes, bytes);
        CHECK_EQUAL(after.read_bytes - before.read_bytes, t == 1 ? bytes / 3 : bytes);
    }
    free(values);
    zpp_optim_file_destroy(optim_file);
    CHECK_EQUAL(unlink(in_folder("states")), 0);
    remove_folder();
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(steps_equal_memory), TEST(bytes_are_counted), TEST(full_disk),
                                              TEST(full_disk_of_several),
                                              TEST(every_operation_fails_once), TEST(refuses_misuse),
                                              TEST(backward_step_steps_equal_memory),
                                              TEST(backward_step_bytes_are_counted),
                                              TEST(backward_step_operations_fail_once),
                                              TEST(backward_step_poll_reads_on), TEST(plans_are_kept),
                                              TEST(shards_that_are_not_stepped_do_not_move),
                                              { 0 } };
    return test_main(argc, argv, cases);
}
