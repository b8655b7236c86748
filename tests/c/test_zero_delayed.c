/* SPDX-License-Identifier: Apache-2.0
 *
 * The delayed step against its arithmetic, v[k+1] = o[k], o[k+1] = Adam(o[k], g(v[k])), with states in memory and in a
 * file: the caller reads values and writes gradients while the step runs, on the CPU and, under many schedules, on the
 * simulated device; and with parameters and gradients in files. ThreadSanitizer sees whether anything is touched by
 * both.
 */
#include "../../csrc/zero/step_delayed.h"
#include "aio_common.h"
#include "planned_io.h"
#include "threads.h"

enum { ELEMS = 3000, CUT = 1700, STEPS = 5, EXACT = 2 }; /* two pieces */

struct side {
    float *values, *master, *exp_avg, *exp_avg_sq, *grads[2]; /* `values`: what the pass computes with */
    uint16_t *low, *ahead;                                     /* the same in bf16 */
};

static float *floats(void) {
    float *memory = calloc(ELEMS, sizeof *memory);
    CHECK(memory);
    return memory;
}

static struct side new_side(void) {
    struct side side = { floats(), floats(), floats(), floats(), { floats(), floats() }, calloc(ELEMS, 2),
                         calloc(ELEMS, 2) };
    for (size_t i = 0; i < ELEMS; i++) side.values[i] = side.master[i] = (float)((int)(i % 97) - 48) / 64.0f;
    zpp_convert(side.low, ZPP_BF16, side.values, ZPP_F32, ELEMS);
    return side;
}

static void drop_side(struct side *side) {
    float *const all[] = { side->values,     side->master,   side->exp_avg,
                           side->exp_avg_sq, side->grads[0], side->grads[1] };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(side->low);
    free(side->ahead);
}

/* A pass: gradients of step k from the values of now. */
static void pass(struct side *side, int k, bool low) {
    if (low) zpp_convert(side->values, ZPP_F32, side->low, ZPP_BF16, ELEMS);
    float *grads = side->grads[k % 2];
    for (size_t i = 0; i < ELEMS; i++) grads[i] = side->values[i] * 0.5f + (float)((int)(i + 7 * (size_t)k) % 5 - 2);
}

static struct zpp_optim_segment segment_of(struct side *side, int k, size_t first, size_t elems, bool low) {
    return (struct zpp_optim_segment){
        .param = side->master + first, .grad = side->grads[k % 2] + first, .grad_dtype = ZPP_F32,
        .exp_avg = side->exp_avg + first, .exp_avg_sq = side->exp_avg_sq + first,
        .param_out = low ? side->ahead + first : NULL, .out_dtype = ZPP_BF16, .elems = elems, .step = (uint64_t)k + 1,
        .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .decoupled_decay = true };
}

static struct zpp_step_plan step_of(struct side *side, int k, bool low, zpp_optim_file *optim_file) {
    struct zpp_step_plan step = { .copies = calloc(2, sizeof *step.copies), .copies_count = 2,
                                    .optim_file = optim_file,
                                     .grad_scale = 0.5f };
    struct zpp_optim_segment *segments = calloc(2, sizeof *segments);
    struct zpp_optim_file_piece *pieces = calloc(2, sizeof *pieces);
    CHECK(step.copies && segments && pieces);
    const size_t cuts[3] = { 0, CUT, ELEMS }, bytes = low ? 2 : 4;
    for (int i = 0; i < 2; i++) {
        const size_t elems = cuts[i + 1] - cuts[i];
        segments[i] = segment_of(side, k, cuts[i], elems, low);
        pieces[i] = (struct zpp_optim_file_piece){ segments[i], 0, cuts[i] };
        if (low) pieces[i].segment.param = NULL;
        unsigned char *to = low ? (unsigned char *)side->low : (unsigned char *)side->values;
        unsigned char *from = low ? (unsigned char *)side->ahead : (unsigned char *)side->master;
        step.copies[i] = (struct zpp_delayed_copy){ .to = to + cuts[i] * bytes, .from = from + cuts[i] * bytes,
                                                    .bytes = elems * bytes };
    }
    if (optim_file) {
        step.file_pieces = pieces;
        step.file_pieces_count = 2;
        free(segments);
    } else {
        step.segments = segments;
        step.segments_count = 2;
        free(pieces);
    }
    return step;
}

