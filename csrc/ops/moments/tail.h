/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments in fewer bits element by element: the scalar version, and the ends of the vector versions.
 */
#ifndef ZPP_OPS_MOMENTS_TAIL_H
#define ZPP_OPS_MOMENTS_TAIL_H

#include "../../base/dtype.h"
#include "kernels.h"

static inline uint32_t zpp_moments_roll(const struct zpp_moments_dice *dice, size_t i) {
    return dice->nearest ? ZPP_MOMENTS_HALF : zpp_moments_random(dice->key, dice->index + (uint32_t)i);
}

static inline void zpp_moments_decode_bf16_tail(const uint16_t *codes, float *values, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) values[i] = zpp_moments_from_bf16(codes[i]);
}

static inline void zpp_moments_encode_bf16_tail(const float *values, uint16_t *codes, size_t begin, size_t end,
                                                const struct zpp_moments_dice *dice) {
    for (size_t i = begin; i < end; ++i) {
        codes[i] = dice->nearest ? zpp_bf16_from_f32(values[i])
                                 : zpp_moments_to_bf16(values[i], zpp_moments_roll(dice, i));
    }
}

static inline void zpp_moments_decode_int8_tail(const uint8_t *codes, float scale, uint32_t k, float *values,
                                                size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) values[i] = zpp_moments_value(codes[i], scale, k);
}

static inline uint32_t zpp_moments_top_tail(const float *values, size_t begin, size_t end, uint32_t top_bits) {
    for (size_t i = begin; i < end; ++i) {
        const uint32_t magnitude = ZPP_BITS(values[i]) & ZPP_MOMENTS_ABS;
        if (magnitude > top_bits) top_bits = magnitude;
    }
    return top_bits;
}

static inline void zpp_moments_encode_int8_tail(const float *values, uint8_t *codes, float inverse, uint32_t k,
                                                size_t begin, size_t end, const struct zpp_moments_dice *dice) {
    for (size_t i = begin; i < end; ++i) {
        codes[i] = (uint8_t)zpp_moments_code(values[i], inverse, k, zpp_moments_roll(dice, i));
    }
}

#endif
