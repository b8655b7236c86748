/* SPDX-License-Identifier: Apache-2.0
 *
 * The lanes, words, halves and bytes of vec16.h and words16.h with NEON, in four registers of 128 bits. What a function
 * means stands there; comments here name only what NEON does differently. Included by vec16.h alone.
 *
 * NEON's own minimum and maximum return NaN where one operand is NaN, and order -0 before 0; a comparison and a
 * selection give the second operand, as scalar code and AVX do. Stores past the cache are plain stores: these CPUs see
 * by themselves that whole lines are written, and do not read them first.
 */
#ifndef ZPP_OPS_VEC16_NEON_H
#define ZPP_OPS_VEC16_NEON_H

#include <arm_neon.h>
#include <math.h>

enum { V16_QUARTERS = 4 };
typedef struct { float32x4_t at[V16_QUARTERS]; } v16;
typedef struct { uint32x4_t at[V16_QUARTERS]; } w16;
typedef struct { uint16x8_t low, high; } h16;
typedef uint8x16_t b16;

/* A function whose lanes do not meet: `value` is that of quarter k, an expression of a.at[k] and so on. */
#define V16_EACH(type, name, arguments, value)                              \
    V16_FN type name arguments {                                            \
        type each;                                                          \
        for (int k = 0; k < V16_QUARTERS; ++k) each.at[k] = (value);        \
        return each;                                                        \
    }
#define V16_BITS(a) vreinterpretq_u32_f32(a)
#define V16_FLOAT(a) vreinterpretq_f32_u32(a)
#define V16_SIGNED(a) vreinterpretq_s32_u32(a)

V16_EACH(v16, v16_set1, (float value), vdupq_n_f32(value))
V16_EACH(v16, v16_load, (const float *from), vld1q_f32(from + 4 * k))
V16_FN void v16_store(float *to, v16 a) {
    for (int k = 0; k < V16_QUARTERS; ++k) vst1q_f32(to + 4 * k, a.at[k]);
}
V16_FN void v16_stream(float *to, v16 a) { v16_store(to, a); }
V16_EACH(v16, v16_add, (v16 a, v16 b), vaddq_f32(a.at[k], b.at[k]))
V16_EACH(v16, v16_sub, (v16 a, v16 b), vsubq_f32(a.at[k], b.at[k]))
V16_EACH(v16, v16_mul, (v16 a, v16 b), vmulq_f32(a.at[k], b.at[k]))
V16_EACH(v16, v16_div, (v16 a, v16 b), vdivq_f32(a.at[k], b.at[k]))
V16_EACH(v16, v16_min, (v16 a, v16 b), vbslq_f32(vcltq_f32(a.at[k], b.at[k]), a.at[k], b.at[k]))
V16_EACH(v16, v16_max, (v16 a, v16 b), vbslq_f32(vcgtq_f32(a.at[k], b.at[k]), a.at[k], b.at[k]))
V16_EACH(v16, v16_sqrt, (v16 a), vsqrtq_f32(a.at[k]))
V16_EACH(v16, v16_fma, (v16 a, v16 b, v16 c), vfmaq_f32(c.at[k], a.at[k], b.at[k]))
V16_EACH(v16, v16_zero_below, (v16 a, v16 x, v16 least),
         V16_FLOAT(vbicq_u32(V16_BITS(a.at[k]), vcltq_f32(x.at[k], least.at[k]))))
V16_EACH(v16, v16_zero_at_zero, (v16 a, v16 x), V16_FLOAT(vbicq_u32(V16_BITS(a.at[k]), vceqzq_f32(x.at[k]))))
V16_EACH(v16, v16_abs, (v16 a), vabsq_f32(a.at[k]))
V16_EACH(v16, v16_max_bits, (v16 a, v16 b),
         vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a.at[k]), vreinterpretq_s32_f32(b.at[k]))))
/* +a where the lane's bit is set; lanes test bits 4k to 4k + 3 of `positive`. */
V16_FN v16 v16_signed(v16 a, uint16_t positive) {
    static const uint32_t bits[4] = { 1, 2, 4, 8 };
    v16 each;
    for (int k = 0; k < V16_QUARTERS; ++k) {
        const uint32x4_t set = vtstq_u32(vdupq_n_u32((uint32_t)positive >> 4 * k), vld1q_u32(bits));
        each.at[k] = vbslq_f32(set, a.at[k], vnegq_f32(a.at[k]));
    }
    return each;
}
V16_EACH(v16, v16_step, (v16 a, v16 b),
         vbslq_f32(vorrq_u32(vcgtzq_f32(b.at[k]), vcltzq_f32(b.at[k])),
                   vbslq_f32(vdupq_n_u32(0x80000000u), b.at[k], a.at[k]), b.at[k]))