/* The definition, one thread, nothing aside: the values of one step before are kept. */
static void wanted_after(struct side *side, int k, bool low, float *old) {
    struct zpp_optim_segment whole = segment_of(side, k, 0, ELEMS, low);
    if (k >= EXACT) memcpy(old, side->master, ELEMS * sizeof *old);
    zpp_optim_step(&whole, 1, 0.5f, NULL);
    const float *shown = k >= EXACT ? old : side->master;
    memcpy(side->values, shown, ELEMS * sizeof *shown);
    zpp_convert(side->low, ZPP_BF16, shown, ZPP_F32, ELEMS);
}

static zpp_optim_file *new_tier(struct side *side, bool low) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    reset_plan();
    const struct zpp_optim_file_options options = {
        .file = { .path = in_folder("states"), .sys = &sys, .log = count_log }, .fraction = 0.8, .moments = 3,
        .chunk_elems = 1024 };
    zpp_optim_file *optim_file = NULL;
    int shard;
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    CHECK_OK(zpp_optim_file_add(optim_file, ELEMS, low, &shard, &err));
    CHECK_OK(zpp_optim_file_seal(optim_file, &fault, &err));
    if (low) CHECK_OK(zpp_optim_file_copy(optim_file, 0, ZPP_TIER_MASTER, 0, ELEMS, side->master, true, &fault, &err));
    return optim_file;
}

static void end_tier(zpp_optim_file *optim_file) {
    if (!optim_file) return;
    zpp_optim_file_destroy(optim_file);
    CHECK_EQUAL(unlink(in_folder("states")), 0);
}

static void train(zpp_device *device, bool low, bool tiered) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct side ours = new_side(), wanted = new_side();
    float *old = floats();
    zpp_optim_file *optim_file = tiered ? new_tier(&ours, low) : NULL;
    zpp_pool *pool = NULL;
    zpp_delayed *delayed = NULL;
    CHECK_OK(zpp_pool_create(in_new_threads, 2, &pool, &err));
    CHECK_OK(zpp_delayed_create(device, &delayed, &err));
    for (int k = 0; k < STEPS; k++) {
        pass(&ours, k, low); /* while the step before runs */
        pass(&wanted, k, low);
        CHECK_EQUAL(memcmp(ours.grads[k % 2], wanted.grads[k % 2], ELEMS * 4), 0);
        CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
        zpp_delayed_publish(delayed, pool);
        const struct zpp_step_plan step = step_of(&ours, k, low, optim_file);
        CHECK_OK(zpp_delayed_begin(delayed, &step, k < EXACT, pool, &err));
        if (optim_file) {
            struct zpp_optim_file_figures seen;
            zpp_optim_file_figures(optim_file, &seen); /* from this thread, while the other steps */
            CHECK(!zpp_optim_file_inconsistent(optim_file));
        }
        if (k < EXACT) {
            CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
            zpp_delayed_publish(delayed, pool);
        }
        wanted_after(&wanted, k, low, old);
        CHECK_EQUAL(zpp_delayed_pending(delayed), k >= EXACT);
    }
    zpp_delayed_finish(delayed);
    CHECK(zpp_delayed_pending(delayed));
    CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
    zpp_delayed_publish(delayed, pool);
    memcpy(wanted.values, wanted.master, ELEMS * 4);
    zpp_convert(wanted.low, ZPP_BF16, wanted.master, ZPP_F32, ELEMS);
    if (low) CHECK_EQUAL(memcmp(ours.low, wanted.low, ELEMS * 2), 0);
    else CHECK_EQUAL(memcmp(ours.values, wanted.values, ELEMS * 4), 0);
    struct zpp_delayed_figures figures;
    zpp_delayed_figures(delayed, &figures);
    CHECK_EQUAL(figures.steps, STEPS);
    zpp_delayed_destroy(delayed);
    zpp_pool_destroy(pool);
    end_tier(optim_file);
    drop_side(&ours);
    drop_side(&wanted);
    free(old);
}

static void on_cpu(void (*each)(zpp_device *device)) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = NULL;
    CHECK_OK(zpp_device_cpu_create(&device, &err));
    each(device);
    zpp_device_destroy(device);
}

static void train_four_ways(zpp_device *device) {
    for (int way = 0; way < 4; way++) train(device, way & 1, way & 2);
}

static void equals_its_arithmetic(void) {
    make_folder();
    on_cpu(train_four_ways);
    remove_folder();
}

