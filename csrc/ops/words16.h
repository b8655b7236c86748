/* SPDX-License-Identifier: Apache-2.0
 *
 * Sixteen 32-bit words beside vec16.h's sixteen floats, spelled once for AVX2 (two registers), AVX-512 (one)
 * and NEON (four).
 */
#ifndef ZPP_OPS_WORDS16_H
#define ZPP_OPS_WORDS16_H

#include "vec16.h"

#if ZPP_ISA_NEON
V16_FN h16 h16_set1(uint16_t value) { return (h16){ vdupq_n_u16(value), vdupq_n_u16(value) }; }
V16_FN h16 h16_and(h16 a, h16 b) { return (h16){ vandq_u16(a.low, b.low), vandq_u16(a.high, b.high) }; }
V16_FN h16 h16_or(h16 a, h16 b) { return (h16){ vorrq_u16(a.low, b.low), vorrq_u16(a.high, b.high) }; }
V16_FN h16 h16_equal(h16 a, h16 b) { return (h16){ vceqq_u16(a.low, b.low), vceqq_u16(a.high, b.high) }; }
V16_FN h16 h16_shl(h16 a, const int by) {
    return (h16){ vshlq_u16(a.low, vdupq_n_s16((int16_t)by)), vshlq_u16(a.high, vdupq_n_s16((int16_t)by)) };
}
V16_FN h16 h16_from_u8(b16 a) { return (h16){ vmovl_u8(vget_low_u8(a)), vmovl_high_u8(a) }; }
#else
V16_FN h16 h16_set1(uint16_t value) { return _mm256_set1_epi16((short)value); }
V16_FN h16 h16_and(h16 a, h16 b) { return _mm256_and_si256(a, b); }
V16_FN h16 h16_or(h16 a, h16 b) { return _mm256_or_si256(a, b); }
V16_FN h16 h16_equal(h16 a, h16 b) { return _mm256_cmpeq_epi16(a, b); } /* all ones where equal */
V16_FN h16 h16_shl(h16 a, const int by) { return _mm256_slli_epi16(a, by); }
V16_FN h16 h16_from_u8(b16 a) { return _mm256_cvtepu8_epi16(a); }
#endif

#if defined(__AVX512F__)

typedef __m512i w16;
V16_FN w16 w16_set1(uint32_t value) { return _mm512_set1_epi32((int)value); }
V16_FN w16 w16_places(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
V16_FN w16 w16_of(v16 a) { return _mm512_castps_si512(a); }
V16_FN v16 w16_float(w16 a) { return _mm512_castsi512_ps(a); } /* the same bits */
V16_FN w16 w16_round(v16 a) { return _mm512_cvtps_epi32(a); }  /* to nearest even */
V16_FN v16 w16_number(w16 a) { return _mm512_cvtepi32_ps(a); }
V16_FN w16 w16_add(w16 a, w16 b) { return _mm512_add_epi32(a, b); }
V16_FN w16 w16_sub(w16 a, w16 b) { return _mm512_sub_epi32(a, b); }
V16_FN w16 w16_mul(w16 a, w16 b) { return _mm512_mullo_epi32(a, b); }
V16_FN w16 w16_and(w16 a, w16 b) { return _mm512_and_si512(a, b); }
V16_FN w16 w16_or(w16 a, w16 b) { return _mm512_or_si512(a, b); }
V16_FN w16 w16_xor(w16 a, w16 b) { return _mm512_xor_si512(a, b); }
V16_FN w16 w16_min(w16 a, w16 b) { return _mm512_min_epi32(a, b); } /* signed */
V16_FN w16 w16_max(w16 a, w16 b) { return _mm512_max_epi32(a, b); }
V16_FN w16 w16_shl(w16 a, const unsigned int by) { return _mm512_slli_epi32(a, by); }
V16_FN w16 w16_shr(w16 a, const unsigned int by) { return _mm512_srli_epi32(a, by); }
/* `yes` where a > b as signed numbers, `no` elsewhere. */
V16_FN w16 w16_if_greater(w16 a, w16 b, w16 yes, w16 no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmpgt_epi32_mask(a, b), yes);
}
V16_FN w16 w16_from_u8(b16 a) { return _mm512_cvtepu8_epi32(a); }
V16_FN b16 w16_to_u8(w16 a) { return _mm512_cvtepi32_epi8(a); }     /* of 0 .. 255 */
V16_FN h16 w16_to_u16(w16 a) { return _mm512_cvtepi32_epi16(a); }   /* of 0 .. 65535 */

#elif !ZPP_ISA_NEON

