/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of floating point arrays: every instruction set gives the bits of the scalar version, for every kind, length,
 * alignment, number of sources, scale and destination. The AVX-512 source runs lane by lane where the machine lacks it
 * (avx512_emulated.h).
 */
#include "harness.h"
#include "mix.h"

#include <math.h>

#include "../../csrc/base/cpu.h"
#include "../../csrc/comm/reduce.h"

#if ZPP_CPU_X86
#include "avx512_emulated.h"

/* What this file uses beyond csrc/ops: masked loads and stores. */
E __m512 _mm512_maskz_loadu_ps(__mmask16 lanes, const float *from) {
    __m512 r;
    for (int i = 0; i < 16; i++) r.at[i] = lanes >> i & 1 ? from[i] : 0.0f;
    return r;
}
E __m256i _mm256_maskz_loadu_epi16(__mmask16 lanes, const uint16_t *from) {
    uint16_t halves[16];
    for (int i = 0; i < 16; i++) halves[i] = lanes >> i & 1 ? from[i] : 0;
    __m256i r;
    memcpy(&r, halves, sizeof r);
    return r;
}
E void _mm512_mask_storeu_ps(float *to, __mmask16 lanes, __m512 value) {
    for (int i = 0; i < 16; i++)
        if (lanes >> i & 1) to[i] = value.at[i];
}
E void _mm256_mask_storeu_epi16(uint16_t *to, __mmask16 lanes, __m256i value) {
    uint16_t halves[16];
    memcpy(halves, &value, sizeof halves);
    for (int i = 0; i < 16; i++)
        if (lanes >> i & 1) to[i] = halves[i];
}
E __m512i _mm512_loadu_si512(const void *from) {
    __m512i r;
    memcpy(&r, from, sizeof r);
    return r;
}
#define _MM_FROUND_NO_EXC 0
#define zpp_sum_avx512 emulated_sum
#include "../../csrc/comm/reduce_avx512.c"
#undef zpp_sum_avx512
#endif

enum { ELEMS = 300, SOURCES = 5, ROOM = ELEMS * 4 + 128 };

static unsigned char sources[SOURCES][ROOM] __attribute__((aligned(64)));
static const void *from[SOURCES];

/* Random bits: every class of number, denormals, infinities and NaNs among them. fp16 NaNs differ between instruction
 * sets in nothing but their payload, so there are none among the fp16 inputs. */
static void fill(zpp_dtype dtype, size_t offset_bytes) {
    for (int r = 0; r < SOURCES; r++) {
        for (size_t i = 0; i < ROOM / 4; i++) {
            uint32_t bits = mix((uint32_t)(i * SOURCES) + (uint32_t)r);
            if (i % 3) bits = (bits & 0x83ff83ffu) | 0x3c003c00u; /* around one, in all kinds */
            if (dtype == ZPP_F16 && (bits & 0x7c00u) == 0x7c00u) bits &= ~0x4000u;
            if (dtype == ZPP_F16 && (bits & 0x7c000000u) == 0x7c000000u) bits &= ~0x40000000u;
            memcpy(sources[r] + 4 * i, &bits, sizeof bits);
        }
        from[r] = sources[r] + offset_bytes;
    }
}

static bool same(const void *a, const void *b, size_t elems, bool wide) {
    for (size_t i = 0; i < elems; i++) {
        if (wide) {
            float x, y;
            memcpy(&x, (const char *)a + 4 * i, 4);
            memcpy(&y, (const char *)b + 4 * i, 4);
            if (memcmp(&x, &y, 4) != 0 && !(x != x && y != y)) return false; /* which NaN is the hardware's choice */
        } else {
            uint16_t x, y;
            memcpy(&x, (const char *)a + 2 * i, 2);
            memcpy(&y, (const char *)b + 2 * i, 2);
            if (x != y && !((x & 0x7fff) > 0x7c00 && (y & 0x7fff) > 0x7c00)) return false;
        }
    }
    return true;
}

static struct zpp_sum_seen run(const struct zpp_sum_kernels *kernels, zpp_dtype dtype, const struct zpp_sum *sum,
                               size_t elems) {
    return (dtype == ZPP_F32 ? kernels->f32 : dtype == ZPP_BF16 ? kernels->bf16 : kernels->f16)(sum, elems);
}

