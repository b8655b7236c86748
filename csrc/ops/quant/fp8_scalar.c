/* SPDX-License-Identifier: Apache-2.0
 *
 * 8-bit floats in plain C: their meaning on CPU.
 */
#include "fp8_kernels.h"

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

const struct zpp_fp8_kernels zpp_fp8_scalar = { encode, decode };
