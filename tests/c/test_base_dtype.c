/* SPDX-License-Identifier: Apache-2.0
 *
 * Conversions: every 16-bit value, every rounding border, against arithmetic in double; vector versions against scalar.
 */
#include "harness.h"

#include <math.h>

#include "../../csrc/base/convert.h"
#include "../../csrc/base/cpu.h"
#include "../../csrc/base/dtype.h"

static float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void sizes_and_names(void) {
    CHECK_EQUAL(zpp_dtype_bytes(ZPP_F64), 8);
    CHECK_EQUAL(zpp_dtype_bytes(ZPP_BOOL), 1);
    CHECK_EQUAL(zpp_dtype_bytes(ZPP_DTYPES), 0);
    CHECK(strcmp(zpp_dtype_name(ZPP_BF16), "bfloat16") == 0);
    CHECK(strcmp(zpp_dtype_name((zpp_dtype)-1), "unknown") == 0);
    for (int kind = 0; kind < ZPP_DTYPES; ++kind) CHECK(zpp_dtype_bytes((zpp_dtype)kind) > 0);
}

/* The definition, in double: sign * fraction * 2^exponent. */
static double f16_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return exponent ? sign * ldexp(1024 + fraction, exponent - 25) : sign * ldexp(fraction, -24);
}

static void every_f16_widens_exactly(void) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float seen = zpp_f16_to_f32((uint16_t)bits);
        const double wanted = f16_value((uint16_t)bits);
        CHECK(isnan(wanted) ? isnan(seen) : (double)seen == wanted && !signbit(seen) == !signbit(wanted));
    }
}

static void every_16_bit_value_survives_the_round_trip(void) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float wide_f16 = zpp_f16_to_f32((uint16_t)bits), wide_bf16 = zpp_bf16_to_f32((uint16_t)bits);
        if (!isnan(wide_f16)) CHECK_EQUAL(zpp_f16_from_f32(wide_f16), bits);
        else CHECK(isnan(zpp_f16_to_f32(zpp_f16_from_f32(wide_f16))));
        if (!isnan(wide_bf16)) CHECK_EQUAL(zpp_bf16_from_f32(wide_bf16), bits);
        else CHECK(isnan(zpp_bf16_to_f32(zpp_bf16_from_f32(wide_bf16))));
    }
}

/* Between two neighbours low < high (consecutive patterns of one sign): below the middle gives low, above it high, the
 * middle itself the even one. */
static void check_borders(uint16_t low, double low_value, double high_value, uint16_t (*narrow)(float)) {
    const float middle = (float)((low_value + high_value) / 2);
    if ((double)middle == (low_value + high_value) / 2) {
        CHECK_EQUAL(narrow(middle), low & 1 ? low + 1 : low);
        CHECK_EQUAL(narrow(nextafterf(middle, (float)low_value)), low);
        CHECK_EQUAL(narrow(nextafterf(middle, (float)high_value)), low + 1);
    }
}

static uint16_t bf16_from(float value) { return zpp_bf16_from_f32(value); }

static void rounds_to_nearest_even(void) {
    for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
        check_borders((uint16_t)bits, f16_value((uint16_t)bits), f16_value((uint16_t)(bits + 1)), zpp_f16_from_f32);
        const uint16_t low = (uint16_t)(bits | 0x8000);
        check_borders(low, f16_value(low), f16_value((uint16_t)(low + 1)), zpp_f16_from_f32);
    }
    for (uint32_t bits = 0; bits < 0x7f7f; ++bits) {
        const uint16_t low = (uint16_t)bits;
        check_borders(low, zpp_bf16_to_f32(low), zpp_bf16_to_f32((uint16_t)(low + 1)), bf16_from);
    }
    CHECK_EQUAL(zpp_f16_from_f32(65519.996f), 0x7bff); /* largest finite, and the border to infinity */
    CHECK_EQUAL(zpp_f16_from_f32(65520.0f), 0x7c00);
    CHECK_EQUAL(zpp_f16_from_f32(-1e30f), 0xfc00);
    CHECK_EQUAL(zpp_f16_from_f32(0x1p-25f), 0); /* half of the smallest subnormal: to even, which is zero */
    CHECK_EQUAL(zpp_f16_from_f32(0x1.000002p-25f), 1);
    CHECK_EQUAL(zpp_bf16_from_f32(of_bits(0x7f7fffff)), 0x7f80);
}

