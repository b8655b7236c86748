/* SPDX-License-Identifier: Apache-2.0
 *
 * 8-bit floats: first in plain C, which is their meaning on CPU, then sixteen lanes at once.
 * Operation by operation the order of fp8_body.h.
 */
#include "fp8_kernels.h"

#if ZPP_LANES == 1

#include "../element.h"
#include "fp8_body.h"

static float encode(enum zpp_fp8_format format, const void *src, zpp_dtype dtype, size_t elems, uint8_t *codes) {
    const struct zpp_fp8_kind kind = ZPP_FP8_KIND(format);
    uint32_t top_bits = 0;
    for (size_t i = 0; i < elems; ++i) {
        const uint32_t bits = ZPP_BITS(zpp_element_load(src, dtype, i)) & 0x7fffffffu;
        if (bits > top_bits) top_bits = bits;
    }
    const struct zpp_fp8_consts consts = zpp_fp8_consts_of(kind, top_bits);
    for (size_t i = 0; i < elems; ++i) {
        const float x = zpp_element_load(src, dtype, i);
        codes[i] = consts.inverse == 0.0f ? 0 : zpp_fp8_encode(kind, ZPP_MUL(x, consts.inverse));
    }
    return consts.scale;
}

static void decode(enum zpp_fp8_format format, float scale, const uint8_t *codes, size_t elems, void *dst,
                   zpp_dtype dtype, bool accumulate) {
    for (size_t i = 0; i < elems; ++i) {
        const float value = ZPP_MUL(zpp_fp8_decode(format, codes[i]), scale);
        zpp_element_store(dst, dtype, i, accumulate ? ZPP_ADD(zpp_element_load(dst, dtype, i), value) : value);
    }
}

#else

#include "../element.h"
#include "../vec16.h"
#include "fp8_body.h"

/* Integers as the bits of v16. */
#if defined(__AVX512F__)
#define BITS_OF(a) _mm512_castps_si512(a)
V16_FN __m128i encode_sixteen(const struct zpp_fp8_kind kind, v16 x) {
    const int drop = 23 - kind.mantissa_bits;
    const v16 a = v16_min(v16_abs(x), v16_set1(kind.most));
    const __m512i bits = BITS_OF(a), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, (unsigned)drop), one);
    const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32((1 << (drop - 1)) - 1)), odd);
    const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(even, (unsigned)drop),
                                            _mm512_set1_epi32((127 - kind.bias) << kind.mantissa_bits));
    const __m512i subnormal = _mm512_sub_epi32(BITS_OF(v16_add(a, v16_set1(kind.shift))),
                                               BITS_OF(v16_set1(kind.shift)));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(BITS_OF(x), 24), _mm512_set1_epi32(0x80));
    const __mmask16 is_normal = _mm512_cmp_ps_mask(a, v16_set1(kind.least_normal), _CMP_GE_OQ);
    return _mm512_cvtepi32_epi8(_mm512_or_si512(sign, _mm512_mask_blend_epi32(is_normal, subnormal, normal)));
}
#else
#define BITS_OF(a) _mm256_castps_si256(a)
V16_FN __m256i encode_eight(const struct zpp_fp8_kind kind, __m256 x) { /* a code in each of eight 32-bit lanes */
    const int drop = 23 - kind.mantissa_bits;
    const __m256 magnitude = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX)));
    const __m256 a = _mm256_min_ps(magnitude, _mm256_set1_ps(kind.most)), shift = _mm256_set1_ps(kind.shift);
    const __m256i bits = BITS_OF(a), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, drop), one);
    const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32((1 << (drop - 1)) - 1)), odd);
    const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(even, drop),
                                            _mm256_set1_epi32((127 - kind.bias) << kind.mantissa_bits));
    const __m256i subnormal = _mm256_sub_epi32(BITS_OF(_mm256_add_ps(a, shift)), BITS_OF(shift));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(BITS_OF(x), 24), _mm256_set1_epi32(0x80));
    const __m256 is_normal = _mm256_cmp_ps(a, _mm256_set1_ps(kind.least_normal), _CMP_GE_OQ);
    return _mm256_or_si256(sign, _mm256_blendv_epi8(subnormal, normal, BITS_OF(is_normal)));
}
V16_FN __m128i encode_sixteen(const struct zpp_fp8_kind kind, v16 x) {
    const __m256i words = v16_unlace(_mm256_packus_epi32(encode_eight(kind, x.lo), encode_eight(kind, x.hi)));
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
#endif

/* Of sixteen codes in words, the values: through fp16 (fp8_body.h). NaN of e4m3 becomes one of fp16. */
V16_FN v16 decode_sixteen(const enum zpp_fp8_format format, const uint8_t *codes) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
    if (format == ZPP_FP8_E5M2) return v16_from_f16(_mm256_slli_epi16(words, 8));
    const __m256i seven = _mm256_set1_epi16(0x7f), magnitude = _mm256_and_si256(words, seven);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8);
    const __m256i is_nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, seven), _mm256_set1_epi16(0x7e00));
    const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)), is_nan);
    return v16_mul(v16_from_f16(half), v16_set1(256.0f));
}