static void under_any_schedule(void) {
    for (uint64_t seed = 1; seed <= 100; seed++) {
        struct zpp_err err = ZPP_ERR_INIT;
        const struct zpp_sim_options options = { .seed = seed, .max_delay_us = seed % 3 ? 200 : 0 };
        zpp_device *device = NULL;
        CHECK_OK(zpp_device_sim_create(&options, &device, &err));
        train(device, seed & 1, false);
        zpp_device_destroy(device);
    }
}

/* --- parameters and gradients in files ---------------------------------------------------------------------------- */

/* Two units of parameters, the second of which is only carried; gradients in two places. */
struct unit_file_side {
    zpp_unit_file *params, *grads;
    int unit, other, place[2];
    size_t other_bytes, mapping[2];
};

static zpp_unit_file *open_unit_file(const char *name, zpp_unit_file *unit_file) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const struct zpp_scratch_options file = { .path = in_folder(name), .depth = 8, .log = count_log, .sys = &sys };
    CHECK_OK(zpp_unit_file_seal(unit_file, 0, &err));
    CHECK_OK(zpp_unit_file_open(unit_file, &file, true, &fault, &err));
    return unit_file;
}

static struct unit_file_side new_files(const struct side *values, bool low) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct unit_file_side side = { .other_bytes = 3 * 4096 };
    size_t at;
    CHECK_OK(zpp_unit_file_create(NULL, 1.0, &side.params, &err));
    CHECK_OK(zpp_unit_file_add(side.params, ELEMS * (low ? 2 : 4), &side.unit, &at, &err));
    CHECK_OK(zpp_unit_file_add(side.params, side.other_bytes, &side.other, &at, &err));
    CHECK_OK(zpp_unit_file_double_buffer(side.params, side.unit, &err));
    CHECK_OK(zpp_unit_file_double_buffer(side.params, side.other, &err));
    CHECK_OK(zpp_unit_file_create(NULL, 1.0, &side.grads, &err));
    for (int i = 0; i < 2; i++) CHECK_OK(zpp_unit_file_add(side.grads, ELEMS * 4, &side.place[i], &side.mapping[i],
                                                           &err));
    open_unit_file("params", side.params);
    open_unit_file("grads", side.grads);
    unsigned char *other = malloc(side.other_bytes);
    CHECK(other);
    memset(other, 7, side.other_bytes);
    void *first = low ? (void *)values->low : (void *)values->values;
    CHECK_OK(zpp_unit_file_copy(side.params, 0, first, ELEMS * (low ? 2 : 4), true, &fault, &err));
    CHECK_OK(zpp_unit_file_copy(side.params, at, other, side.other_bytes, true, &fault, &err));
    free(other);
    return side;
}

static void end_files(struct unit_file_side *side) {
    zpp_unit_file_destroy(side->params);
    zpp_unit_file_destroy(side->grads);
    CHECK_EQUAL(unlink(in_folder("params")), 0);
    CHECK_EQUAL(unlink(in_folder("grads")), 0);
}

static void load_unit(zpp_unit_file *unit_file, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_wait patience = { 0, NULL, NULL };
    CHECK_OK(zpp_unit_file_acquire(unit_file, unit, &err));
    zpp_unit_file_read_begin(unit_file, unit);
    CHECK_OK(zpp_unit_file_read_wait(unit_file, unit, &patience));
    CHECK_OK(zpp_unit_file_read_status(unit_file, unit, NULL, &err));
}

/* A pass: loads both units, and writes gradients to the place of this step; all while the last step runs. */
static void pass_files(struct unit_file_side *files, struct side *side, int k, bool low) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_unit_file_figures figures;
    const struct zpp_wait patience = { 0, NULL, NULL };
    const int place = files->place[k % 2];
    load_unit(files->params, files->unit);
    load_unit(files->params, files->other);
    const unsigned char *mapping = zpp_unit_file_mapping(files->params);
    memcpy(low ? (void *)side->low : (void *)side->values, mapping, ELEMS * (low ? 2 : 4));
    for (size_t i = 0; i < files->other_bytes; i++) CHECK_EQUAL((mapping + (low ? 2 : 3) * 4096)[i], 7);
    CHECK_OK(zpp_unit_file_release(files->params, files->unit, &err));
    CHECK_OK(zpp_unit_file_release(files->params, files->other, &err));
    pass(side, k, low);
    CHECK_OK(zpp_unit_file_acquire(files->grads, place, &err));
    memcpy(zpp_unit_file_mapping(files->grads) + files->mapping[k % 2], side->grads[k % 2], ELEMS * 4);
    zpp_unit_file_write_unit(files->grads, place);
    CHECK_OK(zpp_unit_file_read_wait(files->grads, place, &patience));
    CHECK_OK(zpp_unit_file_read_status(files->grads, place, NULL, &err));
    CHECK_OK(zpp_unit_file_release(files->grads, place, &err));
    zpp_unit_file_figures(files->params, &figures);
    zpp_unit_file_figures(files->grads, &figures);
}

