/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of block quantisation, stated once for the scalar version, the tails of the vector versions and the
 * CUDA kernels. Every operation rounds once, in the order written here.
 */
#ifndef ZPP_OPS_QUANT_BODY_H
#define ZPP_OPS_QUANT_BODY_H

#include <stdint.h>

#include "../round.h"

/* What a block's scale is made of. */
struct zpp_quant_span {
    uint32_t top_bits; /* greatest |x|, as bits: greater than any number if one is NaN */
    float low, high;   /* asymmetric only; of no meaning where top_bits is not below ZPP_QUANT_TOO_BIG */
};
#define ZPP_QUANT_TOO_BIG 0x7f000000u /* 2^127: from here on a sum or difference may overflow */
#define ZPP_QUANT_EMPTY_SPAN {0, ZPP_FLOAT(0x7f800000u), ZPP_FLOAT(0xff800000u)}

struct zpp_quant_consts {
    float scale, mid, inverse;
};

ZPP_FN void zpp_quant_widen(struct zpp_quant_span *span, float x) {
    const uint32_t magnitude = ZPP_BITS(x) & 0x7fffffffu;
    if (magnitude > span->top_bits) span->top_bits = magnitude;
    if (x < span->low) span->low = x;
    if (x > span->high) span->high = x;
}

/* 1, or 0 for a block that is not finite: its codes are 0. */
ZPP_FN int zpp_quant_consts_of(const struct zpp_quant_span *span, int bits, int asymmetric,
                               struct zpp_quant_consts *out) {
    const float smallest = ZPP_FLOAT(0x00800000u); /* 2^-126 */
    out->mid = 0.0f;
    if (span->top_bits >= ZPP_QUANT_TOO_BIG) {
        out->scale = ZPP_FLOAT(0x7fc00000u);
        out->inverse = 0.0f;
        return 0;
    }
    float half = ZPP_FLOAT(span->top_bits);
    if (asymmetric) {
        const float low = ZPP_MUL(0.5f, span->low), high = ZPP_MUL(0.5f, span->high);
        half = ZPP_SUB(high, low);
        out->mid = ZPP_ADD(ZPP_ADD(high, low), 0.0f); /* + 0: minus zero, which depends on order, becomes zero */
    }
    const float levels = (bits == 8 ? 127.0f : 7.0f) + (asymmetric ? 0.5f : 0.0f);
    const float scale = ZPP_DIV(half, levels);
    out->scale = scale < smallest ? smallest : scale;
    out->inverse = ZPP_DIV(1.0f, out->scale);
    return 1;
}

/* The code of one element of a finite block, between -128 and 127 or -8 and 7. */
ZPP_FN int zpp_quant_code_of(float x, const struct zpp_quant_consts *c, int bits) {
    const float least = bits == 8 ? -128.0f : -8.0f, greatest = bits == 8 ? 127.0f : 7.0f;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, to nearest even */
    float ratio = ZPP_MUL(ZPP_SUB(x, c->mid), c->inverse);
    if (ratio < least) ratio = least;
    if (ratio > greatest) ratio = greatest;
    return (int)ZPP_SUB(ZPP_ADD(ratio, magic), magic);
}

ZPP_FN float zpp_quant_value_of(int code, float scale, float mid) {
    return ZPP_ADD(ZPP_MUL((float)code, scale), mid);
}

/* Nibble i of packed codes, sign extended. */
ZPP_FN int zpp_quant_nibble(const uint8_t *codes, size_t i) {
    const int nibble = codes[i / 2] >> (i % 2 ? 4 : 0) & 15;
    return (nibble ^ 8) - 8;
}

#endif