V16_EACH(v16, v16_maximum, (v16 a, v16 b),
         vbslq_f32(vornq_u32(vcgtq_f32(a.at[k], b.at[k]), vceqq_f32(a.at[k], a.at[k])), a.at[k], b.at[k]))

/* --- across lanes ------------------------------------------------------------------------------------------------- */

V16_FN float v16_greatest(v16 a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.at[0], a.at[1]), vmaxq_f32(a.at[2], a.at[3])));
}
V16_FN float v16_least(v16 a) {
    return vminvq_f32(vminq_f32(vminq_f32(a.at[0], a.at[1]), vminq_f32(a.at[2], a.at[3])));
}
V16_FN uint32_t v16_greatest_bits(v16 a) {
    const v16 most = v16_max_bits(a, (v16){ { a.at[2], a.at[3], a.at[0], a.at[1] } });
    const int32x4_t low = vreinterpretq_s32_f32(most.at[0]), high = vreinterpretq_s32_f32(most.at[1]);
    return (uint32_t)vmaxvq_s32(vmaxq_s32(low, high));
}
/* Lane l is what l + 8, l + 4, l + 2 or l + 1 was, counted around within the lanes that are left. */
V16_FN v16 v16_by_8(v16 a) { return (v16){ { a.at[2], a.at[3], a.at[0], a.at[1] } }; }
V16_FN v16 v16_by_4(v16 a) { return (v16){ { a.at[1], a.at[0], a.at[3], a.at[2] } }; }
V16_EACH(v16, v16_by_2, (v16 a), vextq_f32(a.at[k], a.at[k], 2))
V16_EACH(v16, v16_by_1, (v16 a), vrev64q_f32(a.at[k]))
V16_FN v16 v16_add_tree(v16 a) {
    a = v16_add(a, v16_by_8(a));
    a = v16_add(a, v16_by_4(a));
    a = v16_add(a, v16_by_2(a));
    return v16_add(a, v16_by_1(a));
}
V16_FN v16 v16_max_tree(v16 a) {
    a = v16_max(a, v16_by_8(a));
    a = v16_max(a, v16_by_4(a));
    a = v16_max(a, v16_by_2(a));
    return v16_max(a, v16_by_1(a));
}
V16_FN float v16_lane0(v16 a) { return vgetq_lane_f32(a.at[0], 0); }
V16_FN w16 w16_places(void) {
    static const uint32_t places[V16_LANES] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    w16 each;
    for (int k = 0; k < V16_QUARTERS; ++k) each.at[k] = vld1q_u32(places + 4 * k);
    return each;
}
V16_FN w16 v16_few(size_t count) { /* all ones in lanes below count */
    const uint32x4_t limit = vdupq_n_u32(count < V16_LANES ? (uint32_t)count : V16_LANES);
    w16 each = w16_places();
    for (int k = 0; k < V16_QUARTERS; ++k) each.at[k] = vcltq_u32(each.at[k], limit);
    return each;
}
V16_FN v16 v16_first(v16 a, size_t count) {
    const w16 few = v16_few(count);
    for (int k = 0; k < V16_QUARTERS; ++k) a.at[k] = V16_FLOAT(vandq_u32(V16_BITS(a.at[k]), few.at[k]));
    return a;
}
V16_FN v16 v16_load_first(const float *from, size_t count, v16 rest) {
    if (count >= V16_LANES) return v16_load(from);
    float all[V16_LANES]; /* NEON has no masked load */
    v16_store(all, rest);
    memcpy(all, from, count * sizeof *all);
    return v16_load(all);
}
V16_FN v16 v16_without(v16 a, size_t lane) {
    const w16 places = w16_places();
    for (int k = 0; k < V16_QUARTERS; ++k) {
        const uint32x4_t here = vceqq_u32(places.at[k], vdupq_n_u32((uint32_t)lane));
        a.at[k] = vbslq_f32(here, vdupq_n_f32(-INFINITY), a.at[k]);
    }
    return a;
}
/* Bit l of the result: lane l of `yes`, which is all ones or zero. */
V16_FN uint16_t w16_mask(w16 yes) {
    static const uint16_t bits[8] = { 1, 2, 4, 8, 16, 32, 64, 128 };
    const uint16x8_t low = vcombine_u16(vmovn_u32(yes.at[0]), vmovn_u32(yes.at[1]));
    const uint16x8_t high = vcombine_u16(vmovn_u32(yes.at[2]), vmovn_u32(yes.at[3]));
    const uint16x8_t weights = vld1q_u16(bits);
    return (uint16_t)(vaddvq_u16(vandq_u16(low, weights)) | vaddvq_u16(vandq_u16(high, weights)) << 8);
}
V16_EACH(w16, v16_equal_lanes, (v16 a, v16 b), vceqq_f32(a.at[k], b.at[k]))
V16_EACH(w16, v16_not_negative_lanes, (v16 a), vcgezq_f32(a.at[k]))
V16_FN uint16_t v16_equal(v16 a, v16 b) { return w16_mask(v16_equal_lanes(a, b)); }
V16_FN uint16_t v16_not_negative(v16 a) { return w16_mask(v16_not_negative_lanes(a)); }

