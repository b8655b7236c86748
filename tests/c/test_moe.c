/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts: every CPU version of the kernels against the scalar one, bit for bit, over kinds, lengths,
 * alignments, numbers of rows and what is not finite; nothing beyond an array's end is touched; e^x against libm; a
 * whole layer cut over threads. (That the formulas are those of the papers is shown in tests/ops/test_moe.py.)
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/element.h"
#include "../../csrc/ops/exp.h"
#include "../../csrc/ops/moe/kernels.h"

enum { ROOM_ELEMS = 1200, ROWS = 5, GUARD = 0xa5 };

static uint64_t random_state = 1;
static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_value(bool wild) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, 1e30f, -1e30f, INFINITY, -INFINITY, NAN };
    const uint32_t kind = random_bits() % 128;
    if (wild && kind < sizeof special / sizeof special[0]) return special[kind];
    return ldexpf((float)random_bits() / 4294967296.0f - 0.5f, (int)(random_bits() % 10) - 3);
}

static bool same(float a, float b) { return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0; }

static bool same_floats(const void *a, const void *b, zpp_dtype dtype, size_t elems) {
    for (size_t i = 0; i < elems; ++i) {
        if (!same(zpp_element_load(a, dtype, i), zpp_element_load(b, dtype, i))) return false;
    }
    return true;
}

static bool guarded(const uint8_t *from, const uint8_t *end) {
    for (; from < end; ++from) {
        if (*from != GUARD) return false;
    }
    return true;
}

/* Calls `check` with each version that this machine has. */
typedef void (*check_fn)(const struct zpp_moe_kernels *kernels, const char *level);
static void each_level(check_fn check) {
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        const char *name = zpp_cpu_level_name((enum zpp_cpu_level)level);
        const struct zpp_moe_kernels *kernels = zpp_moe_kernels_at((enum zpp_cpu_level)level);
        const bool here = kernels && level <= (int)zpp_cpu_detected();
        printf("%s %s, ", name, here ? "here" : "not on this machine");
        if (here) check(kernels, name);
    }
}

/* --- e^x ---------------------------------------------------------------------------------------------------------- */
static void exp_is_within_two_ulp(void) {
    double worst = 0.0;
    for (float x = -86.9f; x < 87.9f; x += 0.00137f) {
        const double want = exp((double)x), ulp = ldexp(1.0, ilogb(want) - 23);
        const double off = fabs((double)zpp_exp(x) - want) / ulp;
        if (off > worst) worst = off;
    }
    printf("%.2f ulp, ", worst);
    CHECK(worst <= 2.0);
    CHECK(zpp_exp(0.0f) == 1.0f && zpp_exp(-INFINITY) < 2e-38f && zpp_exp(-INFINITY) > 0.0f);
    CHECK(isnan(zpp_exp(NAN)) && isfinite(zpp_exp(INFINITY)));
}

/* --- scores ------------------------------------------------------------------------------------------------------- */
static const size_t expert_counts[] = { 1, 2, 8, 15, 16, 17, 31, 64, 100, 1024 };

static bool same_scores(const float *logits, size_t experts, bool sigmoid, const struct zpp_moe_kernels *kernels) {
    float want[ZPP_MOE_MAX_EXPERTS], got[ZPP_MOE_MAX_EXPERTS];
    const struct zpp_moe_row_sums a = zpp_moe_scalar.scores(logits, experts, sigmoid, want);
    const struct zpp_moe_row_sums b = kernels->scores(logits, experts, sigmoid, got);
    return same(a.max, b.max) && same(a.sum, b.sum) && same_floats(want, got, ZPP_F32, zpp_moe_padded(experts));
}

/* By hand: what was not taken, the greatest, and of equals the first; a NaN and -inf are as little as can be. */
static bool is_choice(const float *by, size_t experts, size_t k, const int32_t *chosen) {
    bool taken[ZPP_MOE_MAX_EXPERTS] = { false };
    for (size_t j = 0; j < k; ++j) {
        size_t best = experts;
        for (size_t e = 0; e < experts; ++e) {
            const float value = by[e] > -3.4e38f ? by[e] : -3.4e38f;
            if (!taken[e] && (best == experts || value > (by[best] > -3.4e38f ? by[best] : -3.4e38f))) best = e;
        }
        if (chosen[j] != (int32_t)best) return false;
        taken[best] = true;
    }
    return true;
}