#if ZPP_CPU_X86 || ZPP_CPU_ARM
#if ZPP_CPU_X86
#define VECTORS(name) zpp_convert_##name##_avx2
#else
#define VECTORS(name) zpp_convert_##name##_neon
#endif
static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static uint64_t random_state = 88172645463325252u;
static uint32_t random_bits(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

static void vectors_give_the_scalar_bits(void) {
    enum { ELEMS = 4099 };
    static float wide[ELEMS], wide_seen[ELEMS];
    static uint16_t narrow[ELEMS], seen[ELEMS];
    if (zpp_cpu_detected() == ZPP_CPU_SCALAR) {
        printf("skipped, this machine has no vectors: ");
        return;
    }
    printf("%s, ", zpp_cpu_extras().bf16 ? "bf16 by its instruction" : "bf16 by hand");
    for (int round = 0; round < 200; ++round) {
        const size_t elems = round < 40 ? (size_t)round : ELEMS - random_bits() % 16;
        for (size_t i = 0; i < elems; ++i) {
            wide[i] = of_bits(random_bits() ^ random_bits() << 16);
            /* every second one near the 16-bit range, where rounding happens; the others NaN, huge and tiny too */
            if (i % 2) wide[i] = (float)((int)random_bits()) * 0x1p-44f;
            narrow[i] = (uint16_t)random_bits();
        }
        VECTORS(f32_to_bf16)(seen, wide, elems);
        for (size_t i = 0; i < elems; ++i) CHECK_EQUAL(seen[i], zpp_bf16_from_f32(wide[i]));
        VECTORS(f32_to_f16)(seen, wide, elems);
        for (size_t i = 0; i < elems; ++i) CHECK_EQUAL(seen[i], zpp_f16_from_f32(wide[i]));
        VECTORS(bf16_to_f32)(wide_seen, narrow, elems);
        for (size_t i = 0; i < elems; ++i) CHECK_EQUAL(bits_of(wide_seen[i]), bits_of(zpp_bf16_to_f32(narrow[i])));
        VECTORS(f16_to_f32)(wide_seen, narrow, elems);
        for (size_t i = 0; i < elems; ++i) CHECK_EQUAL(bits_of(wide_seen[i]), bits_of(zpp_f16_to_f32(narrow[i])));
    }
}
#endif

static void any_pair_keeps_small_integers(void) {
    enum { ELEMS = 101 };
    unsigned char source[ELEMS * 8], middle[ELEMS * 8];
    for (int from = 0; from < ZPP_BOOL; ++from) {
        for (int to = 0; to < ZPP_BOOL; ++to) {
            int64_t numbers[ELEMS], back[ELEMS];
            for (int i = 0; i < ELEMS; ++i) numbers[i] = i; /* every kind has 0..100 exactly */
            zpp_convert(source, (zpp_dtype)from, numbers, ZPP_I64, ELEMS);
            zpp_convert(middle, (zpp_dtype)to, source, (zpp_dtype)from, ELEMS);
            zpp_convert(back, ZPP_I64, middle, (zpp_dtype)to, ELEMS);
            CHECK(memcmp(numbers, back, sizeof back) == 0);
        }
    }
}

static void odd_values_of_any_pair(void) {
    const double wide[6] = {NAN, INFINITY, -INFINITY, 1e300, -0.5, 0.0};
    int64_t integers[6];
    unsigned char truths[6];
    zpp_convert(integers, ZPP_I64, wide, ZPP_F64, 6);
    CHECK(integers[0] == 0 && integers[1] == INT64_MAX && integers[2] == INT64_MIN && integers[3] == INT64_MAX);
    zpp_convert(truths, ZPP_BOOL, wide, ZPP_F64, 6);
    CHECK(truths[0] == 1 && truths[1] == 1 && truths[4] == 1 && truths[5] == 0);
    const int64_t large = (1ll << 24) + 1; /* rounds once to float: a tie, to even */
    float single;
    zpp_convert(&single, ZPP_F32, &large, ZPP_I64, 1);
    CHECK(single == 16777216.0f);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(sizes_and_names),
        TEST(every_f16_widens_exactly),
        TEST(every_16_bit_value_survives_the_round_trip),
        TEST(rounds_to_nearest_even),
#if ZPP_CPU_X86 || ZPP_CPU_ARM
        TEST(vectors_give_the_scalar_bits),
#endif
        TEST(any_pair_keeps_small_integers),
        TEST(odd_values_of_any_pair),
        {0},
    };
    return test_main(argc, argv, cases);
}
