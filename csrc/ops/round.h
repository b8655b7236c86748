/* SPDX-License-Identifier: Apache-2.0
 *
 * fp32 operations that round once each, in C and in CUDA, and a number's bits: what the shared bodies of ops are
 * written in; those with a 64 are the same in fp64. C files are built with -ffp-contract=off, CUDA spells the rounding
 * out, so that nothing is contracted into a fused multiply-add and no instruction set is more exact than another.
 */
#ifndef ZPP_OPS_ROUND_H
#define ZPP_OPS_ROUND_H

#ifdef __CUDACC__
#define ZPP_FN static __device__ __forceinline__
#define ZPP_ADD(a, b) __fadd_rn(a, b)
#define ZPP_SUB(a, b) __fsub_rn(a, b)
#define ZPP_MUL(a, b) __fmul_rn(a, b)
#define ZPP_DIV(a, b) __fdiv_rn(a, b)
#define ZPP_SQRT(a) __fsqrt_rn(a)
#define ZPP_ADD64(a, b) __dadd_rn(a, b)
#define ZPP_SUB64(a, b) __dsub_rn(a, b)
#define ZPP_MUL64(a, b) __dmul_rn(a, b)
#define ZPP_DIV64(a, b) __ddiv_rn(a, b)
#define ZPP_SQRT64(a) __dsqrt_rn(a)
#define ZPP_BITS(a) __float_as_uint(a)
#define ZPP_FLOAT(a) __uint_as_float(a)
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#define ZPP_FN static inline
#define ZPP_ADD(a, b) ((a) + (b))
#define ZPP_SUB(a, b) ((a) - (b))
#define ZPP_MUL(a, b) ((a) * (b))
#define ZPP_DIV(a, b) ((a) / (b))
#define ZPP_SQRT(a) sqrtf(a)
#define ZPP_ADD64(a, b) ((a) + (b))
#define ZPP_SUB64(a, b) ((a) - (b))
#define ZPP_MUL64(a, b) ((a) * (b))
#define ZPP_DIV64(a, b) ((a) / (b))
#define ZPP_SQRT64(a) sqrt(a)
#define ZPP_BITS(a) zpp_bits_of(a)
#define ZPP_FLOAT(a) zpp_float_of(a)

static inline uint32_t zpp_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float zpp_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
#endif

#endif
