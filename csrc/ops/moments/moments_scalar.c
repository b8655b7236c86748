/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments in fewer bits in plain C: the meaning of the codes on CPU. moments_body.h has the arithmetic.
 */
#include "kernels.h"

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

const struct zpp_moments_kernels zpp_moments_scalar = { decode_bf16, encode_bf16, decode_int8, encode_int8 };
