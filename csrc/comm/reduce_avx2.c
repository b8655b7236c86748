/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of floating point arrays with AVX2 and F16C; the copy that writes around the cache. Same bits as
 * reduce_scalar.c: one addition per source, in rank order, then one multiplication, then one rounding.
 *
 * The loop goes over the sources inside and over memory outside, 32 elements at a time, so the running sum never leaves
 * the registers and every byte is touched once; it is bound by memory from two sources on.
 */
#include <immintrin.h>
#include <string.h>

#include "reduce.h"

enum { LANES = 8, BLOCK = 32 };

static inline __m256 load_f32(const void *src, size_t i) { return _mm256_loadu_ps((const float *)src + i); }

static inline __m256 load_bf16(const void *src, size_t i) {
    const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)src + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline __m256 load_f16(const void *src, size_t i) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)src + i)));
}

static inline void store_bf16(void *dst, size_t i, __m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i wide = _mm256_blendv_epi8(rounded, quiet, nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08);
    _mm_storeu_si128((__m128i *)(void *)((uint16_t *)dst + i), _mm256_castsi256_si128(packed));
}

static inline void store_f16(void *dst, size_t i, __m256 value) {
    const __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)(void *)((uint16_t *)dst + i), half);
}

static inline void sum_block_f32(float *dst, bool accumulate, const void *const *src, int sources, size_t i,
                                 __m256 scale, bool stream) {
    __m256 sum[4];
    for (int k = 0; k < 4; k++) sum[k] = load_f32(src[0], i + (size_t)k * LANES);
    for (int r = 1; r < sources; r++)
        for (int k = 0; k < 4; k++) sum[k] = _mm256_add_ps(sum[k], load_f32(src[r], i + (size_t)k * LANES));
    for (int k = 0; k < 4; k++) {
        float *at = dst + i + k * LANES;
        __m256 value = _mm256_mul_ps(sum[k], scale);
        if (accumulate) value = _mm256_add_ps(_mm256_loadu_ps(at), value);
        if (stream)
            _mm256_stream_ps(at, value);
        else
            _mm256_storeu_ps(at, value);
    }
}

static void shift(const void **to, const void *const *from, int sources, size_t bytes) {
    for (int r = 0; r < sources; r++) to[r] = (const uint8_t *)from[r] + bytes;
}

static void sum_f32(float *dst, bool accumulate, const void *const *src, int sources, size_t elems, float scale,
                    bool stream) {
    const __m256 factor = _mm256_set1_ps(scale);
    size_t i = 0;
    if (stream && (uintptr_t)dst % 32 == 0) {
        for (; i + BLOCK <= elems; i += BLOCK) sum_block_f32(dst, accumulate, src, sources, i, factor, true);
        _mm_sfence();                         /* streamed stores are ordered before the counter that announces them */
    } else if (sources == 2 && !accumulate) { /* by far the commonest: the compiler keeps both pointers in registers */
        const void *const pair[2] = {src[0], src[1]};
        for (; i + BLOCK <= elems; i += BLOCK) sum_block_f32(dst, false, pair, 2, i, factor, false);
    } else {
        for (; i + BLOCK <= elems; i += BLOCK) sum_block_f32(dst, accumulate, src, sources, i, factor, false);
    }
    const void *rest[64];
    shift(rest, src, sources, i * sizeof(float));
    zpp_sum_scalar.f32(dst + i, accumulate, rest, sources, elems - i, scale, false);
}

/* The 16-bit kinds differ in load and store only; the compiler makes one loop of each call. */
typedef __m256 (*load_fn)(const void *src, size_t i);
typedef void (*store_fn)(void *dst, size_t i, __m256 value);

static inline __attribute__((always_inline)) size_t sum_16(void *dst, bool wide, bool accumulate,
                                                           const void *const *src, int sources, size_t elems,
                                                           float scale, load_fn load, store_fn store) {
    const __m256 factor = _mm256_set1_ps(scale);
    size_t i = 0;
    for (; i + BLOCK <= elems; i += BLOCK) {
        __m256 sum[4];
        for (int k = 0; k < 4; k++) sum[k] = load(src[0], i + (size_t)k * LANES);
        for (int r = 1; r < sources; r++)
            for (int k = 0; k < 4; k++) sum[k] = _mm256_add_ps(sum[k], load(src[r], i + (size_t)k * LANES));
        for (int k = 0; k < 4; k++) {
            const size_t at = i + (size_t)k * LANES;
            __m256 value = _mm256_mul_ps(sum[k], factor);
            if (accumulate) value = _mm256_add_ps(wide ? load_f32(dst, at) : load(dst, at), value);
            if (wide)
                _mm256_storeu_ps((float *)dst + at, value);
            else
                store(dst, at, value);
        }
    }
    return i;
}

static void *past(void *dst, bool wide, size_t elems) { return (uint8_t *)dst + elems * (wide ? 4 : 2); }

static void sum_bf16(void *dst, bool wide, bool accumulate, const void *const *src, int sources, size_t elems,
                     float scale) {
    const void *rest[64];
    const size_t done = sum_16(dst, wide, accumulate, src, sources, elems, scale, load_bf16, store_bf16);
    shift(rest, src, sources, done * 2);
    zpp_sum_scalar.bf16(past(dst, wide, done), wide, accumulate, rest, sources, elems - done, scale);
}

static void sum_f16(void *dst, bool wide, bool accumulate, const void *const *src, int sources, size_t elems,
                    float scale) {
    const void *rest[64];
    const size_t done = sum_16(dst, wide, accumulate, src, sources, elems, scale, load_f16, store_f16);
    shift(rest, src, sources, done * 2);
    zpp_sum_scalar.f16(past(dst, wide, done), wide, accumulate, rest, sources, elems - done, scale);
}

static void copy(void *dst, const void *src, size_t bytes) {
    uint8_t *to = dst;
    const uint8_t *from = src;
    const size_t head = (size_t)(-(uintptr_t)to % 32);
    if (bytes < 256 + head) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    size_t i = head;
    for (; i + 128 <= bytes; i += 128)
        for (size_t k = 0; k < 128; k += 32)
            _mm256_stream_si256((__m256i *)(void *)(to + i + k),
                                _mm256_loadu_si256((const __m256i *)(const void *)(from + i + k)));
    _mm_sfence();
    memcpy(to + i, from + i, bytes - i);
}

const struct zpp_sum_kernels zpp_sum_avx2 = {sum_f32, sum_bf16, sum_f16, copy};