static void compare(const struct zpp_sum_kernels *kernels, zpp_dtype dtype, bool wide, size_t elems,
                    size_t dst_offset) {
    static unsigned char ours[ROOM + 64] __attribute__((aligned(64))), scalar[ROOM + 64] __attribute__((aligned(64)));
    for (int count = 1; count <= SOURCES; count++)
        for (int policy = 0; policy < 16; policy++) {
            const bool accumulate = policy & 1, stream = policy & 2, report = policy & 8;
            const float scale = policy & 4 ? 1.0f / 3.0f : 1.0f;
            for (size_t i = 0; i < sizeof ours / 2; i++) {
                const uint16_t start = zpp_bf16_from_f32((float)(i % 17) - 8.0f);
                memcpy(ours + 2 * i, &start, 2);
            }
            memcpy(scalar, ours, sizeof ours);
            struct zpp_sum sum = {ours + dst_offset, from, count, scale, accumulate, wide, stream, report, false};
            const struct zpp_sum_seen seen = run(kernels, dtype, &sum, elems);
            sum.dst = scalar + dst_offset;
            CHECK_EQUAL(run(&zpp_sum_scalar, dtype, &sum, elems).nonfinite, seen.nonfinite);
            CHECK(same(ours + dst_offset, scalar + dst_offset, elems, wide));
            const size_t end = dst_offset + elems * (wide ? 4 : 2);
            CHECK(memcmp(ours + end, scalar + end, sizeof ours - end) == 0); /* nothing behind it was touched */
        }
}

static void compare_all(const struct zpp_sum_kernels *kernels) {
    static const zpp_dtype kinds[] = {ZPP_F32, ZPP_BF16, ZPP_F16};
    static const size_t lengths[] = {0, 1, 7, 8, 15, 16, 17, 31, 32, 63, 64, 65, 127, 129, 255, ELEMS};
    for (int k = 0; k < 3; k++)
        for (size_t offset = 0; offset <= 12; offset += 12) {
            fill(kinds[k], offset);
            for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
                for (size_t to = 0; to <= 36; to += 36) {
                    compare(kernels, kinds[k], kinds[k] == ZPP_F32, lengths[l], to);
                    if (kinds[k] != ZPP_F32) compare(kernels, kinds[k], true, lengths[l], to);
                }
        }
}

/* --- what a sum saw ----------------------------------------------------------------------------------------------- */

static void put(zpp_dtype dtype, void *array, size_t i, float value) {
    const uint16_t half = dtype == ZPP_BF16 ? zpp_bf16_from_f32(value) : zpp_f16_from_f32(value);
    if (dtype == ZPP_F32) memcpy((char *)array + 4 * i, &value, 4);
    else memcpy((char *)array + 2 * i, &half, 2);
}

/* Two sources of ones, of which element `at` is `first` and `second`; the sum replaces the second or goes elsewhere. */
static struct zpp_sum_seen sum_of_two(const struct zpp_sum_kernels *kernels, zpp_dtype dtype, struct zpp_sum sum,
                                      size_t elems, size_t at, float first, float second) {
    static unsigned char arrays[3][ROOM] __attribute__((aligned(64)));
    const void *const src[2] = {arrays[0], arrays[1]};
    for (size_t i = 0; i < elems; i++)
        for (int r = 0; r < 2; r++) put(dtype, arrays[r], i, 1.0f);
    memset(arrays[2], 0, sizeof arrays[2]);
    if (at < elems) {
        put(dtype, arrays[0], at, first);
        put(dtype, arrays[1], at, second);
    }
    sum.src = src;
    sum.sources = 2;
    sum.dst = arrays[sum.replaces ? 1 : 2];
    return run(kernels, dtype, &sum, elems);
}

static void one_length(const struct zpp_sum_kernels *kernels, zpp_dtype dtype, struct zpp_sum sum, size_t elems) {
    const float huge = dtype == ZPP_F16 ? 65504.0f : 3e38f; /* the sum of two overflows fp32, unless they are fp16 */
    const bool overflows = dtype != ZPP_F16;
    for (size_t at = 0; at <= elems; at++) {
        const bool inside = at < elems;
        struct zpp_sum_seen seen = sum_of_two(kernels, dtype, sum, elems, at, -2.0f, 0.0f);
        CHECK(!seen.nonfinite && !seen.replaced_nonfinite);
        seen = sum_of_two(kernels, dtype, sum, elems, at, -INFINITY, 1.0f); /* the source that stays */
        CHECK(seen.nonfinite == inside && !seen.replaced_nonfinite);
        seen = sum_of_two(kernels, dtype, sum, elems, at, 1.0f, -NAN); /* the source that is replaced, if one is */
        CHECK(seen.nonfinite == inside && seen.replaced_nonfinite == (inside && sum.replaces));
        seen = sum_of_two(kernels, dtype, sum, elems, at, -huge, -huge); /* neither */
        CHECK(seen.nonfinite == (inside && overflows) && !seen.replaced_nonfinite);
    }
}

static void see(const struct zpp_sum_kernels *kernels) {
    static const zpp_dtype kinds[] = {ZPP_F32, ZPP_BF16, ZPP_F16};
    static const size_t lengths[] = {0, 1, 15, 16, 31, 33, 64, 65, 129};
    for (int k = 0; k < 3; k++)
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
            for (int policy = 0; policy < 8; policy++) {
                const struct zpp_sum sum = {.scale = 1.0f,
                                            .report = true,
                                            .accumulate = policy == 1 || policy == 3,
                                            .wide = kinds[k] == ZPP_F32 || policy == 2 || policy == 3,
                                            .stream = policy & 4,
                                            .replaces = policy == 4 || policy == 5};
                one_length(kernels, kinds[k], sum, lengths[l]);
            }
}

