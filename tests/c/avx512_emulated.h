/* SPDX-License-Identifier: Apache-2.0
 *
 * The AVX-512 intrinsics that csrc/ops uses, in plain C, so that the very source of an AVX-512 version can be run, and
 * its bits compared, on a machine that lacks it. Include this first, then the version's .c file: it takes the place of
 * <immintrin.h>. Each function is what Intel's guide states, lane by lane.
 */
#ifndef ZPP_TESTS_AVX512_EMULATED_H
#define ZPP_TESTS_AVX512_EMULATED_H

#define _IMMINTRIN_H_INCLUDED /* gcc's guard */
#define __IMMINTRIN_H         /* clang's */
#ifndef __AVX512F__
#define __AVX512F__ 1 /* vec16.h then takes sixteen lanes as one */
#endif
#define ZPP_ISA avx512 /* a file X_isa.c then makes its table for AVX-512 (csrc/ops/isa.h) */
#define ZPP_LANES 16
#define LANES_FN static __attribute__((unused, noinline))

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/base/dtype.h"

typedef struct { float at[16]; } emulated_ps512;
typedef struct { double at[8]; } emulated_pd512;
typedef struct { uint32_t at[16]; } emulated_si512;
typedef struct { float at[8]; } emulated_ps256;
typedef struct { uint32_t at[8]; } emulated_si256;
typedef struct { uint32_t at[4]; } emulated_si128;
#define __m512 emulated_ps512
#define __m512d emulated_pd512
#define __m512i emulated_si512
#define __m256 emulated_ps256
#define __m256i emulated_si256
#define __m128i emulated_si128
typedef uint16_t __mmask16;
enum {
    _CMP_EQ_OQ = 0, _CMP_UNORD_Q = 3, _CMP_NEQ_UQ = 4, _CMP_NLT_UQ = 21, _CMP_NEQ_OQ = 12, _CMP_GE_OQ = 29,
    _CMP_GT_OQ = 30,
    _MM_FROUND_TO_NEAREST_INT = 0,
};

/* Inlined into unrolled loops, sixteen lanes an operation, a file takes minutes to build under sanitizers. */
#define E static __attribute__((noinline, unused))
#define LOAD(name, type, pointer) E type name(pointer from) { type r; memcpy(&r, from, sizeof r); return r; }
#define STORE(name, type, pointer) E void name(pointer to, type value) { memcpy(to, &value, sizeof value); }
LOAD(_mm512_loadu_ps, __m512, const float *)
LOAD(_mm256_loadu_ps, __m256, const float *)
LOAD(_mm256_loadu_si256, __m256i, const __m256i *)
LOAD(_mm_loadu_si128, __m128i, const __m128i *)
STORE(_mm_storeu_si128, __m128i, __m128i *)
STORE(_mm256_storeu_si256, __m256i, __m256i *)
STORE(_mm512_storeu_ps, __m512, float *)
STORE(_mm512_storeu_pd, __m512d, double *)
STORE(_mm512_storeu_si512, __m512i, void *)
/* Streamed stores fault unless aligned to the whole register. */
E void _mm512_stream_ps(float *to, __m512 value) {
    if ((uintptr_t)to % 64) abort();
    memcpy(to, &value, sizeof value);
}
E void _mm512_stream_si512(__m512i *to, __m512i value) {
    if ((uintptr_t)to % 64) abort();
    memcpy(to, &value, sizeof value);
}
E void _mm256_stream_si256(__m256i *to, __m256i value) {
    if ((uintptr_t)to % 32) abort();
    memcpy(to, &value, sizeof value);
}
E void _mm_sfence(void) {}

#define CAST(name, from, to) E to name(from value) { to r; memcpy(&r, &value, sizeof r); return r; }
CAST(_mm512_castps_si512, __m512, __m512i)
CAST(_mm512_castsi512_ps, __m512i, __m512)
CAST(_mm256_castsi256_ps, __m256i, __m256)
E __m512i _mm512_castsi256_si512(__m256i value) {
    __m512i r; /* the upper half is undefined: something that would show */
    memset(&r, 0xa5, sizeof r);
    memcpy(&r, &value, sizeof value);
    return r;
}
E __m512i _mm512_inserti64x4(__m512i into, __m256i half, int upper) {
    memcpy((char *)&into + 32 * (upper & 1), &half, sizeof half);
    return into;
}

#define LANES(name, type, arguments, expression) \
    E type name arguments {                                                            \
        type r;                                                                        \
        for (size_t i = 0; i < sizeof r.at / sizeof r.at[0]; ++i) r.at[i] = expression; \
        return r;                                                                      \
    }
