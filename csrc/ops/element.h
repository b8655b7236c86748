/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of an F32, BF16 or F16 array in and out of fp32: for the scalar versions of ops, and the tails of the
 * vector ones.
 */
#ifndef ZPP_OPS_ELEMENT_H
#define ZPP_OPS_ELEMENT_H

#include "../base/dtype.h"

static inline float zpp_element_load(const void *from, zpp_dtype dtype, size_t i) {
    switch (dtype) {
    case ZPP_BF16: return zpp_bf16_to_f32(((const uint16_t *)from)[i]);
    case ZPP_F16: return zpp_f16_to_f32(((const uint16_t *)from)[i]);
    default: return ((const float *)from)[i];
    }
}

static inline void zpp_element_store(void *to, zpp_dtype dtype, size_t i, float value) {
    switch (dtype) {
    case ZPP_BF16: ((uint16_t *)to)[i] = zpp_bf16_from_f32(value); return;
    case ZPP_F16: ((uint16_t *)to)[i] = zpp_f16_from_f32(value); return;
    default: ((float *)to)[i] = value; return;
    }
}

/* True for the dtypes that the float ops take. */
static inline int zpp_element_is_float(zpp_dtype dtype) {
    return dtype == ZPP_F32 || dtype == ZPP_BF16 || dtype == ZPP_F16;
}

#endif