static void copies(const struct zpp_sum_kernels *kernels) {
    static unsigned char to[5000], source[5000];
    for (size_t i = 0; i < sizeof source; i++) source[i] = (unsigned char)mix((uint32_t)i);
    for (size_t bytes = 0; bytes < 4500; bytes = bytes * 3 / 2 + 1)
        for (size_t offset = 0; offset < 70; offset += 23) {
            memset(to, 0, sizeof to);
            kernels->copy(to + offset, source + 3, bytes);
            CHECK(memcmp(to + offset, source + 3, bytes) == 0);
            for (size_t i = offset + bytes; i < sizeof to; i++) CHECK_EQUAL(to[i], 0);
        }
}

static void plain_version(void) { see(&zpp_sum_scalar); }

static void best_of_this_cpu(void) {
    compare_all(zpp_sum_kernels());
    see(zpp_sum_kernels());
    copies(zpp_sum_kernels());
}

#if ZPP_CPU_X86
static void avx2(void) {
    if (zpp_cpu_detected() < ZPP_CPU_AVX2) return;
    compare_all(&zpp_sum_avx2);
    see(&zpp_sum_avx2);
    copies(&zpp_sum_avx2);
}

static void avx512_lane_by_lane(void) {
    compare_all(&emulated_sum);
    see(&emulated_sum);
    copies(&emulated_sum);
}
#endif

/* As many sources as a group may have ranks, and elements that no vector divides. */
static void most_sources(void) {
    enum { MANY = 37 };
    float values[MANY], sums[MANY];
    const void *many[ZPP_RANKS_MAX];
    for (int i = 0; i < MANY; i++) values[i] = (float)i;
    for (int r = 0; r < ZPP_RANKS_MAX; r++) many[r] = values;
    zpp_reduce_sources(sums, ZPP_F32, false, many, ZPP_RANKS_MAX, ZPP_F32, MANY, 0.5);
    for (int i = 0; i < MANY; i++) CHECK(sums[i] == (float)(i * ZPP_RANKS_MAX / 2));
}

static void public_door(void) {
    float a[3] = {1.0f, 2.0f, 3.0f}, b[3] = {10.0f, 20.0f, 30.0f}, into[3] = {0.5f, 0.5f, 0.5f};
    const void *two[2] = {a, b};
    zpp_reduce_sources(into, ZPP_F32, true, two, 2, ZPP_F32, 3, 0.5f);
    CHECK(into[0] == 6.0f && into[1] == 11.5f && into[2] == 17.0f);
    double x[2] = {1.0, 1e-17}, y[2] = {3.0, 1.0}, total[2];
    const void *doubles[2] = {x, y};
    zpp_reduce_sources(total, ZPP_F64, false, doubles, 2, ZPP_F64, 2, 1.0f);
    CHECK(total[0] == 4.0 && total[1] == 1.0);
    zpp_reduce_sources(total, ZPP_F64, true, doubles, 2, ZPP_F64, 2, 1.0 / 3.0); /* a factor that float32 would round */
    CHECK(total[0] == 4.0 + 4.0 * (1.0 / 3.0) && total[1] == 1.0 + 1.0 / 3.0);
    struct zpp_sum_seen seen = zpp_reduce_sources(y, ZPP_F64, false, doubles, 2, ZPP_F64, 2, 1e308);
    CHECK(seen.nonfinite && !seen.replaced_nonfinite); /* an overflow, in place */
    seen = zpp_reduce_sources(y, ZPP_F64, false, doubles, 2, ZPP_F64, 2, 1.0);
    CHECK(seen.nonfinite && seen.replaced_nonfinite);
    seen = zpp_reduce_sources(b, ZPP_F32, false, two, 2, ZPP_F32, 3, 1.0);
    CHECK(!seen.nonfinite && !seen.replaced_nonfinite && b[2] == 33.0f);
    b[1] = INFINITY;
    seen = zpp_reduce_sources(b, ZPP_F32, false, two, 2, ZPP_F32, 3, 1.0);
    CHECK(seen.nonfinite && seen.replaced_nonfinite);
    int32_t m[2] = {1, INT32_MAX}, n[2] = {2, 1}, whole[2] = {10, 0};
    const void *integers[2] = {m, n};
    zpp_reduce_sources(whole, ZPP_I32, true, integers, 2, ZPP_I32, 2, 1.0f);
    CHECK(whole[0] == 13 && whole[1] == INT32_MIN); /* wraps, as torch's do */
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(plain_version), TEST(best_of_this_cpu),
#if ZPP_CPU_X86
                                             TEST(avx2), TEST(avx512_lane_by_lane),
#endif
                                             TEST(most_sources), TEST(public_door), {0}};
    return test_main(argc, argv, cases);
}
