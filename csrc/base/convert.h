/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of dtype.c: conversions between fp32 and the 16-bit kinds over arrays, one function a pair and instruction
 * set. Arrays do not overlap and need no alignment. All versions give the same bits: to nearest even, NaN quiet,
 * subnormals kept.
 */
#ifndef ZPP_BASE_CONVERT_H
#define ZPP_BASE_CONVERT_H

#include <stddef.h>
#include <stdint.h>

void zpp_convert_bf16_to_f32_avx2(float *dst, const uint16_t *src, size_t elems);
void zpp_convert_f32_to_bf16_avx2(uint16_t *dst, const float *src, size_t elems);
void zpp_convert_f16_to_f32_avx2(float *dst, const uint16_t *src, size_t elems);
void zpp_convert_f32_to_f16_avx2(uint16_t *dst, const float *src, size_t elems);

#endif
