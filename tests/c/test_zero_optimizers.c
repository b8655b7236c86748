/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizers that travel in one kind of segment: each has the bits of its own operator, whatever their number and
 * order, from memory and from a tier that has the moments of that optimizer and no others.
 */
#include "../../csrc/zero/offload/optim_file.h"
#include "aio_common.h"
#include "planned_io.h"
#include "threads.h"

enum { PIECES = 150, PIECE_ELEMS = 37, ELEMS = PIECES * PIECE_ELEMS, STEPS = 3 };

enum { NESTEROV = ZPP_OPTIM_SGD + 1, VARIANTS }; /* variants: each optimizer, and Nesterov's form of SGD */

struct side {
    float param[ELEMS], moment[2][ELEMS];
    uint16_t low[ELEMS];
};

static float grad[ELEMS];

static void fill_side(struct side *side) {
    memset(side, 0, sizeof *side);
    for (size_t i = 0; i < ELEMS; i++) {
        side->param[i] = (float)((i * 7919) % 1000) / 500.0f - 1.0f;
        grad[i] = (float)((i * 104729) % 997) / 997.0f - 0.5f;
    }
}

/* Elements [begin, end) in step t. Of SGD every third piece has no momentum. */
static struct zpp_optim_segment segment_of(int update, struct side *side, size_t piece, uint64_t t) {
    const size_t begin = piece * PIECE_ELEMS;
    struct zpp_optim_segment segment = { .param = side->param + begin, .grad = grad + begin,
                                         .param_out = side->low + begin, .elems = PIECE_ELEMS, .grad_dtype = ZPP_F32,
                                         .out_dtype = ZPP_BF16, .step = t, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.3,
                                         .lr_decay = 0.9, .initial_sum = 0.3, .init_sum = true, .momentum = 0.9,
                                         .dampening = 0.3, .eps = 1e-8, .weight_decay = 0.1, .maximize = piece % 2,
                                         .nesterov = update == NESTEROV,
                                         .optimizer = (unsigned char)(update == NESTEROV ? ZPP_OPTIM_SGD : update) };
    const bool sgd = update == ZPP_OPTIM_SGD || update == NESTEROV;
    if (update != ZPP_OPTIM_ADAGRAD && !(sgd && piece % 3 == 0)) segment.exp_avg = side->moment[0] + begin;
    if (update == ZPP_OPTIM_ADAM || update == ZPP_OPTIM_ADAGRAD) segment.exp_avg_sq = side->moment[1] + begin;
    return segment;
}

/* Alone, with Adagrad's sum filled by the caller. */
static void step_plainly(const struct zpp_optim_segment *segment) {
    struct zpp_optim_segment s = *segment;
    const bool fill = s.optimizer == ZPP_OPTIM_ADAGRAD && s.step == 1;
    for (size_t i = 0; fill && i < s.elems; i++) s.sum[i] = 0.3f;
    s.init_sum = false;
    zpp_optim_step_at(ZPP_CPU_SCALAR, &s, 1, 0.5f, NULL);
}

/* All updates, one beside the other, then in long runs. */
static void mixed_in_one_call(void) {
    static struct side plain, ours;
    for (size_t run = 1; run <= 100; run *= 100) {
        fill_side(&plain);
        fill_side(&ours);
        for (uint64_t t = 1; t <= STEPS; t++) {
            struct zpp_optim_segment segments[PIECES];
            for (size_t i = 0; i < PIECES; i++) {
                const int update = (int)(i / run % VARIANTS);
                const struct zpp_optim_segment one = segment_of(update, &plain, i, t);
                step_plainly(&one);
                segments[i] = segment_of(update, &ours, i, t);
            }
            zpp_optim_step(segments, PIECES, 0.5f, NULL);
            CHECK(memcmp(&plain, &ours, sizeof ours) == 0);
        }
    }
    zpp_optim_step(NULL, 0, 0.5f, NULL);
}

