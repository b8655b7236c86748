/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam with AVX2, eight elements a register. Operation by operation the order of adam_body.h, so the same bits as the
 * scalar version.
 *
 * A turn takes 32 elements: one whole cache line of a 16-bit copy-out, which is written past the cache (nobody reads
 * it before the next forward, and a plain store would first read the line). Kinds of gradient and copy-out, and
 * whether the rare options are on, are constants of each instance of turns(), so the loop has no branch. The pass is
 * bound by memory: docs/design/0002-adam-streams.md says what was tried (prefetch, tiles, wider turns) and what it
 * gave.
 */
#include "kernels.h"

#include <immintrin.h>

#include "element_io.h"

enum { LANES = 8, TURN_ELEMS = 32, STREAM_ELEMS = 1024 };
#define NO_OUT ZPP_DTYPES /* no kind: nothing is copied out */

#define INLINE static inline __attribute__((always_inline))

INLINE __m256 load_grad(const void *grad, size_t i, const zpp_dtype dtype) {
    if (dtype == ZPP_F32) return _mm256_loadu_ps((const float *)grad + i);
    const __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)grad + i));
    if (dtype == ZPP_F16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* Eight fp32 to bf16 in the low halves of eight 32-bit lanes, as zpp_bf16_from_f32 does. */
INLINE __m256i bf16_lanes(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}

/* Sixteen fp32 to sixteen 16-bit elements. */
INLINE __m256i narrow(__m256 low, __m256 high, const zpp_dtype dtype) {
    if (dtype == ZPP_F16) {
        const __m128i a = _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT);
        const __m128i b = _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT);
        return _mm256_set_m128i(b, a);
    }
    const __m256i packed = _mm256_packus_epi32(bf16_lanes(low), bf16_lanes(high)); /* 128-bit halves interleave */
    return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
}

/* Eight elements at i; the new parameters. */
INLINE __m256 eight(const struct zpp_optim_segment *s, const struct zpp_adam_consts *c, size_t i,
                    const zpp_dtype grad_dtype, const bool rare) {
    const __m256 p = _mm256_loadu_ps(s->param + i);
    __m256 m = _mm256_loadu_ps(s->exp_avg + i), v = _mm256_loadu_ps(s->exp_avg_sq + i);
    __m256 g = _mm256_mul_ps(load_grad(s->grad, i, grad_dtype), _mm256_set1_ps(c->grad_scale));
    const __m256 kept = _mm256_mul_ps(p, _mm256_set1_ps(c->keep));
    if (rare && c->use_l2) g = _mm256_add_ps(g, _mm256_mul_ps(_mm256_set1_ps(c->l2), p));
    const __m256 away = _mm256_sub_ps(g, m);
    m = rare && c->use_far ? _mm256_sub_ps(g, _mm256_mul_ps(away, _mm256_set1_ps(c->lerp_far)))
                           : _mm256_add_ps(m, _mm256_mul_ps(_mm256_set1_ps(c->lerp), away));
    v = _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(c->beta2), v),
                      _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(c->one_minus_beta2), g), g));
    __m256 second = v;
    if (rare && s->max_exp_avg_sq) {
        const __m256 top = _mm256_loadu_ps(s->max_exp_avg_sq + i);
        const __m256 take = _mm256_or_ps(_mm256_cmp_ps(v, top, _CMP_GT_OQ), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        second = _mm256_blendv_ps(top, v, take);
        _mm256_storeu_ps(s->max_exp_avg_sq + i, second);
    }
    const __m256 root = _mm256_mul_ps(_mm256_sqrt_ps(second), _mm256_set1_ps(c->root_scale));
    const __m256 denominator = _mm256_add_ps(root, _mm256_set1_ps(c->eps));
    const __m256 moved = _mm256_div_ps(_mm256_mul_ps(_mm256_set1_ps(c->step_size), m), denominator);
    const __m256 updated = _mm256_sub_ps(kept, moved);
    _mm256_storeu_ps(s->exp_avg + i, m);
    _mm256_storeu_ps(s->exp_avg_sq + i, v);
    _mm256_storeu_ps(s->param + i, updated);
    return updated;
}