typedef struct { __m256i lo, hi; } w16;
#define W16_BOTH(expression_lo, expression_hi) ((w16){(expression_lo), (expression_hi)})
V16_FN w16 w16_set1(uint32_t value) { return W16_BOTH(_mm256_set1_epi32((int)value), _mm256_set1_epi32((int)value)); }
V16_FN w16 w16_places(void) {
    return W16_BOTH(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
}
V16_FN w16 w16_of(v16 a) { return W16_BOTH(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)); }
V16_FN v16 w16_float(w16 a) { return V16_BOTH(_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)); }
V16_FN w16 w16_round(v16 a) { return W16_BOTH(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)); }
V16_FN v16 w16_number(w16 a) { return V16_BOTH(_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)); }
V16_FN w16 w16_add(w16 a, w16 b) { return W16_BOTH(_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)); }
V16_FN w16 w16_sub(w16 a, w16 b) { return W16_BOTH(_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)); }
V16_FN w16 w16_mul(w16 a, w16 b) { return W16_BOTH(_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)); }
V16_FN w16 w16_and(w16 a, w16 b) { return W16_BOTH(_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)); }
V16_FN w16 w16_or(w16 a, w16 b) { return W16_BOTH(_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)); }
V16_FN w16 w16_xor(w16 a, w16 b) { return W16_BOTH(_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)); }
V16_FN w16 w16_min(w16 a, w16 b) { return W16_BOTH(_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)); }
V16_FN w16 w16_max(w16 a, w16 b) { return W16_BOTH(_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)); }
V16_FN w16 w16_shl(w16 a, const unsigned int by) {
    return W16_BOTH(_mm256_slli_epi32(a.lo, (int)by), _mm256_slli_epi32(a.hi, (int)by));
}
V16_FN w16 w16_shr(w16 a, const unsigned int by) {
    return W16_BOTH(_mm256_srli_epi32(a.lo, (int)by), _mm256_srli_epi32(a.hi, (int)by));
}
V16_FN w16 w16_if_greater(w16 a, w16 b, w16 yes, w16 no) {
    return W16_BOTH(_mm256_blendv_epi8(no.lo, yes.lo, _mm256_cmpgt_epi32(a.lo, b.lo)),
                    _mm256_blendv_epi8(no.hi, yes.hi, _mm256_cmpgt_epi32(a.hi, b.hi)));
}
V16_FN w16 w16_from_u8(b16 a) {
    return W16_BOTH(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
V16_FN h16 w16_to_u16(w16 a) { return v16_unlace(_mm256_packus_epi32(a.lo, a.hi)); }
V16_FN b16 w16_to_u8(w16 a) {
    const __m256i words = w16_to_u16(a);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

#else

V16_EACH(w16, w16_set1, (uint32_t value), vdupq_n_u32(value))
V16_EACH(w16, w16_of, (v16 a), V16_BITS(a.at[k]))
V16_EACH(v16, w16_float, (w16 a), V16_FLOAT(a.at[k]))
V16_EACH(w16, w16_round, (v16 a), vreinterpretq_u32_s32(vcvtnq_s32_f32(a.at[k])))
V16_EACH(v16, w16_number, (w16 a), vcvtq_f32_s32(V16_SIGNED(a.at[k])))
V16_EACH(w16, w16_add, (w16 a, w16 b), vaddq_u32(a.at[k], b.at[k]))
V16_EACH(w16, w16_sub, (w16 a, w16 b), vsubq_u32(a.at[k], b.at[k]))
V16_EACH(w16, w16_mul, (w16 a, w16 b), vmulq_u32(a.at[k], b.at[k]))
V16_EACH(w16, w16_and, (w16 a, w16 b), vandq_u32(a.at[k], b.at[k]))
V16_EACH(w16, w16_or, (w16 a, w16 b), vorrq_u32(a.at[k], b.at[k]))
V16_EACH(w16, w16_xor, (w16 a, w16 b), veorq_u32(a.at[k], b.at[k]))
V16_EACH(w16, w16_min, (w16 a, w16 b), vreinterpretq_u32_s32(vminq_s32(V16_SIGNED(a.at[k]), V16_SIGNED(b.at[k]))))
V16_EACH(w16, w16_max, (w16 a, w16 b), vreinterpretq_u32_s32(vmaxq_s32(V16_SIGNED(a.at[k]), V16_SIGNED(b.at[k]))))
/* NEON shifts to the left by a register, to the right by a negative count. */
V16_EACH(w16, w16_shl, (w16 a, const unsigned int by), vshlq_u32(a.at[k], vdupq_n_s32((int)by)))
V16_EACH(w16, w16_shr, (w16 a, const unsigned int by), vshlq_u32(a.at[k], vdupq_n_s32(-(int)by)))
V16_EACH(w16, w16_if_greater, (w16 a, w16 b, w16 yes, w16 no),
         vbslq_u32(vcgtq_s32(V16_SIGNED(a.at[k]), V16_SIGNED(b.at[k])), yes.at[k], no.at[k]))
V16_FN w16 w16_from_u8(b16 a) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(a)), high = vmovl_high_u8(a);
    return (w16){ { vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)),
                    vmovl_high_u16(high) } };
}
V16_FN h16 w16_to_u16(w16 a) { return h16_of(a); }
V16_FN b16 w16_to_u8(w16 a) {
    const h16 words = h16_of(a);
    return vmovn_high_u16(vmovn_u16(words.low), words.high);
}

#endif

#endif