static void check_scores(const struct zpp_moe_kernels *kernels, const char *level) {
    for (int round = 0; round < 400; ++round) {
        const size_t experts = expert_counts[round % 10];
        /* At the end of an allocation: what reads beyond it is seen by AddressSanitizer. */
        float *logits = malloc(experts * sizeof *logits);
        float work[ZPP_MOE_MAX_EXPERTS], shares[2][ZPP_MOE_MAX_EXPERTS];
        int32_t chosen[ZPP_MOE_MAX_CHOICES];
        const size_t most = experts < ZPP_MOE_MAX_CHOICES ? experts : ZPP_MOE_MAX_CHOICES;
        for (size_t e = 0; e < experts; ++e) logits[e] = random_value(round % 3 == 0);
        if (!same_scores(logits, experts, false, kernels) || !same_scores(logits, experts, true, kernels)) {
            fprintf(stderr, "scores %s: %zu experts\n", level, experts);
            CHECK(!"scores differ from scalar");
        }
        for (int e = 0; e < ZPP_MOE_MAX_EXPERTS; ++e) {
            shares[0][e] = shares[1][e] = random_value(false), work[e] = random_value(false);
        }
        zpp_moe_scalar.add(shares[0], work, 0.3f, experts);
        kernels->add(shares[1], work, 0.3f, experts);
        CHECK(memcmp(shares[0], shares[1], experts * sizeof(float)) == 0);
        for (size_t e = 0; e < experts && round % 4 == 0; ++e) logits[e] = rintf(logits[e]); /* ties */
        for (size_t e = 0; e < experts && round % 40 < 10; ++e) logits[e] = e % 5 ? NAN : -INFINITY;
        const size_t k = round % 2 ? most : 1 + (size_t)round % most;
        kernels->choose(logits, experts, k, work, chosen);
        CHECK(is_choice(logits, experts, k, chosen));
        memcpy(work, logits, experts * sizeof *logits);
        kernels->choose(work, experts, k, work, chosen);
        CHECK(is_choice(logits, experts, k, chosen));
        free(logits);
    }
}
static void scores(void) { each_level(check_scores); }

/* --- rows --------------------------------------------------------------------------------------------------------- */
static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
static const size_t lengths[] = { 0, 1, 2, 15, 16, 17, 31, 32, 33, 100, 1024 };

struct arrays {
    _Alignas(64) uint8_t rows[ROWS][4 * ROOM_ELEMS];
    uint8_t want[4 * ROOM_ELEMS], got[4 * ROOM_ELEMS];
};
static struct arrays arrays;

static void fill_rows(zpp_dtype dtype) {
    for (int r = 0; r < ROWS; ++r) {
        for (size_t i = 0; i < ROOM_ELEMS; ++i) zpp_element_store(arrays.rows[r], dtype, i, random_value(true));
    }
    memset(arrays.want, GUARD, sizeof arrays.want);
    memset(arrays.got, GUARD, sizeof arrays.got);
}

static void check_written(const char *what, const char *level, zpp_dtype dtype, size_t elems, size_t offset) {
    const size_t bytes = zpp_dtype_bytes(dtype), begin = offset * bytes, end = begin + elems * bytes;
    const bool ok = same_floats(arrays.want + begin, arrays.got + begin, dtype, elems);
    const bool kept =
        guarded(arrays.got, arrays.got + begin) && guarded(arrays.got + end, arrays.got + sizeof arrays.got);
    if (ok && kept) return;
    fprintf(stderr, "%s %s: %s, %zu elements at %zu\n", what, level, zpp_dtype_name(dtype), elems, offset);
    CHECK(kept);
    CHECK(ok);
}

