/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention: every CPU version of the kernels against the scalar one, bit for bit, with numbers that are
 * not finite, the AVX-512 one lane by lane (avx512_emulated.h) where the machine lacks it; whole forward and backward
 * passes cut over threads, and layouts that are refused. (That the formulas are right is shown in
 * tests/ops/test_sparse_attention.py.)
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "avx512_emulated.h"

#define zpp_sparse_avx512 emulated_sparse
#include "../../csrc/ops/sparse_attention/sparse_attention_isa.c"
#undef zpp_sparse_avx512

#include "../../csrc/base/pool.h"

enum { SIDE = 64, WIDTH = 48, GUARD_ELEMS = 16 };

static uint64_t random_state = 1;
static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_value(bool wild) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, 1e30f, -1e30f, INFINITY, -INFINITY, NAN };
    const uint32_t kind = random_bits() % 256;
    if (wild && kind < sizeof special / sizeof special[0]) return special[kind];
    return ldexpf((float)random_bits() / 4294967296.0f - 0.5f, (int)(random_bits() % 6));
}

static void fill(float *to, size_t elems, bool wild) {
    for (size_t i = 0; i < elems; ++i) to[i] = random_value(wild);
}

static bool same_floats(const float *a, const float *b, size_t elems) {
    for (size_t i = 0; i < elems; ++i) {
        if (!(isnan(a[i]) && isnan(b[i])) && memcmp(&a[i], &b[i], sizeof a[i]) != 0) return false;
    }
    return true;
}

typedef void (*check_fn)(const struct zpp_sparse_kernels *kernels);
static void each_version(check_fn check) {
    check(&emulated_sparse);
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        const struct zpp_sparse_kernels *kernels = zpp_sparse_kernels_at((enum zpp_cpu_level)level);
        const bool here = kernels && level <= (int)zpp_cpu_detected();
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        if (here) check(kernels);
    }
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */
static float a[SIDE * SIDE], b[SIDE * SIDE], want[SIDE * SIDE + GUARD_ELEMS], got[SIDE * SIDE + GUARD_ELEMS];

static void check_matmul(const struct zpp_sparse_kernels *kernels) {
    static const size_t sides[] = { 16, 32, 64 }, inner[] = { 1, 16, 33, 64 };
    for (int m = 0; m < 3; ++m) for (int n = 0; n < 3; ++n) for (int k = 0; k < 4; ++k)
    for (int across = 0; across < 2; ++across) for (int add = 0; add < 2; ++add) {
        const struct zpp_sparse_sizes sizes = { sides[m], sides[n], inner[k] };
        const struct zpp_sparse_tile left = { a, across ? 1 : SIDE, across ? SIDE : 1 };
        fill(a, SIDE * SIDE, m == 0);
        fill(b, SIDE * SIDE, m == 0);
        fill(want, SIDE * SIDE + GUARD_ELEMS, false);
        memcpy(got, want, sizeof got);
        zpp_sparse_scalar.matmul(want, SIDE, left, b, SIDE, sizes, add);
        kernels->matmul(got, SIDE, left, b, SIDE, sizes, add);
        CHECK(same_floats(want, got, SIDE * SIDE + GUARD_ELEMS));
    }
}
static void matmuls(void) { each_version(check_matmul); }

static void check_softmax(const struct zpp_sparse_kernels *kernels) {
    for (int round = 0; round < 60; ++round) {
        const size_t rows = 1 + random_bits() % SIDE, lanes = round % 2 ? 16 : 48;
        float state[2][3][SIDE];
        fill(want, SIDE * SIDE, round % 3 == 0);
        for (size_t i = 0; i < SIDE; ++i) {
            if (round % 4 == 1 && i % 3 == 0) {
                for (size_t j = 0; j < rows && i < lanes; ++j) want[j * lanes + i] = -INFINITY; /* sees nothing */
            }
            state[0][0][i] = round % 4 < 2 ? -INFINITY : random_value(round % 3 == 0);
            state[0][1][i] = round % 4 < 2 ? 0.0f : fabsf(random_value(false));
        }
        memcpy(got, want, sizeof got);
        memcpy(state[1], state[0], sizeof state[0]);
        zpp_sparse_scalar.softmax(want, rows, lanes, 0.3f, state[0][0], state[0][1], state[0][2]);
        kernels->softmax(got, rows, lanes, 0.3f, state[1][0], state[1][1], state[1][2]);
        CHECK(same_floats(want, got, SIDE * SIDE));
        for (int which = 0; which < 3; ++which) CHECK(same_floats(state[0][which], state[1][which], lanes));
        for (size_t i = 0; i < lanes && round % 4 == 1; i += 3) CHECK(state[1][1][i] == 0.0f && got[i] == 0.0f);
    }
}
static void softmaxes(void) { each_version(check_softmax); }

static void check_rows(const struct zpp_sparse_kernels *kernels) {
    for (int round = 0; round < 40; ++round) {
        const size_t rows = 1 + random_bits() % SIDE;
        float lse[SIDE], delta[SIDE], other[SIDE * WIDTH];
        fill(lse, SIDE, round % 2);
        fill(delta, SIDE, round % 2);
        if (round % 3 == 0) lse[0] = -INFINITY;
        fill(want, SIDE * WIDTH, round % 2);
        memcpy(got, want, sizeof got);
        zpp_sparse_scalar.scale_rows(want, rows, WIDTH, delta);
        kernels->scale_rows(got, rows, WIDTH, delta);
        CHECK(same_floats(want, got, SIDE * WIDTH));

        fill(a, SIDE * WIDTH, round % 2);
        memcpy(b, a, sizeof b);
        memcpy(other, got, sizeof other);
        zpp_sparse_scalar.weigh(a, want, rows, WIDTH, 0.7f, lse, delta);
        kernels->weigh(b, other, rows, WIDTH, 0.7f, lse, delta);
        CHECK(same_floats(a, b, SIDE * WIDTH) && same_floats(want, other, SIDE * WIDTH));
        for (size_t c = 0; c < WIDTH && round % 6 == 0; ++c) CHECK(b[c] == 0.0f);

        const float x = zpp_sparse_scalar.dot(a, want, WIDTH), y = kernels->dot(a, want, WIDTH);
        CHECK(same_floats(&x, &y, 1));
    }
}
static void rows_of_all_kinds(void) { each_version(check_rows); }

