/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of 8-bit floats, one element: stated once for the scalar version, the tails of the vector ones, which
 * repeat it operation by operation, and the CUDA kernels.
 */
#ifndef ZPP_OPS_QUANT_FP8_BODY_H
#define ZPP_OPS_QUANT_FP8_BODY_H

#include <math.h>
#include <stdint.h>

#include "../round.h"

#ifdef __CUDACC__
#define FP8_HALF(bits) __half2float(__ushort_as_half(bits))
#else
#include "../../base/dtype.h"
#define FP8_HALF(bits) zpp_f16_to_f32(bits)
#endif

enum zpp_fp8_format { ZPP_FP8_E4M3, ZPP_FP8_E5M2 };

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

ZPP_FN uint8_t zpp_fp8_encode(const struct zpp_fp8_kind kind, float x) {
    const float a = fabsf(x) < kind.most ? fabsf(x) : kind.most; /* x is finite: the caller sees to that */
    const uint32_t bits = ZPP_BITS(a);
    const int drop = 23 - kind.mantissa_bits;
    const uint32_t even = bits + (1u << (drop - 1)) - 1 + (bits >> drop & 1);
    const uint32_t normal = (even >> drop) - ((uint32_t)(127 - kind.bias) << kind.mantissa_bits);
    const uint32_t subnormal = ZPP_BITS(ZPP_ADD(a, kind.shift)) - ZPP_BITS(kind.shift);
    const uint32_t sign = ZPP_BITS(x) >> 24 & 0x80;
    return (uint8_t)(sign | (a < kind.least_normal ? subnormal : normal));
}

/* fp16 has room for both formats: e5m2 is its upper half, e4m3 lies 2^8 lower for the other bias. */
ZPP_FN float zpp_fp8_decode(int format, uint8_t code) {
    if (format == ZPP_FP8_E5M2) return FP8_HALF((uint16_t)(code << 8));
    if ((code & 0x7f) == 0x7f) return NAN;
    return ZPP_MUL(FP8_HALF((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7)), 256.0f);
}

struct zpp_fp8_consts {
    float scale, inverse;
};
/* From the bits of the greatest magnitude; inverse 0 for a block that is not finite: its codes are 0. */
ZPP_FN struct zpp_fp8_consts zpp_fp8_consts_of(const struct zpp_fp8_kind kind, uint32_t top_bits) {
    struct zpp_fp8_consts consts = { NAN, 0.0f };
    if (top_bits >= 0x7f800000u) return consts;
    const float scale = ZPP_DIV(ZPP_FLOAT(top_bits), kind.most);
    consts.scale = scale > 0x1p-126f ? scale : 0x1p-126f;
    consts.inverse = ZPP_DIV(1.0f, consts.scale);
    return consts;
}

#endif