static void check_row_kernels(const struct zpp_moe_kernels *kernels, const char *level) {
    static const size_t offsets[] = { 0, 1, 7, 16, 33 };
    for (int d = 0; d < 3; ++d) for (int l = 0; l < 11; ++l) for (int o = 0; o < 5; ++o)
    for (int stream = 0; stream < 2; ++stream) {
        const zpp_dtype dtype = kinds[d];
        const size_t elems = lengths[l], offset = offsets[o], at = offset * zpp_dtype_bytes(dtype);
        const void *from[ROWS];
        float weights[ROWS];
        fill_rows(dtype);
        for (int r = 0; r < ROWS; ++r) {
            from[r] = arrays.rows[r] + (size_t)r * zpp_dtype_bytes(dtype);
            weights[r] = random_value(false);
        }
        for (size_t count = 1; count <= ROWS; ++count) for (int weighted = 0; weighted < 2; ++weighted) {
            const float *by = weighted ? weights : NULL;
            zpp_moe_scalar.combine(arrays.want + at, from, by, count, elems, dtype, false);
            kernels->combine(arrays.got + at, from, by, count, elems, dtype, stream);
            check_written("combine", level, dtype, elems, offset);
        }
        zpp_moe_scalar.scale(arrays.want + at, from[1], weights[0], elems, dtype, false);
        kernels->scale(arrays.got + at, from[1], weights[0], elems, dtype, stream);
        check_written("scale", level, dtype, elems, offset);
        kernels->copy(arrays.got + at, from[2], elems * zpp_dtype_bytes(dtype), stream);
        CHECK(memcmp(arrays.got + at, from[2], elems * zpp_dtype_bytes(dtype)) == 0);
        memcpy(arrays.want + at, from[2], elems * zpp_dtype_bytes(dtype));
        check_written("copy", level, dtype, elems, offset);
        CHECK(same(zpp_moe_scalar.dot(from[0], from[3], elems, dtype), kernels->dot(from[0], from[3], elems, dtype)));
    }
}
static void rows(void) { each_level(check_row_kernels); }

/* The first row is the gate, then up and grad; results go where the caller reads, as they may. */
static void check_swiglu(const struct zpp_moe_kernels *kernels, const char *level) {
    for (int d = 0; d < 3; ++d) for (int l = 0; l < 11; ++l) {
        const zpp_dtype dtype = kinds[d];
        const size_t elems = lengths[l], bytes = elems * zpp_dtype_bytes(dtype);
        static uint8_t again[3][4 * ROOM_ELEMS];
        fill_rows(dtype);
        zpp_moe_scalar.swiglu(arrays.want, arrays.rows[0], arrays.rows[1], elems, dtype);
        kernels->swiglu(arrays.got, arrays.rows[0], arrays.rows[1], elems, dtype);
        check_written("swiglu", level, dtype, elems, 0);
        for (int r = 0; r < 3; ++r) memcpy(again[r], arrays.rows[r], sizeof again[r]);
        const struct zpp_moe_swiglu_row want = { arrays.rows[0], arrays.rows[1], arrays.rows[2],
                                                 arrays.rows[3], arrays.rows[4], arrays.want };
        const struct zpp_moe_swiglu_row got = { again[0], again[1], again[2], again[0], again[1], again[2] };
        zpp_moe_scalar.swiglu_backward(&want, elems, dtype);
        kernels->swiglu_backward(&got, elems, dtype);
        CHECK(same_floats(arrays.rows[3], again[0], dtype, elems));
        CHECK(same_floats(arrays.rows[4], again[1], dtype, elems));
        CHECK(same_floats(arrays.want, again[2], dtype, elems));
        for (int r = 0; r < 3; ++r)
            CHECK(memcmp(again[r] + bytes, arrays.rows[r] + bytes, sizeof again[r] - bytes) == 0);
    }
}
static void gated(void) { each_level(check_swiglu); }

/* --- a layer ------------------------------------------------------------------------------------------------------ */
enum { TOKENS = 777, EXPERTS = 13, CHOICES = 3, WIDTH = 67, CAPACITY = 150 };

