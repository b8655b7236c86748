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

/* Largest magnitudes so far, a lane each: of the result, and of what it replaced. */
struct largest {
    __m256i result, replaced;
};

static inline __m256i larger(__m256i largest, __m256 value) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(ZPP_SUM_MAGNITUDE));
    return _mm256_max_epi32(largest, bits); /* no sign bit, so signed max is right */
}

static inline uint32_t largest_lane(__m256i lanes) {
    uint32_t each[LANES], most = 0;
    _mm256_storeu_si256((__m256i *)(void *)each, lanes);
    for (int i = 0; i < LANES; i++) most = each[i] > most ? each[i] : most;
    return most;
}

/* The dtypes differ in load and store only; the compiler makes one loop of each call. */
typedef __m256 (*load_fn)(const void *src, size_t i);
typedef void (*store_fn)(void *dst, size_t i, __m256 value);

static inline void store_f32(void *dst, size_t i, __m256 value) { _mm256_storeu_ps((float *)dst + i, value); }
static inline void stream_f32(void *dst, size_t i, __m256 value) { _mm256_stream_ps((float *)dst + i, value); }

static inline __attribute__((always_inline)) void sum_block(const struct zpp_sum *job, size_t i, load_fn load,
                                                            load_fn load_dst, store_fn store, bool report,
                                                            struct largest *largest) {
    __m256 sum[4];
    for (int k = 0; k < 4; k++) sum[k] = load(job->src[0], i + (size_t)k * LANES);
    for (int r = 1; r < job->sources; r++)
        for (int k = 0; k < 4; k++) sum[k] = _mm256_add_ps(sum[k], load(job->src[r], i + (size_t)k * LANES));
    if (report && job->replaces)
        for (int k = 0; k < 4; k++)
            largest->replaced = larger(largest->replaced, load_dst(job->dst, i + (size_t)k * LANES));
    for (int k = 0; k < 4; k++) {
        const size_t at = i + (size_t)k * LANES;
        __m256 value = _mm256_mul_ps(sum[k], _mm256_set1_ps(job->scale));
        if (job->accumulate) value = _mm256_add_ps(load_dst(job->dst, at), value);
        if (report) largest->result = larger(largest->result, value);
        store(job->dst, at, value);
    }
}

/* Sum whole blocks only. Return how many elements they have. */
static inline __attribute__((always_inline)) size_t block_loop(const struct zpp_sum *sum, size_t elems, load_fn load,
                                                               load_fn load_dst, store_fn store, bool report,
                                                               struct zpp_sum_seen *seen) {
    const void *const pair[2] = {sum->src[0], sum->src[sum->sources > 1]};
    struct zpp_sum job = *sum; /* a copy, so that the compiler knows that no store changes it */
    struct largest largest = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t i = 0;
    if (job.sources == 2 && !job.accumulate) { /* by far the commonest: the compiler keeps both pointers in registers */
        job = (struct zpp_sum){.dst = job.dst, .src = pair, .sources = 2, .scale = job.scale, .replaces = job.replaces};
        for (; i + BLOCK <= elems; i += BLOCK) sum_block(&job, i, load, load_dst, store, report, &largest);
    } else {
        for (; i + BLOCK <= elems; i += BLOCK) sum_block(&job, i, load, load_dst, store, report, &largest);
    }
    *seen = (struct zpp_sum_seen){0};
    if (report) *seen = zpp_sum_seen(largest_lane(largest.result), largest_lane(largest.replaced));
    return i;
}

/* Two loops: data in the cache is summed up to a tenth faster by the one that reports nothing. */
static inline __attribute__((always_inline)) size_t sum_blocks(const struct zpp_sum *sum, size_t elems, load_fn load,
                                                               load_fn load_dst, store_fn store,
                                                               struct zpp_sum_seen *seen) {
    return sum->report ? block_loop(sum, elems, load, load_dst, store, true, seen)
                       : block_loop(sum, elems, load, load_dst, store, false, seen);
}

/* Sum the elements after the whole blocks with the scalar kernel of the same dtype. */
static struct zpp_sum_seen sum_rest(struct zpp_sum_seen (*scalar)(const struct zpp_sum *, size_t),
                                    const struct zpp_sum *sum, size_t elem_bytes, size_t done, size_t elems,
                                    struct zpp_sum_seen seen) {
    const void *src[ZPP_RANKS_MAX];
    struct zpp_sum rest = *sum;
    for (int r = 0; r < sum->sources; r++) src[r] = (const uint8_t *)sum->src[r] + done * elem_bytes;
    rest.src = src;
    rest.dst = (uint8_t *)sum->dst + done * (sum->wide ? sizeof(float) : elem_bytes);
    const struct zpp_sum_seen last = scalar(&rest, elems - done);
    return (struct zpp_sum_seen){seen.nonfinite || last.nonfinite, seen.replaced_nonfinite || last.replaced_nonfinite};
}

static struct zpp_sum_seen sum_f32(const struct zpp_sum *sum, size_t elems) {
    struct zpp_sum_seen seen;
    size_t done;
    if (sum->stream && (uintptr_t)sum->dst % 32 == 0) {
        done = sum_blocks(sum, elems, load_f32, load_f32, stream_f32, &seen);
        _mm_sfence(); /* streamed stores are ordered before the counter that announces them */
    } else {
        done = sum_blocks(sum, elems, load_f32, load_f32, store_f32, &seen);
    }
    return sum_rest(zpp_sum_scalar.f32, sum, sizeof(float), done, elems, seen);
}

static struct zpp_sum_seen sum_bf16(const struct zpp_sum *sum, size_t elems) {
    struct zpp_sum_seen seen;
    const size_t done = sum->wide ? sum_blocks(sum, elems, load_bf16, load_f32, store_f32, &seen)
                                  : sum_blocks(sum, elems, load_bf16, load_bf16, store_bf16, &seen);
    return sum_rest(zpp_sum_scalar.bf16, sum, sizeof(uint16_t), done, elems, seen);
}

static struct zpp_sum_seen sum_f16(const struct zpp_sum *sum, size_t elems) {
    struct zpp_sum_seen seen;
    const size_t done = sum->wide ? sum_blocks(sum, elems, load_f16, load_f32, store_f32, &seen)
                                  : sum_blocks(sum, elems, load_f16, load_f16, store_f16, &seen);
    return sum_rest(zpp_sum_scalar.f16, sum, sizeof(uint16_t), done, elems, seen);
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
