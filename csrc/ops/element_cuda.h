/* SPDX-License-Identifier: Apache-2.0
 *
 * Dtypes of elements on CUDA, and one element in and out of fp32 there: element.h's counterpart, with the same bits.
 * They are numbered apart from zpp_dtype: device code includes nothing of csrc/base.
 */
#ifndef ZPP_OPS_ELEMENT_CUDA_H
#define ZPP_OPS_ELEMENT_CUDA_H

#include <stdint.h>

enum { ZPP_CUDA_NONE, ZPP_CUDA_F32, ZPP_CUDA_BF16, ZPP_CUDA_F16, ZPP_CUDA_F64 };
/* F64 is for kernels that say so; the functions below do not take it. */

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

/* 16 bytes of any array: one load on CUDA. */
struct zpp_cuda_word {
    uint32_t bits[4];
}
#ifdef __CUDACC__
__attribute__((aligned(16)))
#else
__attribute__((may_alias))
#endif
;

static __device__ __forceinline__ float zpp_cuda_half_value(uint32_t bits, int kind) {
    if (kind == ZPP_CUDA_BF16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half((unsigned short)bits));
}

static __device__ __forceinline__ unsigned short zpp_cuda_half_bits(float value, int kind) {
    return kind == ZPP_CUDA_BF16 ? zpp_cuda_bf16_of(value) : __half_as_ushort(__float2half_rn(value));
}

/* Elements [begin, begin + 8) of an array that is aligned to 16 bytes; begin is a multiple of 8. */
static __device__ __forceinline__ void zpp_cuda_load8(const void *from, int kind, uint64_t begin, float *out) {
    if (kind == ZPP_CUDA_F32) {
        const struct zpp_cuda_word *words = (const struct zpp_cuda_word *)((const float *)from + begin);
        const struct zpp_cuda_word low = words[0], high = words[1];
        for (int i = 0; i < 4; ++i) out[i] = __uint_as_float(low.bits[i]);
        for (int i = 0; i < 4; ++i) out[4 + i] = __uint_as_float(high.bits[i]);
        return;
    }
    const struct zpp_cuda_word word = *(const struct zpp_cuda_word *)((const unsigned short *)from + begin);
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = zpp_cuda_half_value(word.bits[i] & 0xffffu, kind);
        out[2 * i + 1] = zpp_cuda_half_value(word.bits[i] >> 16, kind);
    }
}

static __device__ __forceinline__ void zpp_cuda_store8(void *to, int kind, uint64_t begin, const float *value) {
    if (kind == ZPP_CUDA_F32) {
        struct zpp_cuda_word *words = (struct zpp_cuda_word *)((float *)to + begin), low, high;
        for (int i = 0; i < 4; ++i) low.bits[i] = __float_as_uint(value[i]);
        for (int i = 0; i < 4; ++i) high.bits[i] = __float_as_uint(value[4 + i]);
        words[0] = low, words[1] = high;
        return;
    }
    struct zpp_cuda_word word;
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = zpp_cuda_half_bits(value[2 * i], kind), high = zpp_cuda_half_bits(value[2 * i + 1], kind);
        word.bits[i] = low | high << 16;
    }
    *(struct zpp_cuda_word *)((unsigned short *)to + begin) = word;
}
#else
#include "../base/dtype.h"
static inline uint8_t zpp_cuda_dtype_of(zpp_dtype dtype) {
    switch (dtype) {
    case ZPP_BF16: return ZPP_CUDA_BF16;
    case ZPP_F16: return ZPP_CUDA_F16;
    case ZPP_F64: return ZPP_CUDA_F64;
    default: return ZPP_CUDA_F32;
    }
}
#endif

#endif