LANES(_mm512_set1_ps, __m512, (float x), x)
LANES(_mm512_set1_epi32, __m512i, (int x), (uint32_t)x)
LANES(_mm512_setzero_pd, __m512d, (void), 0.0)
LANES(_mm512_setzero_ps, __m512, (void), 0.0f)
LANES(_mm512_add_ps, __m512, (__m512 a, __m512 b), a.at[i] + b.at[i])
LANES(_mm512_sub_ps, __m512, (__m512 a, __m512 b), a.at[i] - b.at[i])
LANES(_mm512_mul_ps, __m512, (__m512 a, __m512 b), a.at[i] * b.at[i])
LANES(_mm512_div_ps, __m512, (__m512 a, __m512 b), a.at[i] / b.at[i])
LANES(_mm512_sqrt_ps, __m512, (__m512 a), sqrtf(a.at[i]))
LANES(_mm512_fmadd_ps, __m512, (__m512 a, __m512 b, __m512 c), fmaf(a.at[i], b.at[i], c.at[i]))
/* The second where they are not ordered, or both zeros. */
LANES(_mm512_max_ps, __m512, (__m512 a, __m512 b), a.at[i] > b.at[i] ? a.at[i] : b.at[i])
LANES(_mm512_min_ps, __m512, (__m512 a, __m512 b), a.at[i] < b.at[i] ? a.at[i] : b.at[i])
LANES(_mm512_max_epi32, __m512i, (__m512i a, __m512i b),
      (int32_t)a.at[i] > (int32_t)b.at[i] ? a.at[i] : b.at[i])
LANES(_mm512_min_epi32, __m512i, (__m512i a, __m512i b),
      (int32_t)a.at[i] < (int32_t)b.at[i] ? a.at[i] : b.at[i])
LANES(_mm512_mullo_epi32, __m512i, (__m512i a, __m512i b), a.at[i] * b.at[i])
LANES(_mm512_xor_si512, __m512i, (__m512i a, __m512i b), a.at[i] ^ b.at[i])
LANES(_mm512_mask_mov_epi32, __m512i, (__m512i a, __mmask16 k, __m512i b), k >> i & 1 ? b.at[i] : a.at[i])
LANES(_mm512_mask_mov_ps, __m512, (__m512 a, __mmask16 k, __m512 b), k >> i & 1 ? b.at[i] : a.at[i])
LANES(_mm512_mask_xor_epi32, __m512i, (__m512i from, __mmask16 k, __m512i a, __m512i b),
      k >> i & 1 ? a.at[i] ^ b.at[i] : from.at[i])
/* To nearest even; what no int holds, and NaN, is INT_MIN. */
LANES(_mm512_cvtps_epi32, __m512i, (__m512 a),
      a.at[i] >= -2147483648.0f && a.at[i] < 2147483648.0f ? (uint32_t)(int32_t)rintf(a.at[i]) : 0x80000000u)
LANES(_mm512_cvtepi32_ps, __m512, (__m512i a), (float)(int32_t)a.at[i])
LANES(_mm512_fmadd_pd, __m512d, (__m512d a, __m512d b, __m512d c), fma(a.at[i], b.at[i], c.at[i]))
LANES(_mm512_cvtps_pd, __m512d, (__m256 a), (double)a.at[i])
LANES(_mm512_and_si512, __m512i, (__m512i a, __m512i b), a.at[i] & b.at[i])
LANES(_mm512_or_si512, __m512i, (__m512i a, __m512i b), a.at[i] | b.at[i])
LANES(_mm512_add_epi32, __m512i, (__m512i a, __m512i b), a.at[i] + b.at[i])
LANES(_mm512_sub_epi32, __m512i, (__m512i a, __m512i b), a.at[i] - b.at[i])
LANES(_mm512_srli_epi32, __m512i, (__m512i a, unsigned n), a.at[i] >> n)
LANES(_mm512_slli_epi32, __m512i, (__m512i a, unsigned n), a.at[i] << n)
LANES(_mm256_slli_epi32, __m256i, (__m256i a, unsigned n), a.at[i] << n)
LANES(_mm512_mask_blend_epi32, __m512i, (__mmask16 k, __m512i a, __m512i b), k >> i & 1 ? b.at[i] : a.at[i])
#define _MM_SHUFFLE(d, c, b, a) ((d) << 6 | (c) << 4 | (b) << 2 | (a))
/* Fours as wholes, the lower two of the first argument; and lanes within each four. */
LANES(_mm512_shuffle_f32x4, __m512, (__m512 a, __m512 b, int order),
      (i < 8 ? a : b).at[4 * (unsigned)(order >> i / 4 * 2 & 3) + i % 4])
LANES(_mm512_permute_ps, __m512, (__m512 a, int order), a.at[i / 4 * 4 + (unsigned)(order >> i % 4 * 2 & 3)])
LANES(_mm512_mask_loadu_ps, __m512, (__m512 rest, __mmask16 k, const float *from), k >> i & 1 ? from[i] : rest.at[i])
E float _mm512_cvtss_f32(__m512 a) { return a.at[0]; }
LANES(_mm512_mask_blend_ps, __m512, (__mmask16 k, __m512 a, __m512 b), k >> i & 1 ? b.at[i] : a.at[i])