static struct zpp_step_plan step_of_files(struct unit_file_side *files, struct side *side, int k, bool low,
                                             zpp_optim_file *optim_file) {
    struct zpp_step_plan step = step_of(side, k, low, optim_file);
    const size_t bytes = low ? 2 : 4;
    unsigned char *mapping = zpp_unit_file_mapping(files->params),
    *grads = zpp_unit_file_mapping(files->grads) + files->mapping[k % 2];
    free(step.copies);
    step.copies = NULL;
    step.copies_count = 0;
    for (size_t i = 0, at = 0; i < 2; i++) {
        struct zpp_optim_segment *segment = optim_file ? &step.file_pieces[i].segment : &step.segments[i];
        segment->grad = grads + at * 4;
        if (low) segment->param_out = mapping + at * bytes;
        else segment->param = (float *)(void *)(mapping + at * bytes);
        at += segment->elems;
    }
    step.rests = calloc(1, sizeof *step.rests);
    step.flips = calloc(2, sizeof *step.flips);
    CHECK(step.rests && step.flips);
    step.rests[0] = (struct zpp_delayed_rest){ mapping + (low ? 2 : 3) * 4096, files->other_bytes };
    step.rests_count = 1;
    step.flips[0] = files->unit;
    step.flips[1] = files->other;
    step.flips_count = 2;
    step.files = (struct zpp_step_files){ .params = files->params, .grads = files->grads, .next = true };
    return step;
}

static void train_files(zpp_device *device, bool low, bool tiered) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct side ours = new_side(), wanted = new_side();
    float *old = floats();
    zpp_optim_file *optim_file = tiered ? new_tier(&ours, low) : NULL;
    reset_plan();
    struct unit_file_side files = new_files(&ours, low);
    zpp_delayed *delayed = NULL;
    CHECK_OK(zpp_delayed_create(device, &delayed, &err));
    for (int k = 0; k < STEPS; k++) {
        pass_files(&files, &ours, k, low);
        pass(&wanted, k, low);
        CHECK_EQUAL(memcmp(ours.grads[k % 2], wanted.grads[k % 2], ELEMS * 4), 0);
        zpp_delayed_finish(delayed);
        CHECK(!zpp_delayed_failed(delayed));
        CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
        zpp_delayed_publish(delayed, NULL);
        const struct zpp_step_plan step = step_of_files(&files, &ours, k, low, optim_file);
        CHECK_OK(zpp_delayed_begin(delayed, &step, k < EXACT, NULL, &err));
        if (k < EXACT) {
            CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
            zpp_delayed_publish(delayed, NULL);
        }
        wanted_after(&wanted, k, low, old);
    }
    /* A step that fails turns nothing. */
    zpp_delayed_finish(delayed);
    CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
    zpp_delayed_publish(delayed, NULL);
    pass_files(&files, &ours, STEPS, low);
    atomic_store(&plan.writes_left, 0);
    const struct zpp_step_plan step = step_of_files(&files, &ours, STEPS, low, optim_file);
    CHECK_OK(zpp_delayed_begin(delayed, &step, false, NULL, &err));
    zpp_delayed_finish(delayed);
    atomic_store(&plan.writes_left, -1);
    CHECK(zpp_delayed_failed(delayed));
    CHECK_FAILS(zpp_delayed_wait(delayed, &fault, &err), ZPP_TIER, "at offset");
    zpp_delayed_publish(delayed, NULL);
    memcpy(wanted.values, wanted.master, ELEMS * 4);
    zpp_convert(wanted.low, ZPP_BF16, wanted.master, ZPP_F32, ELEMS);
    pass_files(&files, &ours, STEPS + 1, low);
    if (low) CHECK_EQUAL(memcmp(ours.low, wanted.low, ELEMS * 2), 0);
    else CHECK_EQUAL(memcmp(ours.values, wanted.values, ELEMS * 4), 0);
    zpp_delayed_destroy(delayed);
    end_files(&files);
    end_tier(optim_file);
    drop_side(&ours);
    drop_side(&wanted);
    free(old);
}