/* In a tier, whole and in part, with a master and without; none of its pieces has moments that it has no room for. */
static void from_a_tier(int update, bool master, double fraction) {
    static const unsigned moments[VARIANTS] = { 3, 1, 2, 1, 1 };
    static struct side plain, ours;
    static float seen[ELEMS];
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const struct zpp_step_files files = { 0 };
    zpp_optim_file *optim_file = NULL;
    int shard;
    reset_plan();
    const struct zpp_optim_file_options options = {
        .file = { .path = in_folder("states"), .sys = &sys, .log = count_log }, .fraction = fraction,
        .moments = moments[update], .chunk_elems = 1024 };
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    CHECK_OK(zpp_optim_file_add(optim_file, ELEMS, master, &shard, &err));
    CHECK_OK(zpp_optim_file_seal(optim_file, &fault, &err));
    fill_side(&plain);
    fill_side(&ours);
    if (master) CHECK_OK(zpp_optim_file_copy(optim_file, shard, ZPP_TIER_MASTER, 0, ELEMS, ours.param, true, &fault,
                                             &err));
    for (uint64_t t = 1; t <= STEPS; t++) {
        struct zpp_optim_file_piece pieces[PIECES];
        for (size_t i = 0; i < PIECES; i++) {
            const struct zpp_optim_segment one = segment_of(update, &plain, i, t);
            step_plainly(&one);
            pieces[i] = (struct zpp_optim_file_piece){ segment_of(update, &ours, i, t), shard, i * PIECE_ELEMS };
        }
        CHECK_OK(zpp_optim_file_step(optim_file, pieces, PIECES, &files, 0.5f, NULL, &fault, &err));
        CHECK(memcmp(plain.low, ours.low, sizeof ours.low) == 0);
    }
    struct zpp_optim_file_figures figures;
    zpp_optim_file_figures(optim_file, &figures);
    for (int kind = ZPP_TIER_MASTER; kind < ZPP_TIER_MAX_EXP_AVG_SQ; kind++) {
        const bool has = kind == ZPP_TIER_MASTER ? master : moments[update] >> (kind - ZPP_TIER_EXP_AVG) & 1;
        CHECK_EQUAL(figures.file_bytes[kind] + figures.held_bytes[kind], has ? ELEMS * sizeof(float) : 0);
        if (!has) continue;
        CHECK_OK(zpp_optim_file_copy(optim_file, shard, (enum zpp_optim_file_kind)kind, 0, ELEMS, seen, false, &fault,
                                     &err));
        const float *wanted = kind == ZPP_TIER_MASTER ? plain.param : plain.moment[kind - ZPP_TIER_EXP_AVG];
        CHECK(memcmp(seen, wanted, sizeof seen) == 0);
    }
    zpp_optim_file_destroy(optim_file);
    CHECK_EQUAL(unlink(in_folder("states")), 0);
}

static void tiers_of_every_update(void) {
    make_folder();
    for (int turn = 0; turn < 4 * VARIANTS; turn++)
        from_a_tier(turn / 4, turn & 1, turn & 2 ? 0.5 : 1.0);
}

/* SGD without momentum and without a master keeps nothing: there is no file to speak of, and a step all the same. */
static void a_tier_of_nothing(void) {
    static struct side plain, ours;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const struct zpp_step_files files = { 0 };
    zpp_optim_file *optim_file = NULL;
    int shard;
    make_folder();
    reset_plan();
    const struct zpp_optim_file_options options = {
        .file = { .path = in_folder("states"), .sys = &sys, .log = count_log }, .fraction = 1.0 };
    CHECK_OK(zpp_optim_file_create(&options, &optim_file, &err));
    CHECK_OK(zpp_optim_file_add(optim_file, ELEMS, false, &shard, &err));
    CHECK_OK(zpp_optim_file_seal(optim_file, &fault, &err));
    fill_side(&plain);
    fill_side(&ours);
    struct zpp_optim_segment one = segment_of(ZPP_OPTIM_SGD, &plain, 0, 1);
    step_plainly(&one);
    const struct zpp_optim_file_piece piece = { segment_of(ZPP_OPTIM_SGD, &ours, 0, 1), shard, 0 };
    CHECK_OK(zpp_optim_file_step(optim_file, &piece, 1, &files, 0.5f, NULL, &fault, &err));
    CHECK(memcmp(&plain, &ours, sizeof ours) == 0);
    struct zpp_optim_file_figures figures;
    zpp_optim_file_figures(optim_file, &figures);
    CHECK_EQUAL(figures.reserved_bytes, 0u);
    CHECK_EQUAL(figures.buffer_bytes, 0u);
    zpp_optim_file_destroy(optim_file);
    CHECK_EQUAL(unlink(in_folder("states")), 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(mixed_in_one_call), TEST(tiers_of_every_update),
                                              TEST(a_tier_of_nothing), { 0 } };
    return test_main(argc, argv, cases);
}