E uint16_t emulated_half(const void *halves, size_t i) {
    uint16_t bits;
    memcpy(&bits, (const char *)halves + 2 * i, sizeof bits);
    return bits;
}
LANES(_mm512_cvtepu16_epi32, __m512i, (__m256i a), emulated_half(&a, i))
LANES(_mm256_cvtepu16_epi32, __m256i, (__m128i a), emulated_half(&a, i))
LANES(_mm512_cvtph_ps, __m512, (__m256i a), zpp_f16_to_f32(emulated_half(&a, i)))
LANES(_mm256_cvtph_ps, __m256, (__m128i a), zpp_f16_to_f32(emulated_half(&a, i)))

E __m256i _mm512_cvtps_ph(__m512 a, int rounding) {
    uint16_t halves[16];
    (void)rounding;
    for (int i = 0; i < 16; ++i) halves[i] = zpp_f16_from_f32(a.at[i]);
    __m256i r;
    memcpy(&r, halves, sizeof r);
    return r;
}
E __m256i _mm512_cvtepi32_epi16(__m512i a) {
    uint16_t halves[16];
    for (int i = 0; i < 16; ++i) halves[i] = (uint16_t)a.at[i];
    __m256i r;
    memcpy(&r, halves, sizeof r);
    return r;
}
E int emulated_compare(float a, float b, int how) {
    switch (how) {
    case _CMP_EQ_OQ: return !(a < b) && !(a > b) && !isnan(a) && !isnan(b);
    case _CMP_UNORD_Q: return isnan(a) || isnan(b);
    case _CMP_NLT_UQ: return !(a < b);
    case _CMP_NEQ_OQ: return a < b || a > b;
    case _CMP_NEQ_UQ: return !(a == b);
    case _CMP_GE_OQ: return a >= b;
    case _CMP_GT_OQ: return a > b;
    default: abort();
    }
}
E __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= (unsigned)emulated_compare(a.at[i], b.at[i], how) << i;
    return (__mmask16)mask;
}
E __mmask16 _mm512_cmpgt_epi32_mask(__m512i a, __m512i b) {
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= (unsigned)((int32_t)a.at[i] > (int32_t)b.at[i]) << i;
    return (__mmask16)mask;
}
E __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int j, int k, int l, int m, int n,
                            int o, int p, int q) {
    const int at[] = { a, b, c, d, e, f, g, h, j, k, l, m, n, o, p, q };
    __m512i r;
    memcpy(&r, at, sizeof r);
    return r;
}
#define REDUCE(name, vector, type, better) \
    E type name(vector a) {                                            \
        type most = (type)a.at[0];                                     \
        for (int i = 1; i < 16; ++i) {                                 \
            if ((type)a.at[i] better most) most = (type)a.at[i];       \
        }                                                              \
        return most;                                                   \
    }
REDUCE(_mm512_reduce_max_ps, __m512, float, >)
REDUCE(_mm512_reduce_min_ps, __m512, float, <)
REDUCE(_mm512_reduce_max_epi32, __m512i, int32_t, >)

/* --- bytes and words of 128 bits ---------------------------------------------------------------------------------- */
typedef union { __m128i v; int8_t i8[16]; uint8_t u8[16]; int16_t i16[8]; uint16_t u16[8]; } emulated_128;
E int emulated_within(int x, int least, int most) { return x < least ? least : x > most ? most : x; }

E __m128i _mm512_cvtepi32_epi8(__m512i a) { /* the low bytes */
    emulated_128 r;
    for (int i = 0; i < 16; ++i) r.u8[i] = (uint8_t)a.at[i];
    return r.v;
}
E __m128i _mm512_cvtsepi32_epi8(__m512i a) {
    emulated_128 r;
    for (int i = 0; i < 16; ++i) r.i8[i] = (int8_t)emulated_within((int32_t)a.at[i], -128, 127);
    return r.v;
}
E __m512i _mm512_cvtepu8_epi32(__m128i a) {
    const emulated_128 from = { a };
    __m512i r;
    for (int i = 0; i < 16; ++i) r.at[i] = from.u8[i];
    return r;
}
E __m512i _mm512_cvtepi8_epi32(__m128i a) {
    const emulated_128 from = { a };
    __m512i r;
    for (int i = 0; i < 16; ++i) r.at[i] = (uint32_t)(int32_t)from.i8[i];
    return r;
}
#define PARTS(name, arguments, as, count, expression) \
    E __m128i name arguments {                                                                    \
        emulated_128 r;                                                                           \
        for (int i = 0; i < (count); ++i) r.as[i] = (__typeof__(r.as[0]))(expression);            \
        return r.v;                                                                               \
    }
