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
#include "../words16.h"
#include "fp8_body.h"

/* Positive floats are ordered as their bits, so integers decide which lanes are subnormal. */
V16_FN b16 encode_sixteen(const struct zpp_fp8_kind kind, v16 x) {
    const unsigned int drop = 23u - (unsigned int)kind.mantissa_bits;
    const v16 a = v16_min(v16_abs(x), v16_set1(kind.most)), shift = v16_set1(kind.shift);
    const w16 bits = w16_of(a), odd = w16_and(w16_shr(bits, drop), w16_set1(1));
    const w16 even = w16_add(w16_add(bits, w16_set1((1u << (drop - 1)) - 1)), odd);
    const w16 normal = w16_sub(w16_shr(even, drop), w16_set1((uint32_t)(127 - kind.bias) << kind.mantissa_bits));
    const w16 subnormal = w16_sub(w16_of(v16_add(a, shift)), w16_of(shift));
    const w16 sign = w16_and(w16_shr(w16_of(x), 24), w16_set1(0x80));
    const w16 least = w16_of(v16_set1(kind.least_normal));
    return w16_to_u8(w16_or(sign, w16_if_greater(least, bits, subnormal, normal)));
}

/* Of sixteen codes in words, the values: through fp16 (fp8_body.h). NaN of e4m3 becomes one of fp16. */
V16_FN v16 decode_sixteen(const enum zpp_fp8_format format, const uint8_t *codes) {
    const h16 words = h16_from_u8(b16_load(codes));
    if (format == ZPP_FP8_E5M2) return v16_from_f16(h16_shl(words, 8));
    const h16 seven = h16_set1(0x7f), magnitude = h16_and(words, seven);
    const h16 sign = h16_shl(h16_and(words, h16_set1(0x80)), 8);
    const h16 is_nan = h16_and(h16_equal(magnitude, seven), h16_set1(0x7e00));
    return v16_mul(v16_from_f16(h16_or(h16_or(sign, h16_shl(magnitude, 7)), is_nan)), v16_set1(256.0f));
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
        b16_store(codes + i, encode_sixteen(kind, v16_mul(v16_load_as(src, i, dtype), inverse)));
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
