/* SPDX-License-Identifier: Apache-2.0
 *
 * The step over parameters in a file, alone and beside states in a file: the same step in memory, bit for bit; what it
 * reads and writes; and every operation failing once.
 */
#include "../../csrc/zero/offload/optim_file.h"
#include "unit_file_common.h"
#include "threads.h"

/* Parameters of one unit: the second is not stepped, the third crosses a window, the last is not round. */
enum { PARAMS = 4, ELEMS = 3000 + 100 + 1200000 + 1003 };
static const size_t param_elems[PARAMS] = { 3000, 100, 1200000, 1003 };

enum where { FP32_IN_FILE, COPIES_IN_FILE, STATES_TOO, WHERES };

struct adam {
    float *master, *exp_avg, *exp_avg_sq, *grad;
    uint16_t *low;
};

static struct adam new_adam(void) {
    struct adam adam = { .master = malloc(ELEMS * 4), .exp_avg = calloc(ELEMS, 4), .exp_avg_sq = calloc(ELEMS, 4),
                         .grad = malloc(ELEMS * 4), .low = calloc(ELEMS, 2) };
    CHECK(adam.master && adam.exp_avg && adam.exp_avg_sq && adam.grad && adam.low);
    for (size_t i = 0; i < ELEMS; i++) {
        adam.master[i] = (float)((int)pattern(i, 1) - 128) / 64.0f;
        adam.grad[i] = (float)((int)pattern(i, 2) - 128) / 256.0f;
    }
    return adam;
}

static void drop_adam(struct adam *adam) {
    free(adam->master);
    free(adam->exp_avg);
    free(adam->exp_avg_sq);
    free(adam->grad);
    free(adam->low);
}

struct stepped {
    enum where where;
    bool two; /* copies in the file */
    zpp_unit_file *unit_file;
    zpp_optim_file *optim_file;
    unsigned char *mapping;
    struct adam plain, ours;
};

static size_t elem_bytes(enum where where) {
    return where == FP32_IN_FILE ? 4 : 2;
}

static struct stepped new_copies(enum where where, double fraction, bool two) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct stepped at = { .where = where, .two = two, .plain = new_adam(), .ours = new_adam() };
    int unit, shard;
    size_t offset;
    CHECK_OK(zpp_unit_file_create(NULL, fraction, &at.unit_file, &err));
    CHECK_OK(zpp_unit_file_add(at.unit_file, ELEMS * elem_bytes(where), &unit, &offset, &err));
    if (two) CHECK_OK(zpp_unit_file_double_buffer(at.unit_file, unit, &err));
    CHECK_OK(zpp_unit_file_seal(at.unit_file, 0, &err));
    if (two) CHECK_FAILS(zpp_unit_file_double_buffer(at.unit_file, unit, &err), ZPP_STATE, "after seal");
    at.mapping = zpp_unit_file_mapping(at.unit_file);
    CHECK_OK(open_blocks(at.unit_file, true, 0, &fault, &err));
    if (where == FP32_IN_FILE)
        CHECK_OK(zpp_unit_file_copy(at.unit_file, 0, at.ours.master, ELEMS * 4, true, &fault, &err));
    if (where != STATES_TOO) return at;
    const struct zpp_optim_file_options options = {
        .file = { .path = in_folder("states"), .sys = &sys, .log = count_log }, .fraction = fraction, .moments = 3 };
    CHECK_OK(zpp_optim_file_create(&options, &at.optim_file, &err));
    CHECK_OK(zpp_optim_file_add(at.optim_file, ELEMS, true, &shard, &err));
    CHECK_OK(zpp_optim_file_seal(at.optim_file, &fault, &err));
    CHECK_OK(zpp_optim_file_copy(at.optim_file, 0, ZPP_TIER_MASTER, 0, ELEMS, at.ours.master, true, &fault, &err));
    return at;
}

static struct stepped new_stepped(enum where where, double fraction) {
    return new_copies(where, fraction, false);
}

static void end_stepped(struct stepped *at) {
    zpp_unit_file_destroy(at->unit_file);
    CHECK_EQUAL(unlink(in_folder("params")), 0);
    if (at->optim_file) {
        zpp_optim_file_destroy(at->optim_file);
        CHECK_EQUAL(unlink(in_folder("states")), 0);
    }
    drop_adam(&at->plain);
    drop_adam(&at->ours);
}

