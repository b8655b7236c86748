/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments in fewer bits, tile by tile: first in plain C, which is their meaning on CPU, then sixteen lanes at once.
 * Operation by operation the order of moments_body.h. The kind of a moment is a constant of each instance.
 */
#include "kernels.h"

#if ZPP_LANES == 1

#include "tail.h"

static void decode_bf16(const uint16_t *codes, float *values, size_t elems) {
    zpp_moments_decode_bf16_tail(codes, values, 0, elems);
}

static void encode_bf16(const float *values, uint16_t *codes, size_t elems, struct zpp_moments_dice dice) {
    zpp_moments_encode_bf16_tail(values, codes, 0, elems, &dice);
}

static void decode_int8(const uint8_t *codes, float scale, uint32_t k, float *values, size_t elems) {
    zpp_moments_decode_int8_tail(codes, scale, k, values, 0, elems);
}

static void encode_int8(const float *values, uint8_t *codes, float *scale, uint32_t k, size_t elems,
                        struct zpp_moments_dice dice) {
    float inverse;
    const int finite = zpp_moments_scale_of(zpp_moments_top_tail(values, 0, elems, 0), scale, &inverse);
    if (finite) zpp_moments_encode_int8_tail(values, codes, inverse, k, 0, elems, &dice);
    else memset(codes, 0, elems);
}

#else

#include "../words16.h"
#include "tail.h"

V16_FN w16 random_vec(uint64_t key, w16 index) {
    w16 x = w16_add(index, w16_set1((uint32_t)key));
    x = w16_xor(x, w16_shr(x, 16));
    x = w16_mul(x, w16_set1(0x7feb352du));
    x = w16_xor(x, w16_shr(x, 15));
    x = w16_add(x, w16_set1((uint32_t)(key >> 32)));
    return w16_shr(w16_mul(x, w16_set1(0x846ca68bu)), 16);
}

static void decode_bf16(const uint16_t *codes, float *values, size_t elems) {
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) v16_store(values + i, v16_load_as(codes, i, ZPP_BF16));
    zpp_moments_decode_bf16_tail(codes, values, i, elems);
}

/* To bf16: bits plus random ones, cut off; a NaN made quiet. */
V16_FN h16 to_bf16_vec(v16 value, w16 random) {
    const w16 bits = w16_of(value), magnitude = w16_and(bits, w16_set1(ZPP_MOMENTS_ABS));
    const w16 quiet = w16_or(bits, w16_set1(0x00400000u));
    const w16 moved = w16_add(bits, random);
    return w16_to_u16(w16_shr(w16_if_greater(magnitude, w16_set1(ZPP_MOMENTS_INFINITY), quiet, moved), 16));
}

static void encode_bf16(const float *values, uint16_t *codes, size_t elems, struct zpp_moments_dice dice) {
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const v16 value = v16_load(values + i);
        const w16 index = w16_add(w16_set1(dice.index + (uint32_t)i), w16_places());
        const h16 code = dice.nearest ? v16_to_bf16(value) : to_bf16_vec(value, random_vec(dice.key, index));
        h16_store(codes + i, code);
    }
    zpp_moments_encode_bf16_tail(values, codes, i, elems, &dice);
}

V16_FN v16 value_vec(w16 code, v16 scale, const uint32_t k) {
    const w16 n = k == 7 ? w16_and(code, w16_set1(127)) : code;
    const w16 bits = w16_of(w16_number(w16_add(n, w16_set1(1))));
    const w16 i = w16_sub(w16_shr(bits, 23), w16_set1(127));
    const v16 f = w16_float(w16_or(w16_and(bits, w16_set1(0x007fffffu)), w16_set1(0x3f800000u)));
    const w16 y = w16_of(v16_sub(v16_mul(v16_set1(7.0f), f), v16_set1(6.0f)));
    const w16 order = w16_sub(w16_add(i, w16_add(i, i)), w16_set1(3 * k));
    const w16 level = w16_add(y, w16_shl(order, 23)), zero = w16_set1(0);
    const v16 value = v16_mul(w16_float(w16_if_greater(n, zero, level, zero)), scale);
    if (k == 8) return value;
    return w16_float(w16_xor(w16_of(value), w16_shl(w16_and(code, w16_set1(128)), 24)));
}

