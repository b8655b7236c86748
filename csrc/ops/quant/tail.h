/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation element by element: the scalar version, and the tails of the vector versions.
 */
#ifndef ZPP_OPS_QUANT_TAIL_H
#define ZPP_OPS_QUANT_TAIL_H

#include "../element.h"
#include "kernels.h"

static inline void zpp_quant_span_tail(const void *src, zpp_dtype dtype, size_t begin, size_t end,
                                       struct zpp_quant_span *span) {
    for (size_t i = begin; i < end; ++i) zpp_quant_widen(span, zpp_element_load(src, dtype, i));
}

/* begin is even. */
static inline void zpp_quant_encode_tail(int bits, const struct zpp_quant_consts *c, const void *src, zpp_dtype dtype,
                                         size_t begin, size_t end, uint8_t *codes) {
    for (size_t i = begin; i < end; ++i) {
        const int code = zpp_quant_code_of(zpp_element_load(src, dtype, i), c, bits);
        if (bits == 8) codes[i] = (uint8_t)code;
        else if (i % 2 == 0) codes[i / 2] = (uint8_t)(code & 15);
        else codes[i / 2] = (uint8_t)(codes[i / 2] | (code & 15) << 4);
    }
}

static inline void zpp_quant_decode_tail(int bits, float scale, float mid, const uint8_t *codes, size_t begin,
                                         size_t end, void *dst, zpp_dtype dtype, bool add) {
    for (size_t i = begin; i < end; ++i) {
        const int code = bits == 8 ? (int8_t)codes[i] : zpp_quant_nibble(codes, i);
        const float value = zpp_quant_value_of(code, scale, mid);
        zpp_element_store(dst, dtype, i, add ? zpp_element_load(dst, dtype, i) + value : value);
    }
}

/* The loop over blocks, for a version's own span and encode; inlined, so that they are constants of it. */
typedef void (*zpp_quant_span_fn)(const void *src, zpp_dtype dtype, bool asymmetric, size_t elems,
                                  struct zpp_quant_span *span);
typedef void (*zpp_quant_encode_fn)(int bits, const struct zpp_quant_consts *consts, const void *src, zpp_dtype dtype,
                                    bool asymmetric, size_t elems, uint8_t *codes);

/* Each block's span is taken before the block ahead of it is encoded: its reads, and the divisions that its scale
 * takes, go on behind the other's arithmetic. */
static inline __attribute__((always_inline)) void zpp_quant_each_block(
    const struct zpp_quant_spec *spec, const void *src, zpp_dtype dtype, size_t elems, uint8_t *codes, float *scales,
    float *mids, zpp_quant_span_fn span_of, zpp_quant_encode_fn encode) {
    const size_t element_bytes = dtype == ZPP_F32 ? 4 : 2;
    struct zpp_quant_consts consts, next = { 0 };
    int finite = 0, next_finite = 0;
    for (size_t at = 0, length = 0, block = 0; at < elems || length;) {
        const size_t begin = at - length; /* of the block to encode, `length` elements; 0 the first time */
        const size_t ahead = elems - at < spec->block_elems ? elems - at : spec->block_elems;
        consts = next, finite = next_finite;
        if (ahead) {
            struct zpp_quant_span span = ZPP_QUANT_EMPTY_SPAN;
            span_of((const char *)src + at * element_bytes, dtype, spec->asymmetric, ahead, &span);
            next_finite = zpp_quant_consts_of(&span, spec->bits, spec->asymmetric, &next);
            scales[block] = next.scale;
            if (spec->asymmetric) mids[block] = next.mid;
            ++block;
        }
        if (length) {
            uint8_t *to = codes + zpp_quant_code_bytes(spec, begin);
            const void *from = (const char *)src + begin * element_bytes;
            if (finite) encode(spec->bits, &consts, from, dtype, spec->asymmetric, length, to);
            else memset(to, 0, zpp_quant_code_bytes(spec, length));
        }
        at += ahead, length = ahead;
    }
}

#endif
