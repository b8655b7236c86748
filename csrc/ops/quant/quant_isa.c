/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantisation of blocks: first in plain C, which is its meaning on CPU, then sixteen lanes at once.
 * Operation by operation the order of quant_body.h. Bits and dtypes are constants of each instance.
 *
 * A block is read twice, the second time from the first-level cache: blocks of a few hundred elements, which
 * collectives use, never leave it.
 */
#include "kernels.h"

#if ZPP_LANES == 1

#include "tail.h"

static void span_tail(const void *src, zpp_dtype dtype, bool asymmetric, size_t elems, struct zpp_quant_span *span) {
    (void)asymmetric; /* low and high cost nothing here */
    zpp_quant_span_tail(src, dtype, 0, elems, span);
}

static void encode_tail(int bits, const struct zpp_quant_consts *consts, const void *src, zpp_dtype dtype,
                        bool asymmetric, size_t elems, uint8_t *codes) {
    (void)asymmetric; /* mid is 0 where it is not */
    zpp_quant_encode_tail(bits, consts, src, dtype, 0, elems, codes);
}

static void encode(int bits, const struct zpp_quant_consts *consts, const void *src, zpp_dtype dtype, size_t elems,
                   uint8_t *codes) {
    encode_tail(bits, consts, src, dtype, true, elems, codes);
}

static void blocks(const struct zpp_quant_spec *spec, const void *src, zpp_dtype dtype, size_t elems, uint8_t *codes,
                   float *scales, float *mids) {
    zpp_quant_each_block(spec, src, dtype, elems, codes, scales, mids, span_tail, encode_tail);
}

static void span_of(const void *src, zpp_dtype dtype, size_t elems, struct zpp_quant_span *span) {
    zpp_quant_span_tail(src, dtype, 0, elems, span);
}

static void decode(int bits, float scale, float mid, const uint8_t *codes, size_t elems, void *dst, zpp_dtype dtype,
                   enum zpp_quant_how how) {
    zpp_quant_decode_tail(bits, scale, mid, codes, 0, elems, dst, dtype, how == ZPP_QUANT_ADD);
}

#else

#include "../vec16.h"
#include "tail.h"

enum { SPAN_TURN_ELEMS = 4 * V16_LANES };

struct wide_span {
    v16 top, low, high;
};

V16_FN void widen(struct wide_span *w, v16 x, const bool asymmetric) {
    w->top = v16_max_bits(w->top, v16_abs(x));
    if (!asymmetric) return;
    w->low = v16_min(w->low, x);
    w->high = v16_max(w->high, x);
}

V16_FN void join(struct wide_span *a, const struct wide_span *b, const bool asymmetric) {
    a->top = v16_max_bits(a->top, b->top);
    if (!asymmetric) return;
    a->low = v16_min(a->low, b->low);
    a->high = v16_max(a->high, b->high);
}

/* Four independent spans hide the latency of max. */
V16_FN void span_vec(const void *src, const zpp_dtype dtype, const bool asymmetric, size_t elems,
                     struct zpp_quant_span *span) {
    const struct wide_span empty = { v16_set1(0.0f), v16_set1(span->low), v16_set1(span->high) };
    struct wide_span w[4] = { empty, empty, empty, empty };
    size_t i = 0;
    for (; i + SPAN_TURN_ELEMS <= elems; i += SPAN_TURN_ELEMS) {
        for (size_t k = 0; k < 4; ++k) widen(&w[k], v16_load_as(src, i + k * V16_LANES, dtype), asymmetric);
    }
    for (; i + V16_LANES <= elems; i += V16_LANES) widen(&w[0], v16_load_as(src, i, dtype), asymmetric);
    join(&w[0], &w[1], asymmetric), join(&w[2], &w[3], asymmetric), join(&w[0], &w[2], asymmetric);
    const uint32_t top = v16_greatest_bits(w[0].top);
    if (top > span->top_bits) span->top_bits = top;
    if (asymmetric) span->low = v16_least(w[0].low), span->high = v16_greatest(w[0].high);
    zpp_quant_span_tail(src, dtype, i, elems, span);
}

/* --- codes of 4 and 8 bits, stored and loaded ------------------------------------------------------------------- */

#if ZPP_ISA_NEON

V16_FN int8x16_t clamped(b16 codes) {
    return vmaxq_s8(vminq_s8(vreinterpretq_s8_u8(codes), vdupq_n_s8(7)), vdupq_n_s8(-8));
}

