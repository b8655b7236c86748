/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms: every CPU version against the scalar one, bit for bit, over lengths,
 * alignments and threads; nothing beyond a tensor's end is touched. (That the scalar version is the paper's is shown in
 * tests/ops/test_onebit_lamb.py.)
 */
#include "floats.h"
#include "threads.h"

#include "../../csrc/ops/onebit_lamb/onebit_lamb.h"

enum { ROOM_ELEMS = 9100, GUARD = 0xa5, TENSORS = 3 };

struct arrays {
    float param[ROOM_ELEMS], exp_avg[ROOM_ELEMS], before[ROOM_ELEMS], exp_avg_sq[ROOM_ELEMS], fresh_sq[ROOM_ELEMS];
};
struct results {
    double sums[TENSORS][2];
    float largest[TENSORS];
};
static struct arrays start, want, got;

/* Three tensors, one behind the other; the second has no elements. */
static zpp_status step(struct arrays *a, size_t elems, size_t offset, int level, zpp_pool *pool, struct results *to) {
    struct zpp_onebit_lamb_segment segments[TENSORS];
    struct zpp_err err = ZPP_ERR_INIT;
    for (size_t k = 0; k < TENSORS; ++k) {
        const size_t first = offset + (k ? elems / 3 : 0);
        segments[k] = (struct zpp_onebit_lamb_segment){
            .param = a->param + first, .exp_avg = a->exp_avg + first, .before = a->before + first,
            .exp_avg_sq = a->exp_avg_sq + first, .fresh_sq = a->fresh_sq + first,
            .elems = k == 0 ? elems / 3 : k == 1 ? 0 : elems - elems / 3, .step = 7 + k, .freeze_step = 5,
            .coefficient = 1.5, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = k ? 0.1 : 0.0 };
    }
    return zpp_onebit_lamb_fresh_at((enum zpp_cpu_level)level, segments, TENSORS, to->sums[0], to->largest, pool,
                                    &err);
}

static bool same_number(double a, double b) { return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0; }

static void check_equal(size_t elems, size_t offset, const struct results *a, const struct results *b) {
    for (size_t k = 0; k < TENSORS; ++k) {
        CHECK(same_number(a->sums[k][0], b->sums[k][0]) && same_number(a->sums[k][1], b->sums[k][1]));
        CHECK(same_number((double)a->largest[k], (double)b->largest[k]));
    }
    CHECK(same(want.fresh_sq + offset, got.fresh_sq + offset, ZPP_F32, elems));
    memcpy(got.fresh_sq + offset, start.fresh_sq + offset, elems * sizeof(float)); /* all else is as it was */
    CHECK(memcmp(&got, &start, sizeof got) == 0);
}

static void check(size_t elems, size_t offset, bool wild, zpp_pool *pool) {
    struct results whole, again;
    memset(&start, GUARD, sizeof start);
    for (size_t i = offset; i < offset + elems; ++i) {
        start.param[i] = random_float(wild, 12, -8), start.exp_avg[i] = random_float(wild, 12, -8);
        start.before[i] = random_float(wild, 12, -8), start.fresh_sq[i] = fabsf(random_float(wild, 12, -8));
        start.exp_avg_sq[i] = i % 9 ? fabsf(random_float(wild, 12, -8)) : 0.0f;
    }
    want = start;
    CHECK(step(&want, elems, offset, ZPP_CPU_SCALAR, NULL, &whole) == ZPP_OK);
    for (int level = ZPP_CPU_SCALAR; level <= (int)zpp_cpu_detected(); ++level) {
        got = start;
        CHECK(step(&got, elems, offset, level, pool, &again) == ZPP_OK);
        check_equal(elems, offset, &whole, &again);
    }
}

static void lengths(void) {
    static const size_t all[] = { 0, 1, 31, 32, 33, 100, 4096, 9001 };
    static const size_t offsets[] = { 0, 1, 16, 21 };
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (size_t l = 0; l < 8; ++l) for (size_t o = 0; o < 4; ++o) for (int wild = 0; wild < 2; ++wild) {
        check(all[l], offsets[o], wild, pool);
    }
    zpp_pool_destroy(pool);
}

/* Says which versions the other case covers. */
static void levels(void) {
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const bool here = level <= (int)zpp_cpu_detected();
        struct zpp_err err = ZPP_ERR_INIT;
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        CHECK((zpp_onebit_lamb_fresh_at((enum zpp_cpu_level)level, NULL, 0, NULL, NULL, NULL, &err) == ZPP_OK) ==
              here);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(levels), TEST(lengths), {0} };
    return test_main(argc, argv, cases);
}