#define PART(value, as, i) (((const emulated_128 *)(const void *)&(value))->as[i])
PARTS(_mm_set1_epi8, (char x), i8, 16, x)
PARTS(_mm_set1_epi16, (short x), i16, 8, x)
PARTS(_mm_and_si128, (__m128i a, __m128i b), u8, 16, PART(a, u8, i) & PART(b, u8, i))
PARTS(_mm_or_si128, (__m128i a, __m128i b), u8, 16, PART(a, u8, i) | PART(b, u8, i))
PARTS(_mm_xor_si128, (__m128i a, __m128i b), u8, 16, PART(a, u8, i) ^ PART(b, u8, i))
PARTS(_mm_sub_epi8, (__m128i a, __m128i b), u8, 16, PART(a, u8, i) - PART(b, u8, i))
PARTS(_mm_cvtepu8_epi16, (__m128i a), u16, 8, PART(a, u8, i))
PARTS(_mm_slli_epi16, (__m128i a, int n), u16, 8, PART(a, u16, i) << n)
PARTS(_mm_packus_epi16, (__m128i a, __m128i b), u8, 16,
      emulated_within(i < 8 ? PART(a, i16, i) : PART(b, i16, i - 8), 0, 255))
E __m128i _mm_loadl_epi64(const __m128i *from) {
    __m128i r = { { 0 } };
    memcpy(&r, from, 8);
    return r;
}
E void _mm_storel_epi64(__m128i *to, __m128i value) { memcpy(to, &value, 8); }


/* --- bytes and words of 256 bits ---------------------------------------------------------------------------------- */
typedef union { __m256i v; __m128i half[2]; uint64_t u64[4]; uint16_t u16[16]; int8_t i8[32]; } emulated_256;
#define WORDS(name, arguments, expression) \
    E __m256i name arguments {                                                                    \
        emulated_256 r;                                                                           \
        for (int i = 0; i < 16; ++i) r.u16[i] = (uint16_t)(expression);                           \
        return r.v;                                                                               \
    }
#define BYTES(name, arguments, expression) \
    E __m256i name arguments {                                                                    \
        emulated_256 r;                                                                           \
        for (int i = 0; i < 32; ++i) r.i8[i] = (int8_t)(expression);                              \
        return r.v;                                                                               \
    }
#define WORD(value, i) (((const emulated_256 *)(const void *)&(value))->u16[i])
WORDS(_mm256_cvtepu8_epi16, (__m128i a), PART(a, u8, i))
WORDS(_mm256_set1_epi16, (short x), x)
WORDS(_mm256_slli_epi16, (__m256i a, int n), WORD(a, i) << n)
WORDS(_mm256_and_si256, (__m256i a, __m256i b), WORD(a, i) & WORD(b, i))
WORDS(_mm256_or_si256, (__m256i a, __m256i b), WORD(a, i) | WORD(b, i))
WORDS(_mm256_cmpeq_epi16, (__m256i a, __m256i b), WORD(a, i) == WORD(b, i) ? 0xffff : 0)
WORDS(_mm256_srli_epi16, (__m256i a, int n), WORD(a, i) >> n)
#define BYTE(value, i) (((const emulated_256 *)(const void *)&(value))->i8[i])
BYTES(_mm256_set1_epi8, (char x), x)
BYTES(_mm256_max_epi8, (__m256i a, __m256i b), BYTE(a, i) > BYTE(b, i) ? BYTE(a, i) : BYTE(b, i))
BYTES(_mm256_min_epi8, (__m256i a, __m256i b), BYTE(a, i) < BYTE(b, i) ? BYTE(a, i) : BYTE(b, i))
/* Within each half: eight words of a, then eight of b. */
BYTES(_mm256_packus_epi16, (__m256i a, __m256i b),
      emulated_within((int16_t)WORD(*(i % 16 < 8 ? &a : &b), i / 16 * 8 + i % 8), 0, 255))
E __m256i _mm256_permute4x64_epi64(__m256i a, int order) {
    const emulated_256 from = { a };
    emulated_256 r;
    for (int i = 0; i < 4; ++i) r.u64[i] = from.u64[order >> 2 * i & 3];
    return r.v;
}
E __m256i _mm256_set_m128i(__m128i high, __m128i low) {
    emulated_256 r;
    r.half[0] = low, r.half[1] = high;
    return r.v;
}
E __m128i _mm256_castsi256_si128(__m256i a) { return ((const emulated_256){ a }).half[0]; }
E __m256i _mm256_castsi128_si256(__m128i a) {
    emulated_256 r; /* the upper half is undefined: something that would show */
    memset(&r, 0xa5, sizeof r);
    r.half[0] = a;
    return r.v;
}

#endif