static struct zpp_optim_segment segment_of(struct adam *adam, size_t first, size_t elems, uint64_t t, bool low) {
    return (struct zpp_optim_segment){
        .param = adam->master + first, .grad = adam->grad + first, .grad_dtype = ZPP_F32,
        .exp_avg = adam->exp_avg + first, .exp_avg_sq = adam->exp_avg_sq + first,
        .param_out = low ? adam->low + first : NULL, .out_dtype = ZPP_BF16, .elems = elems, .step = t, .lr = 0.01,
        .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .decoupled_decay = true };
}

/* Both sides take one step; a piece ends where the file begins, as the binding cuts them. */
static zpp_status step(struct stepped *at, uint64_t t, zpp_pool *pool, bool *torn, struct zpp_aio_fault *fault,
                       struct zpp_err *err) {
    struct zpp_optim_segment plain[PARAMS], ours[2 * PARAMS];
    struct zpp_optim_file_piece pieces[2 * PARAMS];
    const bool low = at->where != FP32_IN_FILE;
    const size_t size = elem_bytes(at->where);
    size_t plain_count = 0, count = 0;
    for (size_t i = 0, begin = 0; i < PARAMS; begin += param_elems[i++]) {
        if (i == 1) continue;
        plain[plain_count++] = segment_of(&at->plain, begin, param_elems[i], t, low);
        for (size_t done = 0, run; done < param_elems[i]; done += run) {
            unsigned char *place = at->mapping + (begin + done) * size;
            run = zpp_unit_file_run(at->unit_file, place, param_elems[i] - done, size);
            struct zpp_optim_segment segment = segment_of(&at->ours, begin + done, run, t, low);
            if (low) segment.param_out = place;
            else segment.param = (float *)(void *)place;
            ours[count] = segment;
            pieces[count++] = (struct zpp_optim_file_piece){ segment, 0, begin + done };
        }
    }
    const struct zpp_step_files files = { .params = at->unit_file, .next = at->two };
    zpp_optim_step(plain, plain_count, 0.5f, pool);
    *torn = false;
    if (at->optim_file) {
        const zpp_status status = zpp_optim_file_step(at->optim_file, pieces, count, &files, 0.5f, pool, fault, err);
        *torn = zpp_optim_file_inconsistent(at->optim_file);
        return status;
    }
    return zpp_unit_file_step(&files, ours, count, 0.5f, pool, torn, fault, err);
}

/* What the file holds is what memory would. */
static bool same(struct stepped *at) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const size_t bytes = ELEMS * elem_bytes(at->where);
    unsigned char *seen = malloc(bytes);
    CHECK(seen);
    CHECK_OK(zpp_unit_file_copy(at->unit_file, 0, seen, bytes, false, &fault, &err));
    const void *wanted = at->where == FP32_IN_FILE ? (const void *)at->plain.master : at->plain.low;
    const bool equal = memcmp(seen, wanted, bytes) == 0;
    free(seen);
    return equal;
}

static void steps_equal_memory(void) {
    static const double fractions[] = { 1.0, 0.6 };
    make_folder();
    for (int turn = 0; turn < 2 * WHERES; turn++) {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault;
        zpp_pool *pool = NULL;
        bool torn;
        reset_plan();
        plan.no_ring = turn == 1;
        CHECK_OK(zpp_pool_create(in_new_threads, turn % 2 ? 2 : 1, &pool, &err));
        struct stepped at = new_stepped((enum where)(turn % WHERES), fractions[turn / WHERES]);
        struct zpp_unit_file_figures before, after;
        for (uint64_t t = 1; t <= 3; t++) {
            zpp_unit_file_figures(at.unit_file, &before);
            CHECK_OK(step(&at, t, pool, &torn, &fault, &err));
            zpp_unit_file_figures(at.unit_file, &after);
            CHECK(!torn && same(&at));
        }
        /* Bytes: fp32 parameters are read and written once a step, copies are only written; no more than the page that
         * each end of a window stands in. */
        const size_t on_disk_bytes = before.mapping_bytes - before.resident_bytes, edges = 32 * PAGE;
        const uint64_t written = after.written_bytes - before.written_bytes;
        const uint64_t read = after.read_bytes - before.read_bytes;
        CHECK(written <= on_disk_bytes && written + edges >= on_disk_bytes);
        if (at.where == FP32_IN_FILE) CHECK(read <= on_disk_bytes + edges + ELEMS * 4 && read + edges >= on_disk_bytes);
        CHECK(after.window_bytes <= ZPP_UNIT_FILE_WINDOWS * (512 * 1024 * elem_bytes(at.where) + 16 * PAGE));
        end_stepped(&at);
        zpp_pool_destroy(pool);
    }
    remove_folder();
}

