/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam with AVX-512, sixteen elements a register. Operation by operation the order of adam_body.h, so the same bits
 * as the scalar version.
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

enum { LANES = 16, TURN_ELEMS = 32, STREAM_ELEMS = 1024 };
#define NO_OUT ZPP_DTYPES /* no kind: nothing is copied out */

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 load_grad(const void *grad, size_t i, const zpp_dtype dtype) {
    if (dtype == ZPP_F32) return _mm512_loadu_ps((const float *)grad + i);
    const __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)grad + i));
    if (dtype == ZPP_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Sixteen fp32 to sixteen 16-bit elements; bf16 as zpp_bf16_from_f32 does (AVX512_BF16 flushes subnormals: not it). */
INLINE __m256i narrow(__m512 value, const zpp_dtype dtype) {
    if (dtype == ZPP_F16) return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16));
}

/* Sixteen elements at i; the new parameters. */
INLINE __m512 sixteen(const struct zpp_optim_segment *s, const struct zpp_adam_consts *c, size_t i,
                      const zpp_dtype grad_dtype, const bool rare) {
    const __m512 p = _mm512_loadu_ps(s->param + i);
    __m512 m = _mm512_loadu_ps(s->exp_avg + i), v = _mm512_loadu_ps(s->exp_avg_sq + i);
    __m512 g = _mm512_mul_ps(load_grad(s->grad, i, grad_dtype), _mm512_set1_ps(c->grad_scale));
    const __m512 kept = _mm512_mul_ps(p, _mm512_set1_ps(c->keep));
    if (rare && c->use_l2) g = _mm512_add_ps(g, _mm512_mul_ps(_mm512_set1_ps(c->l2), p));
    const __m512 away = _mm512_sub_ps(g, m);
    m = rare && c->use_far ? _mm512_sub_ps(g, _mm512_mul_ps(away, _mm512_set1_ps(c->lerp_far)))
                           : _mm512_add_ps(m, _mm512_mul_ps(_mm512_set1_ps(c->lerp), away));
    v = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(c->beta2), v),
                      _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(c->one_minus_beta2), g), g));
    __m512 second = v;
    if (rare && s->max_exp_avg_sq) {
        const __m512 top = _mm512_loadu_ps(s->max_exp_avg_sq + i);
        const __mmask16 greater = _mm512_cmp_ps_mask(v, top, _CMP_GT_OQ);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        second = _mm512_mask_blend_ps((__mmask16)(greater | is_nan), top, v);
        _mm512_storeu_ps(s->max_exp_avg_sq + i, second);
    }
    const __m512 root = _mm512_mul_ps(_mm512_sqrt_ps(second), _mm512_set1_ps(c->root_scale));
    const __m512 denominator = _mm512_add_ps(root, _mm512_set1_ps(c->eps));
    const __m512 moved = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(c->step_size), m), denominator);
    const __m512 updated = _mm512_sub_ps(kept, moved);
    _mm512_storeu_ps(s->exp_avg + i, m);
    _mm512_storeu_ps(s->exp_avg_sq + i, v);
    _mm512_storeu_ps(s->param + i, updated);
    return updated;
}

INLINE void put(void *to, __m512i value, const bool stream) {
    if (stream) _mm512_stream_si512((__m512i *)to, value);
    else _mm512_storeu_si512(to, value);
}

/* A turn's copy-out, at element i. */
INLINE void copy_out(void *out, size_t i, __m512 low, __m512 high, const zpp_dtype dtype, const bool stream) {
    if (dtype == ZPP_F32) {
        put((float *)out + i, _mm512_castps_si512(low), stream);
        put((float *)out + i + LANES, _mm512_castps_si512(high), stream);
        return;
    }
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low, dtype)), narrow(high, dtype), 1);
    put((uint16_t *)out + i, both, stream);
}

/* Whole turns from begin; where they end. `stream`: copy out past the cache; param_out + begin is aligned to a line. */
INLINE size_t turns(const struct zpp_optim_segment *s, const struct zpp_adam_consts *consts, size_t begin, size_t end,
                    const zpp_dtype grad_dtype, const zpp_dtype out_dtype, const bool rare, bool stream) {
    const struct zpp_optim_segment segment = *s; /* copies: the compiler may not assume that stores leave *s alone */
    const struct zpp_adam_consts c = *consts;
    size_t i = begin;
    for (; i + TURN_ELEMS <= end; i += TURN_ELEMS) {
        const __m512 low = sixteen(&segment, &c, i, grad_dtype, rare);
        const __m512 high = sixteen(&segment, &c, i + LANES, grad_dtype, rare);
        if (out_dtype != NO_OUT) copy_out(segment.param_out, i, low, high, out_dtype, stream);
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

void zpp_adam_avx512(const struct zpp_optim_segment *segment, const struct zpp_adam_consts *consts, size_t begin,
                     size_t end) {
    /* A short piece is copied out through the cache, from any address: its head would cost more than is saved. */
    const bool stream = segment->param_out && end - begin >= STREAM_ELEMS;
    const size_t first = stream ? begin + head_elems(segment, begin) : begin;
    zpp_adam_elements(segment, consts, begin, first);
    zpp_adam_elements(segment, consts, all_turns(segment, consts, first, end, stream), end);
}
