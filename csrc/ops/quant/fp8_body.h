/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of 8-bit floats, one element: stated once for the scalar version and the tails of the vector ones,
 * which repeat it operation by operation.
 */
#ifndef ZPP_OPS_QUANT_FP8_BODY_H
#define ZPP_OPS_QUANT_FP8_BODY_H

#include <math.h>
#include <string.h>

#include "../round.h"
#include "fp8.h"

/* A format, as constants where this is inlined. */
struct zpp_fp8_kind {
    int mantissa_bits, bias;
    float most;         /* greatest finite number */
    float least_normal; /* 2^(1 - bias) */
    float shift;        /* its ulp is the distance of subnormals: added, it rounds them and counts them */
};
#define ZPP_FP8_KIND(format)                                                                              \
    ((format) == ZPP_FP8_E4M3 ? (struct zpp_fp8_kind){ 3, 7, 448.0f, 0x1p-6f, 0x1p14f }                   \
                              : (struct zpp_fp8_kind){ 2, 15, 57344.0f, 0x1p-14f, 0x1p7f })

static inline uint32_t zpp_fp8_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint8_t zpp_fp8_encode(const struct zpp_fp8_kind kind, float x) {
    const float a = fabsf(x) < kind.most ? fabsf(x) : kind.most; /* x is finite: the caller sees to that */
    const uint32_t bits = zpp_fp8_bits_of(a);
    const int drop = 23 - kind.mantissa_bits;
    const uint32_t even = bits + (1u << (drop - 1)) - 1 + (bits >> drop & 1);
    const uint32_t normal = (even >> drop) - ((uint32_t)(127 - kind.bias) << kind.mantissa_bits);
    const uint32_t subnormal = zpp_fp8_bits_of(ZPP_ADD(a, kind.shift)) - zpp_fp8_bits_of(kind.shift);
    const uint32_t sign = zpp_fp8_bits_of(x) >> 24 & 0x80;
    return (uint8_t)(sign | (a < kind.least_normal ? subnormal : normal));
}

/* fp16 has room for both formats: e5m2 is its upper half, e4m3 lies 2^8 lower for the other bias. */
static inline float zpp_fp8_decode(enum zpp_fp8_format format, uint8_t code) {
    if (format == ZPP_FP8_E5M2) return zpp_f16_to_f32((uint16_t)(code << 8));
    if ((code & 0x7f) == 0x7f) return NAN;
    return ZPP_MUL(zpp_f16_to_f32((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7)), 256.0f);
}

struct zpp_fp8_consts {
    float scale, inverse;
};
/* From the bits of the greatest magnitude; inverse 0 for a block that is not finite: its codes are 0. */
static inline struct zpp_fp8_consts zpp_fp8_consts_of(const struct zpp_fp8_kind kind, uint32_t top_bits) {
    if (top_bits >= 0x7f800000u) return (struct zpp_fp8_consts){ NAN, 0.0f };
    float top;
    memcpy(&top, &top_bits, sizeof top);
    const float scale = ZPP_DIV(top, kind.most);
    const float within = scale > 0x1p-126f ? scale : 0x1p-126f;
    return (struct zpp_fp8_consts){ within, ZPP_DIV(1.0f, within) };
}

#endif