static void train_files_four_ways(zpp_device *device) {
    for (int way = 0; way < 4; way++) train_files(device, way & 1, way & 2);
}

static void equals_its_arithmetic_in_files(void) {
    make_folder();
    on_cpu(train_files_four_ways);
    remove_folder();
}

/* Every read and write of a step fails once: one wait returns the error, nothing is published, and after a recovery the
 * next step runs. */
static void fail_each(zpp_device *device) {
    for (int n = 0;; n++) {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault = { .wanted_bytes = 0 };
        struct side ours = new_side();
        zpp_optim_file *optim_file = new_tier(&ours, true);
        zpp_delayed *delayed = NULL;
        CHECK_OK(zpp_delayed_create(device, &delayed, &err));
        struct zpp_step_plan step = step_of(&ours, 0, true, optim_file);
        CHECK_OK(zpp_delayed_begin(delayed, &step, false, NULL, &err));
        CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
        step = step_of(&ours, 1, true, optim_file);
        CHECK_FAILS(zpp_delayed_begin(delayed, &step, false, NULL, &err), ZPP_STATE, "before the one under way");
        zpp_delayed_publish(delayed, NULL);
        uint16_t *before = malloc(ELEMS * 2);
        CHECK(before);
        memcpy(before, ours.low, ELEMS * 2);
        atomic_store(n & 1 ? &plan.writes_left : &plan.reads_left, n / 2);
        step = step_of(&ours, 1, true, optim_file);
        CHECK_OK(zpp_delayed_begin(delayed, &step, false, NULL, &err));
        zpp_delayed_finish(delayed);
        atomic_store(n & 1 ? &plan.writes_left : &plan.reads_left, -1);
        const zpp_status status = zpp_delayed_wait(delayed, &fault, &err);
        if (status != ZPP_OK) {
            CHECK_EQUAL(status, ZPP_TIER);
            CHECK(strstr(err.text, "/states\"") && strstr(fault.path, "/states"));
            CHECK(zpp_optim_file_inconsistent(optim_file));
            CHECK(!zpp_delayed_pending(delayed));
            zpp_delayed_publish(delayed, NULL);
            CHECK_EQUAL(memcmp(before, ours.low, ELEMS * 2), 0);
            CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
            zpp_optim_file_recovered(optim_file);
            step = step_of(&ours, 2, true, optim_file);
            CHECK_OK(zpp_delayed_begin(delayed, &step, false, NULL, &err));
            if (n & 1) CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
        }
        free(before);
        zpp_delayed_destroy(delayed); /* half of the time with a step under way */
        end_tier(optim_file);
        drop_side(&ours);
        if (status == ZPP_OK) {
            CHECK(n >= 4);
            break;
        }
    }
}

static void every_operation_fails_once(void) {
    make_folder();
    on_cpu(fail_each);
    remove_folder();
}

/* What was begun may be forgotten, finished or not. */
static void drop_all(zpp_device *device) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct side ours = new_side();
    float *before = floats();
    zpp_delayed *delayed = NULL;
    CHECK_OK(zpp_delayed_create(device, &delayed, &err));
    memcpy(before, ours.values, ELEMS * 4);
    for (int k = 0; k < 6; k++) {
        const struct zpp_step_plan step = step_of(&ours, k, false, NULL);
        CHECK_OK(zpp_delayed_begin(delayed, &step, k == 2, NULL, &err));
        if (k % 2) CHECK_OK(zpp_delayed_wait(delayed, &fault, &err));
        zpp_delayed_drop(delayed);
        zpp_delayed_publish(delayed, NULL);
        CHECK(!zpp_delayed_pending(delayed));
        CHECK_EQUAL(memcmp(before, ours.values, ELEMS * 4), 0);
    }
    zpp_delayed_destroy(delayed);
    zpp_delayed_destroy(NULL);
    free(before);
    drop_side(&ours);
}

static void may_be_dropped(void) {
    on_cpu(drop_all);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_its_arithmetic), TEST(under_any_schedule),
                                              TEST(equals_its_arithmetic_in_files),
                                              TEST(every_operation_fails_once), TEST(may_be_dropped), { 0 } };
    return test_main(argc, argv, cases);
}