/* Sixteen codes to eight bytes. A pair of bytes is a little-endian word: its second code moves beside the first. */
V16_FN uint8x8_t pack_nibbles(b16 codes) {
    const uint16x8_t words = vreinterpretq_u16_s8(clamped(codes));
    const uint16x8_t even = vandq_u16(words, vdupq_n_u16(0x000f));
    return vmovn_u16(vorrq_u16(even, vandq_u16(vshrq_n_u16(words, 4), vdupq_n_u16(0x00f0))));
}

V16_FN void store_codes(const int bits, uint8_t *codes, size_t i, v16 ratios) {
    if (bits == 8) b16_store(codes + i, v16_to_i8(ratios));
    else vst1_u8(codes + i / 2, pack_nibbles(v16_to_i8(ratios)));
}

V16_FN void store_pairs(const int bits, uint8_t *codes, size_t i, v16 first, v16 second) {
    store_codes(bits, codes, i, first);
    store_codes(bits, codes, i + V16_LANES, second);
}

/* The shifts to the left and back extend the sign. */
V16_FN b16 load_nibbles(const uint8_t *codes) {
    const int8x8_t packed = vreinterpret_s8_u8(vld1_u8(codes));
    const int8x8_t even = vshr_n_s8(vshl_n_s8(packed, 4), 4), odd = vshr_n_s8(packed, 4);
    return vreinterpretq_u8_s8(vcombine_s8(vzip1_s8(even, odd), vzip2_s8(even, odd)));
}

#else

/* Thirty-two codes between -8 and 7, one a byte, to sixteen bytes. */
V16_FN b16 pack_nibbles(h16 codes) {
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(0x000f));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi16(0x00f0));
    const __m256i words = _mm256_or_si256(even, odd);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), _MM_SHUFFLE(3, 1, 2, 0));
    return _mm256_castsi256_si128(bytes);
}

/* Of sixteen codes in eight bytes, each in a byte, sign extended. */
V16_FN b16 load_nibbles(const uint8_t *codes) {
    const b16 packed = _mm_loadl_epi64((const __m128i *)codes);
    const __m128i words = _mm_cvtepu8_epi16(packed);
    const __m128i even = _mm_and_si128(words, _mm_set1_epi16(0x000f));
    const __m128i odd = _mm_and_si128(_mm_slli_epi16(words, 4), _mm_set1_epi16(0x0f00));
    const __m128i sign = _mm_set1_epi8(8);
    return _mm_sub_epi8(_mm_xor_si128(_mm_or_si128(even, odd), sign), sign);
}

V16_FN h16 clamp_nibbles(h16 codes) {
    return _mm256_max_epi8(_mm256_min_epi8(codes, _mm256_set1_epi8(7)), _mm256_set1_epi8(-8));
}

V16_FN void store_codes(const int bits, uint8_t *codes, size_t i, v16 ratios) {
    const b16 code = v16_to_i8(ratios);
    if (bits == 8) b16_store(codes + i, code);
    else _mm_storel_epi64((__m128i *)(codes + i / 2), pack_nibbles(clamp_nibbles(_mm256_castsi128_si256(code))));
}

V16_FN void store_pairs(const int bits, uint8_t *codes, size_t i, v16 first, v16 second) {
    const h16 code = v16_pair_to_i8(first, second);
    if (bits == 8) h16_store(codes + i, code);
    else b16_store(codes + i / 2, pack_nibbles(clamp_nibbles(code)));
}

#endif

/* Codes before they are saturated to int8, which is the clamp of 8 bits. */
V16_FN v16 ratio_of(v16 x, v16 mid, v16 inverse, const bool asymmetric) {
    return v16_mul(asymmetric ? v16_sub(x, mid) : x, inverse); /* mid is 0 where nothing is subtracted */
}

V16_FN void encode_vec(const int bits, const struct zpp_quant_consts *c, const void *src, const zpp_dtype dtype,
                       const bool asymmetric, size_t elems, uint8_t *codes) {
    const v16 mid = v16_set1(c->mid), inverse = v16_set1(c->inverse);
    size_t i = 0;
    for (; i + 2 * V16_LANES <= elems; i += 2 * V16_LANES) {
        const v16 first = ratio_of(v16_load_as(src, i, dtype), mid, inverse, asymmetric);
        const v16 second = ratio_of(v16_load_as(src, i + V16_LANES, dtype), mid, inverse, asymmetric);
        store_pairs(bits, codes, i, first, second);
    }
    if (i + V16_LANES <= elems) {
        store_codes(bits, codes, i, ratio_of(v16_load_as(src, i, dtype), mid, inverse, asymmetric));
        i += V16_LANES;
    }
    zpp_quant_encode_tail(bits, c, src, dtype, i, elems, codes);
}