/* --- 16-bit elements ---------------------------------------------------------------------------------------------- */

V16_FN h16 h16_load(const void *from) { return (h16){ vld1q_u16(from), vld1q_u16((const uint16_t *)from + 8) }; }
V16_FN void h16_store(void *to, h16 a) { vst1q_u16(to, a.low), vst1q_u16((uint16_t *)to + 8, a.high); }
V16_FN void h16_stream(void *to, h16 a) { h16_store(to, a); }
V16_FN h16 h16_of(w16 a) { /* of 0 .. 65535 */
    return (h16){ vmovn_high_u32(vmovn_u32(a.at[0]), a.at[1]), vmovn_high_u32(vmovn_u32(a.at[2]), a.at[3]) };
}
V16_FN v16 v16_from_bf16(h16 a) {
    return (v16){ { V16_FLOAT(vshll_n_u16(vget_low_u16(a.low), 16)), V16_FLOAT(vshll_high_n_u16(a.low, 16)),
                    V16_FLOAT(vshll_n_u16(vget_low_u16(a.high), 16)), V16_FLOAT(vshll_high_n_u16(a.high, 16)) } };
}
V16_FN v16 v16_from_f16(h16 a) {
    const float16x8_t low = vreinterpretq_f16_u16(a.low), high = vreinterpretq_f16_u16(a.high);
    return (v16){ { vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                    vcvt_high_f32_f16(high) } };
}
V16_FN h16 v16_to_f16(v16 a) {
    return (h16){ vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.at[0]), a.at[1])),
                  vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.at[2]), a.at[3])) };
}
/* Rounded by hand: BFCVTN would do, but not every CPU has it, and the optimizers are bound by memory. */
V16_FN uint32x4_t v4_bf16_lanes(float32x4_t a) {
    const uint32x4_t bits = V16_BITS(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000u));
    return vshrq_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
}
V16_EACH(w16, v16_bf16_lanes, (v16 a), v4_bf16_lanes(a.at[k]))
V16_FN h16 v16_to_bf16(v16 a) { return h16_of(v16_bf16_lanes(a)); }

/* --- 8-bit elements ----------------------------------------------------------------------------------------------- */

V16_FN b16 b16_load(const void *from) { return vld1q_u8(from); }
V16_FN void b16_store(void *to, b16 a) { vst1q_u8(to, a); }
V16_FN int16x8_t v8_to_i16(float32x4_t a, float32x4_t b) {
    return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(a)), vcvtnq_s32_f32(b));
}
V16_FN b16 v16_to_i8(v16 a) {
    const int16x8_t low = v8_to_i16(a.at[0], a.at[1]), high = v8_to_i16(a.at[2], a.at[3]);
    return vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(low), high));
}
V16_FN v16 v16_from_i8(b16 a) {
    const int8x16_t codes = vreinterpretq_s8_u8(a);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    return (v16){ { vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                    vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high)) } };
}
V16_FN v16 v16_load_i8(const void *from) { return v16_from_i8(b16_load(from)); }

#endif
