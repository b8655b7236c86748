/* SPDX-License-Identifier: Apache-2.0
 *
 * Dtypes of elements on CUDA, and one element in and out of fp32 there: element.h's counterpart, with the same bits.
 * They are numbered apart from zpp_dtype: device code includes nothing of csrc/base.
 */
#ifndef ZPP_OPS_ELEMENT_CUDA_H
#define ZPP_OPS_ELEMENT_CUDA_H

#include <stdint.h>

enum { ZPP_CUDA_NONE, ZPP_CUDA_F32, ZPP_CUDA_BF16, ZPP_CUDA_F16 };

#if defined(__CUDACC__) || defined(ZPP_ON_CPU)
static __device__ __forceinline__ float zpp_cuda_load(const void *from, int dtype, uint64_t i) {
    if (dtype == ZPP_CUDA_F32) return ((const float *)from)[i];
    const unsigned short bits = ((const unsigned short *)from)[i];
    if (dtype == ZPP_CUDA_BF16) return __uint_as_float((unsigned int)bits << 16);
    return __half2float(__ushort_as_half(bits));
}

static __device__ __forceinline__ unsigned short zpp_cuda_bf16_of(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x0040u);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Nothing for ZPP_CUDA_NONE. */
static __device__ __forceinline__ void zpp_cuda_store(void *to, int dtype, uint64_t i, float value) {
    if (dtype == ZPP_CUDA_F32) ((float *)to)[i] = value;
    if (dtype == ZPP_CUDA_BF16) ((unsigned short *)to)[i] = zpp_cuda_bf16_of(value);
    if (dtype == ZPP_CUDA_F16) ((unsigned short *)to)[i] = __half_as_ushort(__float2half_rn(value));
}
#else
#include "../base/dtype.h"
static inline uint8_t zpp_cuda_dtype_of(zpp_dtype dtype) {
    switch (dtype) {
    case ZPP_BF16: return ZPP_CUDA_BF16;
    case ZPP_F16: return ZPP_CUDA_F16;
    default: return ZPP_CUDA_F32;
    }
}
#endif

#endif