V16_FN v16 load_codes(const int bits, const uint8_t *codes, size_t i) {
    if (bits == 8) return v16_load_i8(codes + i);
    return v16_from_i8(load_nibbles(codes + i / 2));
}

V16_FN void decode_vec(const int bits, float scale, float mid, const uint8_t *codes, size_t elems, void *dst,
                       const zpp_dtype dtype, const enum zpp_quant_how how) {
    const v16 scales = v16_set1(scale), mids = v16_set1(mid);
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const v16 value = v16_add(v16_mul(load_codes(bits, codes, i), scales), mids);
        if (how == ZPP_QUANT_STREAM) v16_stream_as(dst, i, dtype, value);
        else if (how == ZPP_QUANT_STORE) v16_store_as(dst, i, dtype, value);
        else v16_store_as(dst, i, dtype, v16_add(v16_load_as(dst, i, dtype), value));
    }
    zpp_quant_decode_tail(bits, scale, mid, codes, i, elems, dst, dtype, how == ZPP_QUANT_ADD);
}

V16_FN void blocks_vec(const struct zpp_quant_spec *spec, const int bits, const bool asymmetric, const void *src,
                       const zpp_dtype dtype, size_t elems, uint8_t *codes, float *scales, float *mids) {
    const struct zpp_quant_spec fixed = { spec->block_elems, bits, asymmetric };
    zpp_quant_each_block(&fixed, src, dtype, elems, codes, scales, mids, span_vec, encode_vec);
}

#define EACH_DTYPE(call)                              \
    switch (dtype) {                                  \
    case ZPP_BF16: call(ZPP_BF16); break;             \
    case ZPP_F16: call(ZPP_F16); break;               \
    default: call(ZPP_F32); break;                    \
    }

static void blocks(const struct zpp_quant_spec *spec, const void *src, zpp_dtype dtype, size_t elems, uint8_t *codes,
                   float *scales, float *mids) {
#define CALL(dtype)                                                                                    \
    if (spec->bits == 8 && spec->asymmetric) blocks_vec(spec, 8, true, src, dtype, elems, codes, scales, mids); \
    else if (spec->bits == 8) blocks_vec(spec, 8, false, src, dtype, elems, codes, scales, mids);      \
    else if (spec->asymmetric) blocks_vec(spec, 4, true, src, dtype, elems, codes, scales, mids);      \
    else blocks_vec(spec, 4, false, src, dtype, elems, codes, scales, mids)
    EACH_DTYPE(CALL)
#undef CALL
}

static void span_of(const void *src, zpp_dtype dtype, size_t elems, struct zpp_quant_span *span) {
#define CALL(dtype) span_vec(src, dtype, true, elems, span)
    EACH_DTYPE(CALL)
#undef CALL
}

static void encode(int bits, const struct zpp_quant_consts *consts, const void *src, zpp_dtype dtype, size_t elems,
                   uint8_t *codes) {
#define CALL(dtype)                                                      \
    if (bits == 8) encode_vec(8, consts, src, dtype, true, elems, codes); \
    else encode_vec(4, consts, src, dtype, true, elems, codes)
    EACH_DTYPE(CALL)
#undef CALL
}

V16_FN void decode_how(const int bits, float scale, float mid, const uint8_t *codes, size_t elems, void *dst,
                       const zpp_dtype dtype, enum zpp_quant_how how) {
    if (how == ZPP_QUANT_STREAM) decode_vec(bits, scale, mid, codes, elems, dst, dtype, ZPP_QUANT_STREAM);
    else if (how == ZPP_QUANT_ADD) decode_vec(bits, scale, mid, codes, elems, dst, dtype, ZPP_QUANT_ADD);
    else decode_vec(bits, scale, mid, codes, elems, dst, dtype, ZPP_QUANT_STORE);
}

static void decode(int bits, float scale, float mid, const uint8_t *codes, size_t elems, void *dst, zpp_dtype dtype,
                   enum zpp_quant_how how) {
#define CALL(dtype)                                                                     \
    if (bits == 8) decode_how(8, scale, mid, codes, elems, dst, dtype, how);            \
    else decode_how(4, scale, mid, codes, elems, dst, dtype, how)
    EACH_DTYPE(CALL)
#undef CALL
}

#endif

const struct zpp_quant_kernels ZPP_ISA_NAME(zpp_quant) = { blocks, span_of, encode, decode };