/* --- whole passes ------------------------------------------------------------------------------------------------- */
enum { BATCH = 2, HEADS = 2, SEQ = 75, DIM = 20, BLOCK = 16, BLOCKS = 5, ELEMS = BATCH * HEADS * SEQ * DIM };

struct pass {
    float out[ELEMS], lse[BATCH * HEADS * SEQ], grads[3][ELEMS];
};

static const int32_t starts[] = { 0, 2, 2, 4, 5, 8 }, columns[] = { 0, 3, 1, 4, 2, 0, 1, 4 };
static const struct zpp_sparse_layout layout = { starts, columns, 1, BLOCKS, 8, BLOCK };

/* Causal ones have dropout, and both heads of q look at one of k and v. */
static void do_pass(const float *qkv, const uint8_t *mask, bool causal, size_t batch, size_t first, zpp_pool *pool,
                    struct pass *pass) {
    static const int64_t seed = 42;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_sparse_attention at = {
        .q = qkv,
        .k = qkv + ELEMS,
        .v = qkv + 2 * ELEMS,
        .key_mask = mask,
        .dtype = ZPP_F32,
        .batch = batch,
        .heads = HEADS,
        .kv_heads = causal ? 1 : HEADS,
        .seq = SEQ,
        .first = first,
        .queries = SEQ - first,
        .dim = DIM,
        .layout = layout,
        .scale = 0.2f,
        .causal = causal,
        .dropout = causal ? 0.3f : 0.0f,
        .seed = &seed,
    };
    memset(pass, 0, sizeof *pass);
    CHECK_OK(zpp_sparse_layout_check(&layout, HEADS, SEQ, &err));
    CHECK_OK(zpp_sparse_attention_forward(&at, pass->out, pass->lse, pool, &err));
    const struct zpp_sparse_attention_grads grads = {
        pass->out, qkv + 3 * ELEMS, pass->lse, pass->grads[0], pass->grads[1], pass->grads[2],
    };
    CHECK_OK(zpp_sparse_attention_backward(&at, &grads, pool, &err));
}

static void threads_do_not_show(void) {
    static float qkv[4 * ELEMS];
    static struct pass one, many;
    uint8_t mask[BATCH * SEQ];
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool = NULL;
    fill(qkv, 4 * ELEMS, false);
    for (size_t j = 0; j < sizeof mask; ++j) mask[j] = random_bits() % 4 != 0;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (int causal = 0; causal < 2; ++causal) for (size_t batch = 0; batch <= BATCH; ++batch) {
            do_pass(qkv, causal ? mask : NULL, causal, batch, 0, NULL, &one);
            do_pass(qkv, causal ? mask : NULL, causal, batch, 0, pool,
                    &many); /* one sample: fewer heads than threads */
            CHECK(memcmp(&one, &many, sizeof one) == 0);
            for (size_t i = 0; i < DIM && batch; ++i) CHECK(one.out[BLOCK * DIM + i] == 0.0f); /* the second block's */
            for (size_t first = 1; first < SEQ; first += 37) { /* within a block; one query */
                do_pass(qkv, causal ? mask : NULL, causal, batch, first, NULL, &one);
                do_pass(qkv, causal ? mask : NULL, causal, batch, first, pool, &many);
                CHECK(memcmp(&one, &many, sizeof one) == 0);
            }
    }
    zpp_pool_destroy(pool);
}

static void wrong_layouts_are_refused(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_sparse_layout wrong = layout;
    wrong.block_elems = 24;
    CHECK(zpp_sparse_layout_check(&wrong, HEADS, SEQ, &err) == ZPP_INVALID);
    CHECK(zpp_sparse_layout_check(&layout, HEADS, SEQ + BLOCK, &err) == ZPP_INVALID);
    wrong = layout, wrong.heads = 3;
    CHECK(zpp_sparse_layout_check(&wrong, HEADS, SEQ, &err) == ZPP_INVALID);
    wrong = layout, wrong.entries = 7;
    CHECK(zpp_sparse_layout_check(&wrong, HEADS, SEQ, &err) == ZPP_INVALID);
    static const int32_t falls[] = { 0, 2, 1, 4, 5, 8 }, twice[] = { 0, 3, 1, 1, 2, 0, 1, 4 };
    wrong = layout, wrong.starts = falls;
    CHECK(zpp_sparse_layout_check(&wrong, HEADS, SEQ, &err) == ZPP_INVALID && strstr(err.text, "starts[2] is 1"));
    wrong = layout, wrong.columns = twice;
    CHECK(zpp_sparse_layout_check(&wrong, HEADS, SEQ, &err) == ZPP_INVALID && strstr(err.text, "columns[3] is 1"));
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(matmuls), TEST(softmaxes), TEST(rows_of_all_kinds), TEST(threads_do_not_show),
        TEST(wrong_layouts_are_refused), {0},
    };
    return test_main(argc, argv, cases);
}