/* The file has two copies: a step changes nothing of what is read until the turn. What it does not step is carried. */
static void steps_of_next_copies_equal_memory(void) {
    make_folder();
    for (int where = 0; where < WHERES; where++) {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault;
        bool torn;
        reset_plan();
        struct stepped at = new_copies((enum where)where, 1.0, true);
        const size_t size = elem_bytes(at.where), bytes = ELEMS * size;
        unsigned char *before = malloc(bytes), *seen = malloc(bytes);
        struct zpp_unit_file_figures figures;
        CHECK(before && seen);
        if (where != FP32_IN_FILE) CHECK_OK(zpp_unit_file_copy(at.unit_file, 0, at.plain.low, bytes, true, &fault,
                                                               &err));
        zpp_unit_file_figures(at.unit_file, &figures);
        CHECK_EQUAL(figures.second_bytes, figures.mapping_bytes);
        for (uint64_t t = 1; t <= 3; t++) {
            CHECK_OK(zpp_unit_file_copy(at.unit_file, 0, before, bytes, false, &fault, &err));
            const unsigned char *rest = at.mapping + param_elems[0] * size;
            CHECK_OK(zpp_unit_file_carry(at.unit_file, rest, param_elems[1] * size, &fault, &err));
            CHECK_OK(step(&at, t, NULL, &torn, &fault, &err));
            CHECK_OK(zpp_unit_file_copy(at.unit_file, 0, seen, bytes, false, &fault, &err));
            CHECK_EQUAL(memcmp(before, seen, bytes), 0);
            zpp_unit_file_flip(at.unit_file, 0);
            CHECK(same(&at));
        }
        /* Large, and at no round address: several buffers full. */
        const unsigned char *large = at.mapping + (param_elems[0] + param_elems[1]) * size;
        CHECK_OK(zpp_unit_file_copy(at.unit_file, 0, before, bytes, false, &fault, &err));
        CHECK_OK(zpp_unit_file_carry(at.unit_file, large, param_elems[2] * size, &fault, &err));
        zpp_unit_file_flip(at.unit_file, 0);
        CHECK_OK(zpp_unit_file_copy(at.unit_file, 0, seen, bytes, false, &fault, &err));
        CHECK_EQUAL(memcmp(before + (large - at.mapping), seen + (large - at.mapping), param_elems[2] * size), 0);
        for (int write = 0; write < 2; write++) {
            atomic_store(write ? &plan.writes_left : &plan.reads_left, 0);
            CHECK_FAILS(zpp_unit_file_carry(at.unit_file, large, param_elems[2] * size, &fault, &err), ZPP_TIER,
                        "at offset");
            atomic_store(write ? &plan.writes_left : &plan.reads_left, -1);
        }
        free(before);
        free(seen);
        end_stepped(&at);
    }
    remove_folder();
}

/* Units side by side, of which one turns: neither a window nor a copy mixes their bytes, also where a cut goes through
 * one of them. */