struct layer {
    float weights[TOKENS * CHOICES], losses[ZPP_MOE_LOSSES], grad_logits[TOKENS * EXPERTS];
    int32_t chosen[TOKENS * CHOICES], slots[TOKENS * CHOICES];
    int64_t counts[EXPERTS], kept[EXPERTS];
    float buffer[TOKENS * CHOICES * WIDTH], y[TOKENS * WIDTH], grad_buffer[TOKENS * CHOICES * WIDTH];
    float grad_weights[TOKENS * CHOICES];
};

static void run_layer(const float *logits, const float *x, size_t capacity, bool sigmoid, zpp_pool *pool,
                      struct layer *out) {
    struct zpp_err err = ZPP_ERR_INIT;
    memset(out, 0, sizeof *out);
    const struct zpp_moe_gate gate = { .logits = logits, .tokens = TOKENS, .experts = EXPERTS, .k = CHOICES,
                                       .sigmoid = sigmoid, .normalise = true };
    CHECK_OK(zpp_moe_gate(&gate, out->weights, out->chosen, out->counts, out->losses, pool, &err));
    const struct zpp_moe_plan plan = { out->chosen, TOKENS, EXPERTS, CHOICES, capacity, capacity ? 5 : -1 };
    CHECK_OK(zpp_moe_plan(&plan, out->slots, out->kept, &err));
    const struct zpp_moe_rows moved = { out->slots, out->kept, TOKENS, CHOICES, EXPERTS, capacity, WIDTH, ZPP_F32 };
    zpp_moe_dispatch(&moved, x, out->buffer, pool);
    zpp_moe_combine(&moved, out->buffer, out->weights, out->y, pool);
    zpp_moe_combine_backward(&moved, out->buffer, out->weights, x, out->grad_buffer, out->grad_weights, pool);
    zpp_moe_gate_backward(&gate, out->chosen, out->counts, out->grad_weights, out->losses, out->grad_logits, pool);
}

static void threads_do_not_show(void) {
    static float logits[TOKENS * EXPERTS], x[TOKENS * WIDTH];
    static struct layer want, got;
    for (size_t i = 0; i < TOKENS * EXPERTS; ++i) logits[i] = random_value(false);
    for (size_t i = 0; i < TOKENS * WIDTH; ++i) x[i] = random_value(false);
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (size_t capacity = 0; capacity <= CAPACITY; capacity += CAPACITY) {
        for (int sigmoid = 0; sigmoid < 2; ++sigmoid) {
            run_layer(logits, x, capacity, sigmoid, NULL, &want);
            run_layer(logits, x, capacity, sigmoid, pool, &got);
            CHECK(memcmp(&want, &got, sizeof want) == 0);
        }
    }
    zpp_pool_destroy(pool);
}

static void no_tokens(void) {
    float losses[ZPP_MOE_LOSSES] = { 9, 9 };
    int64_t counts[2] = { 9, 9 }, kept[2] = { 9, 9 };
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_moe_gate gate = { .experts = 2, .k = 1 };
    CHECK_OK(zpp_moe_gate(&gate, NULL, NULL, counts, losses, NULL, &err));
    CHECK(counts[0] == 0 && counts[1] == 0 && losses[0] == 0.0f && losses[1] == 0.0f);
    const struct zpp_moe_plan plan = { NULL, 0, 2, 1, 3, 0 };
    CHECK_OK(zpp_moe_plan(&plan, NULL, kept, &err));
    CHECK(kept[0] == 0 && kept[1] == 0);
    float buffer[6 * 2];
    memset(buffer, GUARD, sizeof buffer);
    const struct zpp_moe_rows moved = { NULL, kept, 0, 1, 2, 3, 2, ZPP_F32 };
    zpp_moe_dispatch(&moved, NULL, buffer, NULL);
    for (int i = 0; i < 12; ++i) CHECK(buffer[i] == 0.0f);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(exp_is_within_two_ulp), TEST(scores), TEST(rows), TEST(gated),
                                              TEST(threads_do_not_show), TEST(no_tokens), {0} };
    return test_main(argc, argv, cases);
}
