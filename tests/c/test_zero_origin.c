/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of a shard name the ranks whose gradient was not finite: whichever source the sum overwrites, in every piece,
 * and whatever lies between parameters.
 */
#include <math.h>

#include "../../csrc/zero/internal.h"
#include "harness.h"

enum { PARAMS = 3, RANKS = 3, ELEMS = 65536 + 96, GAP = 20, NOWHERE = ELEMS };

/* | 20 | 12 of a gap | 65536 + 32 | 0 | 30 | 2 of a gap | */
static size_t offset_elems[PARAMS] = {0, 32, 65536 + 64}, param_elems[PARAMS] = {GAP, 65536 + 32, 30};
static float buckets[RANKS][ELEMS], elsewhere[ELEMS];

/* The set of ranks that a sum names. It replaces the source of rank `replaced`, or none (-1). */
static uint64_t named(int replaced, size_t gap_at, size_t at, const float values[RANKS]) {
    zpp_zero zero = {.rank = 0};
    struct zpp_group alone = {.rank = 0, .ranks = 1};
    struct zpp_unit unit = {.group = &alone, .params = PARAMS, .offset_elems = offset_elems, .param_elems = param_elems,
                            .elems = ELEMS, .shard_elems = ELEMS, .grad_dtype = ZPP_F32, .wire_dtype = ZPP_F32};
    const void *data[RANKS];
    const int from[RANKS] = {0, 1, 2};
    for (int r = 0; r < RANKS; r++) {
        for (size_t i = 0; i < ELEMS; i++) buckets[r][i] = 1.0f;
        if (gap_at != NOWHERE) buckets[r][gap_at] = NAN;
        buckets[r][at] = values[r];
        data[r] = buckets[r];
    }
    const struct zpp_sources sources = {data, from, RANKS, 1.0, false};
    return zpp_origin_add(&zero, &unit, &sources, replaced < 0 ? elsewhere : buckets[replaced]);
}

static void each_place(void) {
    static const size_t places[] = {0, GAP - 1, 32, 40000, 65535, 65536, 65536 + 64, ELEMS - 3};
    static const size_t gaps[] = {NOWHERE, GAP, 31, ELEMS - 1};
    static const float none[RANKS] = {3e38f, 3e38f, 3e38f}, second[RANKS] = {1.0f, NAN, 2.0f};
    static const float both[RANKS] = {-INFINITY, 1.0f, INFINITY}, fine[RANKS] = {0.0f, -1.0f, 1e38f};
    for (size_t p = 0; p < sizeof places / sizeof places[0]; p++)
        for (size_t g = 0; g < sizeof gaps / sizeof gaps[0]; g++)
            for (int replaced = -1; replaced < RANKS; replaced++) {
                CHECK_EQUAL(named(replaced, gaps[g], places[p], fine), 0);
                CHECK_EQUAL(named(replaced, gaps[g], places[p], none), 0); /* only their sum is infinite */
                CHECK_EQUAL(named(replaced, gaps[g], places[p], second), 1 << 1);
                CHECK_EQUAL(named(replaced, gaps[g], places[p], both), 1 << 0 | 1 << 2);
            }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(each_place), {0}};
    return test_main(argc, argv, cases);
}
