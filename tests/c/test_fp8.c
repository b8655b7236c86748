/* SPDX-License-Identifier: Apache-2.0
 *
 * 8-bit floats: every CPU version against the scalar one, bit for bit, over formats, kinds, lengths, alignments and
 * what is not finite, the AVX-512 one lane by lane (avx512_emulated.h) where the machine lacks it; arrays cut over
 * threads.
 * (That codes and bounds are right is shown in tests/ops/test_fp8.py.)
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "avx512_emulated.h"

#define zpp_fp8_avx512 emulated_fp8
#include "../../csrc/ops/quant/fp8_isa.c"
#undef zpp_fp8_avx512

enum { ROOM_ELEMS = 600, GUARD = 0xa5 };

static uint64_t random_state = 1;
static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_value(int exponents, bool wild) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, 3e38f, INFINITY, -INFINITY, NAN };
    const uint32_t kind = random_bits() % 512;
    if (wild && kind < sizeof special / sizeof special[0]) return special[kind];
    return ldexpf((float)random_bits() / 4294967296.0f - 0.5f, -(int)(random_bits() % (uint32_t)exponents));
}

static bool same(float a, float b) { return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0; }

static void check_version(const struct zpp_fp8_kernels *kernels) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 15, 16, 17, 64, 100, 256, 511 };
    static _Alignas(64) uint8_t src[4 * ROOM_ELEMS], want[4 * ROOM_ELEMS], got[4 * ROOM_ELEMS];
    uint8_t codes[2][ROOM_ELEMS];
    for (int round = 0; round < 12; ++round) for (int format = 0; format < 2; ++format)
    for (int d = 0; d < 3; ++d) for (int l = 0; l < 9; ++l) for (int accumulate = 0; accumulate < 2; ++accumulate) {
        const zpp_dtype dtype = kinds[d];
        const size_t elems = lengths[l], at = (size_t)round % 3;
        const enum zpp_fp8_format form = (enum zpp_fp8_format)format;
        uint8_t *const from = src + at * zpp_dtype_bytes(dtype);
        for (size_t i = 0; i < elems; ++i) {
            zpp_element_store(from, dtype, i, random_value(1 + 8 * round, round % 4 == 3));
        }
        memset(codes, GUARD, sizeof codes);
        const float a = zpp_fp8_scalar.encode(form, from, dtype, elems, codes[0] + at);
        const float b = kernels->encode(form, from, dtype, elems, codes[1] + at);
        CHECK(same(a, b) && memcmp(codes[0], codes[1], sizeof codes[0]) == 0);

        for (size_t i = 0; i < elems; ++i) codes[0][i] = round % 2 ? (uint8_t)random_bits() : codes[0][i];
        memset(want, GUARD, sizeof want);
        for (size_t i = 0; i < elems; ++i) {
            zpp_element_store(want + at * zpp_dtype_bytes(dtype), dtype, i, random_value(4, false));
        }
        memcpy(got, want, sizeof got);
        const float scale = round % 4 == 3 ? a : random_value(20, false);
        zpp_fp8_scalar.decode(form, scale, codes[0], elems, want + at * zpp_dtype_bytes(dtype), dtype, accumulate);
        kernels->decode(form, scale, codes[0], elems, got + at * zpp_dtype_bytes(dtype), dtype, accumulate);
        for (size_t i = 0; i < ROOM_ELEMS; ++i) { /* the guard is a number in every kind */
            CHECK(same(zpp_element_load(want, dtype, i), zpp_element_load(got, dtype, i)));
        }
    }
}

static void versions(void) {
    check_version(&emulated_fp8);
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        const struct zpp_fp8_kernels *kernels = zpp_fp8_kernels_at((enum zpp_cpu_level)level);
        const bool here = kernels && level <= (int)zpp_cpu_detected();
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        if (here) check_version(kernels);
    }
}

static void threads_do_not_show(void) {
    enum { ELEMS = 100001, BLOCK = 48, BLOCKS = ELEMS / BLOCK + 1 };
    static float src[ELEMS], scales[2][BLOCKS], out[2][ELEMS];
    static uint8_t codes[2][ELEMS];
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool = NULL;
    for (size_t i = 0; i < ELEMS; ++i) src[i] = random_value(20, false);
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    const struct zpp_fp8_spec spec = { BLOCK, ZPP_FP8_E4M3 };
    for (int which = 0; which < 2; ++which) {
        zpp_fp8_quantise(&spec, src, ZPP_F32, ELEMS, codes[which], scales[which], which ? pool : NULL);
        zpp_fp8_dequantise(&spec, codes[which], scales[which], out[which], ZPP_F32, ELEMS, false, which ? pool : NULL);
    }
    CHECK(memcmp(codes[0], codes[1], sizeof codes[0]) == 0 && memcmp(out[0], out[1], sizeof out[0]) == 0);
    CHECK(memcmp(scales[0], scales[1], sizeof scales[0]) == 0);
    zpp_pool_destroy(pool);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(versions), TEST(threads_do_not_show), {0} };
    return test_main(argc, argv, cases);
}