V16_FN uint32_t top_bits_of(const void *src, const zpp_dtype dtype, size_t elems) {
    v16 top = v16_set1(0.0f);
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) top = v16_max_bits(top, v16_abs(v16_load_as(src, i, dtype)));
    uint32_t most = v16_greatest_bits(top);
    for (; i < elems; ++i) {
        const uint32_t bits = ZPP_BITS(zpp_element_load(src, dtype, i)) & 0x7fffffffu;
        if (bits > most) most = bits;
    }
    return most;
}

V16_FN float encode_as(const enum zpp_fp8_format format, const void *src, const zpp_dtype dtype, size_t elems,
                       uint8_t *codes) {
    const struct zpp_fp8_kind kind = ZPP_FP8_KIND(format);
    const struct zpp_fp8_consts consts = zpp_fp8_consts_of(kind, top_bits_of(src, dtype, elems));
    if (consts.inverse == 0.0f) {
        memset(codes, 0, elems);
        return consts.scale;
    }
    const v16 inverse = v16_set1(consts.inverse);
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        _mm_storeu_si128((__m128i *)(codes + i), encode_sixteen(kind, v16_mul(v16_load_as(src, i, dtype), inverse)));
    }
    for (; i < elems; ++i) codes[i] = zpp_fp8_encode(kind, ZPP_MUL(zpp_element_load(src, dtype, i), consts.inverse));
    return consts.scale;
}

V16_FN void decode_as(const enum zpp_fp8_format format, float scale, const uint8_t *codes, size_t elems, void *dst,
                      const zpp_dtype dtype, const bool accumulate) {
    const v16 by = v16_set1(scale);
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const v16 value = v16_mul(decode_sixteen(format, codes + i), by);
        v16_store_as(dst, i, dtype, accumulate ? v16_add(v16_load_as(dst, i, dtype), value) : value);
    }
    for (; i < elems; ++i) {
        const float value = ZPP_MUL(zpp_fp8_decode(format, codes[i]), scale);
        zpp_element_store(dst, dtype, i, accumulate ? ZPP_ADD(zpp_element_load(dst, dtype, i), value) : value);
    }
}

/* Dtypes as constants. */
#define EACH_DTYPE(dtype, call)       \
    switch (dtype) {                  \
    case ZPP_BF16: call(ZPP_BF16);    \
    case ZPP_F16: call(ZPP_F16);      \
    default: call(ZPP_F32);           \
    }

static float encode(enum zpp_fp8_format format, const void *src, zpp_dtype dtype, size_t elems, uint8_t *codes) {
#define ENCODE(dtype)                                                                         \
    return format == ZPP_FP8_E4M3 ? encode_as(ZPP_FP8_E4M3, src, dtype, elems, codes)         \
                                  : encode_as(ZPP_FP8_E5M2, src, dtype, elems, codes)
    EACH_DTYPE(dtype, ENCODE)
#undef ENCODE
}

V16_FN void decode_dtype(const enum zpp_fp8_format format, float scale, const uint8_t *codes, size_t elems, void *dst,
                         zpp_dtype dtype, bool accumulate) {
#define DECODE(dtype)                                                                         \
    if (accumulate) decode_as(format, scale, codes, elems, dst, dtype, true);                 \
    else decode_as(format, scale, codes, elems, dst, dtype, false);                           \
    break
    EACH_DTYPE(dtype, DECODE)
#undef DECODE
}

static void decode(enum zpp_fp8_format format, float scale, const uint8_t *codes, size_t elems, void *dst,
                   zpp_dtype dtype, bool accumulate) {
    if (format == ZPP_FP8_E4M3) decode_dtype(ZPP_FP8_E4M3, scale, codes, elems, dst, dtype, accumulate);
    else decode_dtype(ZPP_FP8_E5M2, scale, codes, elems, dst, dtype, accumulate);
}

#endif

const struct zpp_fp8_kernels ZPP_ISA_NAME(zpp_fp8) = { encode, decode };