INLINE void put(void *to, size_t register_index, __m256i value, const bool stream) {
    __m256i *at = (__m256i *)to + register_index;
    if (stream) _mm256_stream_si256(at, value);
    else _mm256_storeu_si256(at, value);
}

/* A turn's copy-out, at element i. */
INLINE void copy_out(void *out, size_t i, const __m256 p[TURN_ELEMS / LANES], const zpp_dtype dtype,
                     const bool stream) {
    if (dtype == ZPP_F32) {
        for (size_t k = 0; k < TURN_ELEMS / LANES; ++k) put((float *)out + i, k, _mm256_castps_si256(p[k]), stream);
        return;
    }
    put((uint16_t *)out + i, 0, narrow(p[0], p[1], dtype), stream);
    put((uint16_t *)out + i, 1, narrow(p[2], p[3], dtype), stream);
}

/* Whole turns from begin; where they end. `stream`: copy out past the cache; param_out + begin is aligned to a line. */
INLINE size_t turns(const struct zpp_optim_segment *s, const struct zpp_adam_consts *consts, size_t begin, size_t end,
                    const zpp_dtype grad_dtype, const zpp_dtype out_dtype, const bool rare, bool stream) {
    const struct zpp_optim_segment segment = *s; /* copies: the compiler may not assume that stores leave *s alone */
    const struct zpp_adam_consts c = *consts;
    size_t i = begin;
    for (; i + TURN_ELEMS <= end; i += TURN_ELEMS) {
        __m256 p[TURN_ELEMS / LANES];
        for (size_t k = 0; k < TURN_ELEMS / LANES; ++k) p[k] = eight(&segment, &c, i + k * LANES, grad_dtype, rare);
        if (out_dtype != NO_OUT) copy_out(segment.param_out, i, p, out_dtype, stream);
    }
    if (out_dtype != NO_OUT && stream) _mm_sfence(); /* streamed stores are weakly ordered: flags must not overtake */
    return i;
}

#define INSTANCE(grad, out)                                               \
    if (grad_dtype == (grad) && out_dtype == (out)) {                     \
        if (rare) return turns(s, c, begin, end, grad, out, true, stream); \
        return turns(s, c, begin, end, grad, out, false, stream);         \
    }

static size_t all_turns(const struct zpp_optim_segment *s, const struct zpp_adam_consts *c, size_t begin, size_t end,
                        bool stream) {
    const zpp_dtype grad_dtype = s->grad_dtype, out_dtype = s->param_out ? s->out_dtype : NO_OUT;
    const bool rare = c->use_l2 || c->use_far || s->max_exp_avg_sq;
    INSTANCE(ZPP_F32, NO_OUT)
    INSTANCE(ZPP_BF16, NO_OUT)
    INSTANCE(ZPP_F16, NO_OUT)
    INSTANCE(ZPP_F32, ZPP_F32)
    INSTANCE(ZPP_BF16, ZPP_F32)
    INSTANCE(ZPP_F16, ZPP_F32)
    INSTANCE(ZPP_F32, ZPP_BF16)
    INSTANCE(ZPP_BF16, ZPP_BF16)
    INSTANCE(ZPP_F16, ZPP_BF16)
    INSTANCE(ZPP_F32, ZPP_F16)
    INSTANCE(ZPP_BF16, ZPP_F16)
    INSTANCE(ZPP_F16, ZPP_F16)
    return begin;
}

/* Elements before param_out + begin reaches a line. */
static size_t head_elems(const struct zpp_optim_segment *s, size_t begin) {
    const size_t elem_bytes = s->out_dtype == ZPP_F32 ? 4 : 2;
    const uintptr_t at = (uintptr_t)s->param_out + begin * elem_bytes;
    return ((0 - at) & 63u) / elem_bytes;
}

void zpp_adam_avx2(const struct zpp_optim_segment *segment, const struct zpp_adam_consts *consts, size_t begin,
                   size_t end) {
    /* A short piece is copied out through the cache, from any address: its head would cost more than is saved. */
    const bool stream = segment->param_out && end - begin >= STREAM_ELEMS;
    const size_t first = stream ? begin + head_elems(segment, begin) : begin;
    zpp_adam_elements(segment, consts, begin, first);
    zpp_adam_elements(segment, consts, all_turns(segment, consts, first, end, stream), end);
}