static void only_one_of_two_units_turns(void) {
    enum { BYTES = 3 * PAGE, UNIT_ELEMS = BYTES / 4 };
    make_folder();
    for (int cut = 0; cut < 2; cut++) {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault;
        zpp_unit_file *unit_file = NULL;
        int units[2];
        size_t offsets[2];
        float *seen = calloc(2 * UNIT_ELEMS, 4), *grads = calloc(2 * UNIT_ELEMS, 4);
        float *states = calloc(4 * UNIT_ELEMS, 4);
        CHECK(seen && states && grads);
        reset_plan();
        CHECK_OK(zpp_unit_file_create(NULL, cut ? 0.8 : 1.0, &unit_file, &err));
        for (int i = 0; i < 2; i++) {
            CHECK_OK(zpp_unit_file_add(unit_file, BYTES, &units[i], &offsets[i], &err));
            CHECK_OK(zpp_unit_file_double_buffer(unit_file, units[i], &err));
        }
        CHECK_OK(zpp_unit_file_seal(unit_file, 0, &err));
        CHECK_OK(open_blocks(unit_file, true, 0, &fault, &err));
        for (size_t i = 0; i < 2 * UNIT_ELEMS; i++) seen[i] = grads[i] = 1.0f;
        CHECK_OK(zpp_unit_file_copy(unit_file, offsets[0], seen, BYTES, true, &fault, &err));
        CHECK_OK(zpp_unit_file_copy(unit_file, offsets[1], seen, BYTES, true, &fault, &err));
        struct zpp_unit_file_figures figures;
        zpp_unit_file_figures(unit_file, &figures);
        const size_t held = figures.resident_bytes / 4;
        CHECK_EQUAL(held > 0, cut);
        struct zpp_optim_segment segments[2];
        for (size_t i = 0; i < 2; i++) {
            const size_t first = i ? 0 : held;
            segments[i] = (struct zpp_optim_segment){
                .param = (float *)(void *)(zpp_unit_file_mapping(unit_file) + offsets[i]) + first, .grad = grads,
                .grad_dtype = ZPP_F32, .exp_avg = states + 2 * i * UNIT_ELEMS,
                .exp_avg_sq = states + (2 * i + 1) * UNIT_ELEMS, .elems = UNIT_ELEMS - first, .step = 1, .lr = 1.0,
                .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 };
            CHECK(zpp_unit_file_on_disk(unit_file, segments[i].param));
        }
        CHECK_EQUAL(zpp_unit_file_on_disk(unit_file, zpp_unit_file_mapping(unit_file)), !cut);
        CHECK(!zpp_unit_file_on_disk(unit_file, grads) && !zpp_unit_file_on_disk(unit_file, NULL));
        const struct zpp_step_files files = { .params = unit_file, .next = true };
        bool torn;
        CHECK_OK(zpp_unit_file_step(&files, segments, 2, 1.0f, NULL, &torn, &fault, &err));
        zpp_unit_file_flip(unit_file, units[1]);
        for (size_t i = 0; i < 2; i++) {
            CHECK_OK(zpp_unit_file_copy(unit_file, offsets[i], seen, BYTES, false, &fault, &err));
            for (size_t j = 0; j < UNIT_ELEMS; j++) CHECK(i ? seen[j] < 0.01f : seen[j] == 1.0f);
        }
        zpp_unit_file_flip(unit_file, units[0]);
        CHECK_OK(zpp_unit_file_copy(unit_file, offsets[0], seen, BYTES, false, &fault, &err));
        for (size_t j = 0; j < UNIT_ELEMS; j++) CHECK(j < held ? seen[j] == 1.0f : seen[j] < 0.01f);
        zpp_unit_file_destroy(unit_file);
        CHECK_EQUAL(unlink(in_folder("params")), 0);
        free(seen);
        free(states);
        free(grads);
    }
    remove_folder();
}

/* The n-th read or write of a step fails, for every n. Either nothing was stepped and nothing is torn, or it says
 * so. */
static void every_operation_of_a_step_fails_once(void) {
    make_folder();
    for (int turn = 0; turn < 2 * WHERES; turn++) {
        const enum where where = (enum where)(turn % WHERES);
        const bool write = turn / WHERES;
        for (int n = 0;; n += n > 4 ? 6 : 1) { /* each one of the first windows, then a sample */
            struct zpp_err err = ZPP_ERR_INIT;
            struct zpp_aio_fault fault = { .wanted_bytes = 0 };
            bool torn;
            reset_plan();
            struct stepped at = new_stepped(where, 1.0);
            const bool was_same = where == FP32_IN_FILE;
            atomic_store(write ? &plan.writes_left : &plan.reads_left, n);
            const zpp_status status = step(&at, 1, NULL, &torn, &fault, &err);
            atomic_store(write ? &plan.writes_left : &plan.reads_left, -1);
            if (status == ZPP_OK) {
                CHECK(!torn && same(&at));
                end_stepped(&at);
                CHECK(n > 0 || (where == COPIES_IN_FILE && !write)); /* copies are never read */
                break;
            }
            CHECK_EQUAL(status, ZPP_TIER);
            CHECK(strstr(err.text, strerror(EIO)) && strstr(err.text, "at offset") && fault.os_errno == EIO);
            if (!torn && was_same) { /* nothing was stepped: the same step can be taken again */
                struct adam fresh = new_adam();
                memcpy(at.plain.master, fresh.master, ELEMS * 4);
                drop_adam(&fresh);
                CHECK(same(&at));
            }
            CHECK(torn || (!write && where == FP32_IN_FILE));
            end_stepped(&at);
        }
    }
    remove_folder();
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(steps_equal_memory), TEST(steps_of_next_copies_equal_memory),
                                              TEST(only_one_of_two_units_turns),
                                              TEST(every_operation_of_a_step_fails_once), { 0 } };
    return test_main(argc, argv, cases);
}
