/* SPDX-License-Identifier: Apache-2.0
 *
 * Sum of squares: every CPU version gives the bits of the order that norm.h states, whatever the threads and however
 * many segments a call has; non-finite elements are counted.
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/norm/norm.h"

enum { ELEMS = 3 * ZPP_NORM_BLOCK_ELEMS + 77, ODD = 5 };

static zpp_pool *threads(void) {
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    return pool;
}

static int failures;
static void expect(bool ok, const char *what, zpp_dtype dtype, size_t elems, int level) {
    if (ok) return;
    failures++;
    fprintf(stderr, "norm %s: %s: %s, %zu elements\n", zpp_cpu_level_name((enum zpp_cpu_level)level), what,
            zpp_dtype_name(dtype), elems);
}

static double value_at(const void *data, zpp_dtype dtype, size_t i) {
    if (dtype == ZPP_F64) return ((const double *)data)[i];
    if (dtype == ZPP_F32) return ((const float *)data)[i];
    const uint16_t bits = ((const uint16_t *)data)[i];
    return dtype == ZPP_BF16 ? zpp_bf16_to_f32(bits) : zpp_f16_to_f32(bits);
}

/* norm.h's order, written a second time and differently: recursion for the tree. */
static double tree(const double *lanes, size_t count) {
    if (count == 1) return lanes[0];
    double half[16];
    for (size_t l = 0; l < count / 2; ++l) half[l] = lanes[l] + lanes[l + count / 2];
    return tree(half, count / 2);
}
static double stated(const void *data, zpp_dtype dtype, size_t elems) {
    double sum = 0.0;
    for (size_t begin = 0; begin < elems; begin += ZPP_NORM_BLOCK_ELEMS) {
        double lanes[ZPP_NORM_LANES] = { 0 };
        for (size_t i = begin; i < elems && i < begin + ZPP_NORM_BLOCK_ELEMS; ++i) {
            lanes[(i - begin) % ZPP_NORM_LANES] += value_at(data, dtype, i) * value_at(data, dtype, i);
        }
        sum += tree(lanes, ZPP_NORM_LANES);
    }
    return sum;
}

static void fill(void *data, zpp_dtype dtype, size_t elems) {
    uint32_t state = 7;
    for (size_t i = 0; i < elems; ++i) {
        state = state * 1664525u + 1013904223u;
        const float value = ldexpf((float)state / 4294967296.0f - 0.5f, (int)(state >> 8) % 9 - 6);
        const uint16_t bits = dtype == ZPP_BF16 ? zpp_bf16_from_f32(value) : zpp_f16_from_f32(value);
        const double fine = (double)value / 3.0; /* its square is not exact */
        if (dtype == ZPP_F64) memcpy((char *)data + 8 * i, &fine, 8);
        else if (dtype == ZPP_F32) memcpy((char *)data + 4 * i, &value, 4);
        else memcpy((char *)data + 2 * i, &bits, 2);
    }
}

static void check_length(const char *data, zpp_dtype dtype, size_t elems, zpp_pool *pool) {
    const struct zpp_norm_segment one = { data, dtype, elems }, three[3] = { one, { data, dtype, 20 }, one };
    const double wanted = stated(data, dtype, elems);
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        double sum = -1.0, sums[3];
        uint64_t bad = 9, bads[3];
        if (!zpp_norm_squares_at((enum zpp_cpu_level)level, &one, 1, &sum, &bad, NULL)) continue;
        expect(sum == wanted && bad == 0, "not the stated order", dtype, elems, level);
        zpp_norm_squares_at((enum zpp_cpu_level)level, three, 3, sums, bads, pool);
        expect(sums[0] == sum && sums[2] == sum && bads[2] == 0, "depends on threads or segments", dtype, elems, level);
    }
}

static void check_kind(zpp_dtype dtype) {
    zpp_pool *pool = threads();
    static const size_t lengths[] = { 0, 1, 31, 32, 33, 4095, 4096, 4097, ELEMS - ODD };
    const size_t elem_bytes = zpp_dtype_bytes(dtype);
    char *data = malloc(ELEMS * elem_bytes);
    fill(data, dtype, ELEMS);
    for (int l = 0; l < 9; ++l) {
        check_length(data, dtype, lengths[l], pool);
        check_length(data + ODD * elem_bytes, dtype, lengths[l], pool);
    }
    free(data);
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

static void fp32(void) { check_kind(ZPP_F32); }
static void bf16(void) { check_kind(ZPP_BF16); }
static void fp16(void) { check_kind(ZPP_F16); }
static void fp64(void) { check_kind(ZPP_F64); }

static void nonfinite(void) {
    zpp_pool *pool = threads();
    static float data[ELEMS];
    for (size_t i = 0; i < ELEMS; ++i) data[i] = 3e38f; /* finite: its square must not count */
    struct zpp_norm_segment segments[2] = { { data, ZPP_F32, ELEMS }, { data, ZPP_F32, 10 } };
    double sums[2];
    uint64_t bad[2];
    zpp_norm_squares(segments, 2, sums, bad, pool);
    expect(isfinite(sums[0]) && bad[0] == 0, "large finite elements overflow", ZPP_F32, ELEMS, zpp_cpu_level());
    data[11] = NAN, data[5000] = INFINITY, data[5001] = -INFINITY, data[ELEMS - 1] = NAN;
    zpp_norm_squares(segments, 2, sums, bad, pool);
    expect(!isfinite(sums[0]) && bad[0] == 4, "non-finite elements miscounted", ZPP_F32, ELEMS, zpp_cpu_level());
    expect(isfinite(sums[1]) && bad[1] == 0, "a neighbour's non-finite elements count", ZPP_F32, 10, zpp_cpu_level());
    double wide[3] = { 1e200, INFINITY, NAN };
    segments[1] = (struct zpp_norm_segment){ wide, ZPP_F64, 3 };
    zpp_norm_squares(segments, 2, sums, bad, pool);
    expect(!isfinite(sums[1]) && bad[1] == 2, "a square that overflows counts", ZPP_F64, 3, zpp_cpu_level());
    zpp_norm_squares(segments, 1, sums, NULL, pool);
    zpp_norm_squares(NULL, 0, NULL, NULL, pool);
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

/* More blocks than a round holds: rounds do not show. */
static void rounds(void) {
    zpp_pool *pool = threads();
    const size_t elems = 2100u * ZPP_NORM_BLOCK_ELEMS + 5;
    uint16_t *data = malloc(elems * sizeof *data);
    fill(data, ZPP_BF16, elems);
    const struct zpp_norm_segment segment = { data, ZPP_BF16, elems };
    double sum;
    zpp_norm_squares(&segment, 1, &sum, NULL, pool);
    expect(sum == stated(data, ZPP_BF16, elems), "rounds show in the sum", ZPP_BF16, elems, zpp_cpu_level());
    free(data);
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

/* Says which versions the other cases cover. */
static void levels(void) {
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const bool ran = zpp_norm_squares_at((enum zpp_cpu_level)level, NULL, 0, NULL, NULL, NULL);
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), ran ? "here" : "not on this machine");
        CHECK(ran == (level <= (int)zpp_cpu_detected()));
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(levels), TEST(fp32), TEST(bf16), TEST(fp16), TEST(fp64),
                                              TEST(nonfinite), TEST(rounds), {0} };
    return test_main(argc, argv, cases);
}
