/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types, and rounding between fp32 and the 16-bit types: to nearest, ties to even; NaN stays NaN.
 */
#ifndef ZPP_BASE_DTYPE_H
#define ZPP_BASE_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum zpp_dtype {
    ZPP_F32, ZPP_BF16, ZPP_F16, ZPP_F64, ZPP_I8, ZPP_U8, ZPP_I16, ZPP_I32, ZPP_I64, ZPP_BOOL,
    ZPP_DTYPES
} zpp_dtype;

size_t zpp_dtype_bytes(zpp_dtype dtype);      /* 0 for a value outside of the list */
const char *zpp_dtype_name(zpp_dtype dtype);  /* "float32", "bfloat16", ... as torch spells them */

static inline float zpp_bf16_to_f32(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t zpp_bf16_from_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x0040u); /* quiet NaN */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float zpp_f16_to_f32(uint16_t bits);
uint16_t zpp_f16_from_f32(float value);

/* Convert `elems` elements without overlap, with the best instruction set of this CPU. The bits are the same on all. */
void zpp_convert(void *dst, zpp_dtype dst_dtype, const void *src, zpp_dtype src_dtype, size_t elems);

#endif
