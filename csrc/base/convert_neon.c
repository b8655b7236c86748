/* SPDX-License-Identifier: Apache-2.0
 *
 * Conversions of convert.h with NEON, eight elements at once, then one at a time. fp16 has instructions on every
 * aarch64 CPU. fp32 to bf16 has one (BFCVTN) from Armv8.6 on: it is used where the CPU has it, and gives the same bits.
 */
#include "convert.h"

#include <arm_neon.h>

#include "cpu.h"
#include "dtype.h"

enum { LANES = 8 };

/* Eight fp32 values, in two registers. */
typedef struct { float32x4_t low, high; } eight;

static inline eight from_bf16(uint16x8_t half) {
    return (eight){ vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16)),
                    vreinterpretq_f32_u32(vshll_high_n_u16(half, 16)) };
}

static inline eight from_f16(uint16x8_t half) {
    const float16x8_t floats = vreinterpretq_f16_u16(half);
    return (eight){ vcvt_f32_f16(vget_low_f16(floats)), vcvt_high_f32_f16(floats) };
}

static inline uint16x8_t to_f16(eight wide) {
    return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(wide.low), wide.high));
}

/* The instruction by its name, which assemblers know before compilers have its intrinsic. */
static inline uint16x8_t to_bf16_by_bfcvtn(eight wide) {
    uint16x8_t bits;
    __asm__(".arch_extension bf16\n\tbfcvtn %0.4h, %1.4s\n\tbfcvtn2 %0.8h, %2.4s"
            : "=&w"(bits)
            : "w"(wide.low), "w"(wide.high));
    return bits;
}

/* zpp_bf16_from_f32 on four lanes: add 0x7fff plus the lowest kept bit, and truncate; a NaN is truncated and made
 * quiet. */
static inline uint16x4_t bf16_lanes(float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000u));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet), 16);
}

static inline uint16x8_t to_bf16(eight wide) { return vcombine_u16(bf16_lanes(wide.low), bf16_lanes(wide.high)); }

/* Inlined with known functions. */
static inline void widen(float *dst, const uint16_t *src, size_t elems, eight (*lanes)(uint16x8_t),
                         float (*one)(uint16_t)) {
    size_t i = 0;
    for (; i + LANES <= elems; i += LANES) {
        const eight wide = lanes(vld1q_u16(src + i));
        vst1q_f32(dst + i, wide.low);
        vst1q_f32(dst + i + 4, wide.high);
    }
    for (; i < elems; ++i) dst[i] = one(src[i]);
}

static inline void narrow(uint16_t *dst, const float *src, size_t elems, uint16x8_t (*lanes)(eight),
                          uint16_t (*one)(float)) {
    size_t i = 0;
    for (; i + LANES <= elems; i += LANES)
        vst1q_u16(dst + i, lanes((eight){ vld1q_f32(src + i), vld1q_f32(src + i + 4) }));
    for (; i < elems; ++i) dst[i] = one(src[i]);
}

void zpp_convert_bf16_to_f32_neon(void *dst, const void *src, size_t elems) {
    widen(dst, src, elems, from_bf16, zpp_bf16_to_f32);
}

void zpp_convert_f16_to_f32_neon(void *dst, const void *src, size_t elems) {
    widen(dst, src, elems, from_f16, zpp_f16_to_f32);
}

void zpp_convert_f32_to_bf16_neon(void *dst, const void *src, size_t elems) {
    if (zpp_cpu_extras().bf16) narrow(dst, src, elems, to_bf16_by_bfcvtn, zpp_bf16_from_f32);
    else narrow(dst, src, elems, to_bf16, zpp_bf16_from_f32);
}

void zpp_convert_f32_to_f16_neon(void *dst, const void *src, size_t elems) {
    narrow(dst, src, elems, to_f16, zpp_f16_from_f32);
}
