/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of floating point arrays with AVX-512 (F, BW, VL, DQ). The plan of reduce_avx2.c with 16 lanes and a masked
 * tail. bf16 is rounded with integer instructions, not with AVX512_BF16, which flushes denormals and would give other
 * bits.
 */
#include <immintrin.h>
#include <string.h>

#include "reduce.h"

enum { LANES = 16, GROUPS = 4, BLOCK = LANES * GROUPS };

static inline __m512 load_f32(const void *src, size_t i, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, (const float *)src + i);
}

static inline __m512 load_bf16(const void *src, size_t i, __mmask16 lanes) {
    const __m256i half = _mm256_maskz_loadu_epi16(lanes, (const uint16_t *)src + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline __m512 load_f16(const void *src, size_t i, __mmask16 lanes) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, (const uint16_t *)src + i));
}

static inline void store_bf16(void *dst, size_t i, __mmask16 lanes, __m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    _mm256_mask_storeu_epi16((uint16_t *)dst + i, lanes,
                             _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet)));
}

static inline void store_f16(void *dst, size_t i, __mmask16 lanes, __m512 value) {
    const __m256i half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16((uint16_t *)dst + i, lanes, half);
}

static inline void store_f32(void *dst, size_t i, __mmask16 lanes, __m512 value) {
    _mm512_mask_storeu_ps((float *)dst + i, lanes, value);
}

typedef __m512 (*load_fn)(const void *src, size_t i, __mmask16 lanes);
typedef void (*store_fn)(void *dst, size_t i, __mmask16 lanes, __m512 value);

/* Largest magnitudes so far, a lane each: of the result, and of what it replaced. */
struct largest {
    __m512i result, replaced;
};

static inline __m512i larger(__m512i largest, __m512 value) {
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(ZPP_SUM_MAGNITUDE));
    return _mm512_max_epi32(largest, bits); /* no sign bit, so signed max is right */
}

/* `groups` vectors from element `i` on; only the lanes of the last call's tail are masked. Inlined with known
 * functions. */
static inline __attribute__((always_inline)) void sum_groups(const struct zpp_sum *job, size_t i, int groups,
                                                             __mmask16 lanes, load_fn load, load_fn load_dst,
                                                             store_fn store, bool report, struct largest *largest) {
    __m512 sum[GROUPS];
    for (int k = 0; k < groups; k++) sum[k] = load(job->src[0], i + (size_t)k * LANES, lanes);
    for (int r = 1; r < job->sources; r++)
        for (int k = 0; k < groups; k++)
            sum[k] = _mm512_add_ps(sum[k], load(job->src[r], i + (size_t)k * LANES, lanes));
    if (report && job->replaces)
        for (int k = 0; k < groups; k++)
            largest->replaced = larger(largest->replaced, load_dst(job->dst, i + (size_t)k * LANES, lanes));
    for (int k = 0; k < groups; k++) {
        const size_t at = i + (size_t)k * LANES;
        __m512 value = _mm512_mul_ps(sum[k], _mm512_set1_ps(job->scale));
        if (job->accumulate) value = _mm512_add_ps(load_dst(job->dst, at, lanes), value);
        if (report) largest->result = larger(largest->result, value);
        store(job->dst, at, lanes, value);
    }
}

static inline __attribute__((always_inline)) struct zpp_sum_seen sum_loop(const struct zpp_sum *sum, size_t elems,
                                                                          load_fn load, load_fn load_dst,
                                                                          store_fn store, bool report) {
    const struct zpp_sum job = *sum; /* a copy, so that the compiler knows that no store changes it */
    const __mmask16 all = 0xffff;
    struct largest largest = {_mm512_set1_epi32(0), _mm512_set1_epi32(0)};
    size_t i = 0;
    for (; i + BLOCK <= elems; i += BLOCK) sum_groups(&job, i, GROUPS, all, load, load_dst, store, report, &largest);
    for (; i + LANES <= elems; i += LANES) sum_groups(&job, i, 1, all, load, load_dst, store, report, &largest);
    if (i < elems) {
        const __mmask16 tail = (__mmask16)((1u << (elems - i)) - 1u);
        sum_groups(&job, i, 1, tail, load, load_dst, store, report, &largest);
    }
    if (!report) return (struct zpp_sum_seen){0};
    return zpp_sum_seen((uint32_t)_mm512_reduce_max_epi32(largest.result),
                        (uint32_t)_mm512_reduce_max_epi32(largest.replaced));
}

/* Two loops: data in the cache is summed up to a tenth faster by the one that reports nothing. */
static inline __attribute__((always_inline)) struct zpp_sum_seen sum_all(const struct zpp_sum *sum, size_t elems,
                                                                         load_fn load, load_fn load_dst,
                                                                         store_fn store) {
    return sum->report ? sum_loop(sum, elems, load, load_dst, store, true)
                       : sum_loop(sum, elems, load, load_dst, store, false);
}

static void stream_f32(void *dst, size_t i, __mmask16 lanes, __m512 value) {
    if (lanes == 0xffff)
        _mm512_stream_ps((float *)dst + i, value);
    else
        _mm512_mask_storeu_ps((float *)dst + i, lanes, value);
}

static struct zpp_sum_seen sum_f32(const struct zpp_sum *sum, size_t elems) {
    if (!sum->stream || (uintptr_t)sum->dst % 64 != 0) return sum_all(sum, elems, load_f32, load_f32, store_f32);
    const struct zpp_sum_seen seen = sum_all(sum, elems, load_f32, load_f32, stream_f32);
    _mm_sfence(); /* streamed stores are ordered before the counter that announces them */
    return seen;
}

static struct zpp_sum_seen sum_bf16(const struct zpp_sum *sum, size_t elems) {
    if (sum->wide) return sum_all(sum, elems, load_bf16, load_f32, store_f32);
    return sum_all(sum, elems, load_bf16, load_bf16, store_bf16);
}

static struct zpp_sum_seen sum_f16(const struct zpp_sum *sum, size_t elems) {
    if (sum->wide) return sum_all(sum, elems, load_f16, load_f32, store_f32);
    return sum_all(sum, elems, load_f16, load_f16, store_f16);
}

static void copy(void *dst, const void *src, size_t bytes) {
    uint8_t *to = dst;
    const uint8_t *from = src;
    const size_t head = (size_t)(-(uintptr_t)to % 64);
    if (bytes < 512 + head) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    size_t i = head;
    for (; i + 256 <= bytes; i += 256)
        for (size_t k = 0; k < 256; k += 64)
            _mm512_stream_si512((__m512i *)(void *)(to + i + k), _mm512_loadu_si512(from + i + k));
    _mm_sfence();
    memcpy(to + i, from + i, bytes - i);
}

const struct zpp_sum_kernels zpp_sum_avx512 = {sum_f32, sum_bf16, sum_f16, copy};
