/* SPDX-License-Identifier: Apache-2.0
 *
 * Conversions of arrays between fp32 and the 16-bit types, for dtype.c. Each pair has one function. Arrays do not
 * overlap and need no alignment. The bits are those of the scalar functions of dtype.h: rounding to nearest even, quiet
 * NaN, subnormals kept.
 */
#ifndef ZPP_BASE_CONVERT_H
#define ZPP_BASE_CONVERT_H

#include <stddef.h>
#include <stdint.h>

#define ZPP_CONVERT_DECLARE(isa)                                                        \
    void zpp_convert_bf16_to_f32_##isa(void *dst, const void *src, size_t elems);       \
    void zpp_convert_f32_to_bf16_##isa(void *dst, const void *src, size_t elems);       \
    void zpp_convert_f16_to_f32_##isa(void *dst, const void *src, size_t elems);        \
    void zpp_convert_f32_to_f16_##isa(void *dst, const void *src, size_t elems)

ZPP_CONVERT_DECLARE(avx2);
ZPP_CONVERT_DECLARE(neon);

#endif