V16_FN void decode_vec(const uint8_t *codes, float scale, const uint32_t k, float *values, size_t elems) {
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const w16 code = w16_from_u8(b16_load(codes + i));
        v16_store(values + i, value_vec(code, v16_set1(scale), k));
    }
    zpp_moments_decode_int8_tail(codes, scale, k, values, i, elems);
}

static void decode_int8(const uint8_t *codes, float scale, uint32_t k, float *values, size_t elems) {
    if (k == 7) decode_vec(codes, scale, 7, values, elems);
    else decode_vec(codes, scale, 8, values, elems);
}

static uint32_t top_of(const float *values, size_t elems) {
    v16 top[2] = { v16_set1(0.0f), v16_set1(0.0f) };
    size_t i = 0;
    for (; i + 2 * V16_LANES <= elems; i += 2 * V16_LANES) {
        top[0] = v16_max_bits(top[0], v16_abs(v16_load(values + i)));
        top[1] = v16_max_bits(top[1], v16_abs(v16_load(values + i + V16_LANES)));
    }
    return zpp_moments_top_tail(values, i, elems, v16_greatest_bits(v16_max_bits(top[0], top[1])));
}

V16_FN w16 code_vec(v16 x, v16 inverse, const uint32_t k, w16 random) {
    const w16 zero = w16_set1(0), magnitude = w16_and(w16_of(x), w16_set1(ZPP_MOMENTS_ABS));
    const v16 a = v16_min(v16_mul(w16_float(magnitude), inverse), v16_set1(1.0f));
    const w16 bits = w16_of(a);
    const w16 above = w16_sub(w16_shr(bits, 23), w16_set1(127 - 3 * k));
    const w16 near = w16_round(v16_mul(a, w16_float(w16_set1((127u + 16 + 3 * k - 3) << 23))));
    const w16 high = w16_max(above, w16_set1(3)); /* or lanes that are not used would be subnormal, and slow */
    const w16 i = w16_shr(w16_add(w16_add(high, w16_add(high, high)), w16_shl(high, 3)), 5); /* high * 11 / 32 */
    const w16 order = w16_sub(w16_add(i, w16_add(i, i)), w16_set1(3 * k));
    const v16 y = w16_float(w16_sub(bits, w16_shl(order, 23)));
    const v16 f = v16_mul(v16_add(y, v16_set1(6.0f)), v16_set1(ZPP_MOMENTS_SEVENTH));
    const v16 raised = v16_mul(f, w16_float(w16_shl(w16_add(i, w16_set1(127 + 16)), 23)));
    const w16 far = w16_sub(w16_round(raised), w16_set1(65536));
    const w16 fixed = w16_if_greater(above, w16_set1(2), far, near);
    w16 n = w16_min(w16_shr(w16_add(fixed, random), 16), w16_set1(k == 7 ? 127 : 255));
    if (k == 7) return w16_or(n, w16_shl(w16_shr(w16_of(x), 31), 7));
    const w16 not_zero = w16_if_greater(magnitude, zero, w16_set1(1), zero);
    return w16_if_greater(n, zero, n, not_zero);
}

V16_FN void encode_vec(const float *values, uint8_t *codes, float inverse, const uint32_t k, size_t elems,
                       const struct zpp_moments_dice *dice, const bool nearest) {
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const w16 index = w16_add(w16_set1(dice->index + (uint32_t)i), w16_places());
        const w16 random = nearest ? w16_set1(ZPP_MOMENTS_HALF) : random_vec(dice->key, index);
        b16_store(codes + i, w16_to_u8(code_vec(v16_load(values + i), v16_set1(inverse), k, random)));
    }
    zpp_moments_encode_int8_tail(values, codes, inverse, k, i, elems, dice);
}

static void encode_int8(const float *values, uint8_t *codes, float *scale, uint32_t k, size_t elems,
                        struct zpp_moments_dice dice) {
    float inverse;
    if (!zpp_moments_scale_of(top_of(values, elems), scale, &inverse)) {
        memset(codes, 0, elems);
    } else if (k == 7) {
        if (dice.nearest) encode_vec(values, codes, inverse, 7, elems, &dice, true);
        else encode_vec(values, codes, inverse, 7, elems, &dice, false);
    } else {
        if (dice.nearest) encode_vec(values, codes, inverse, 8, elems, &dice, true);
        else encode_vec(values, codes, inverse, 8, elems, &dice, false);
    }
}

#endif

const struct zpp_moments_kernels ZPP_ISA_NAME(zpp_moments) = { decode_bf16, encode_bf16, decode_int8, encode_int8 };
