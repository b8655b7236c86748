/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32 by carry-less multiplication (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ",
 * Intel 2009).
 *
 * The bytes are one polynomial over GF(2), of which the remainder modulo P is wanted. 16 bytes that stand d bits before
 * others may be replaced: their two halves, multiplied by (x^(d+64) mod P) and (x^d mod P), are added to the 16 bytes d
 * bits on, and the remainder stays. Four such accumulators run side by side (d = 512), then become one (d = 128). The
 * last 16 bytes have the same remainder as all bytes; the caller finishes them by tables.
 *
 * Bits are reflected in CRC-32: the lowest bit is the highest power, which makes the product of two 64-bit halves one
 * bit short. So a constant for the distance d is (x^(d-32) mod P), reflected in 32 bits, shifted by one.
 */
#include "crc32.h"

#include <assert.h>
#include <string.h>

#include "cpu.h"

enum { LANES = 4 };

#if ZPP_CPU_X86
#include <immintrin.h>
typedef __m128i sixteen;
static inline sixteen load(const void *from) { return _mm_loadu_si128((const __m128i *)from); }
static inline void store(void *to, sixteen value) { _mm_storeu_si128((__m128i *)to, value); }
static inline sixteen pair(uint64_t low, uint64_t high) { return _mm_set_epi64x((long long)high, (long long)low); }
static inline sixteen sum_of(sixteen a, sixteen b) { return _mm_xor_si128(a, b); }
static inline sixteen product_low(sixteen a, sixteen b) { return _mm_clmulepi64_si128(a, b, 0x00); }
static inline sixteen product_high(sixteen a, sixteen b) { return _mm_clmulepi64_si128(a, b, 0x11); }
#else
#include <arm_acle.h>
#include <arm_neon.h>
typedef uint64x2_t sixteen;
static inline sixteen load(const void *from) { return vreinterpretq_u64_u8(vld1q_u8(from)); }
static inline void store(void *to, sixteen value) { vst1q_u8(to, vreinterpretq_u8_u64(value)); }
static inline sixteen pair(uint64_t low, uint64_t high) { return vcombine_u64(vcreate_u64(low), vcreate_u64(high)); }
static inline sixteen sum_of(sixteen a, sixteen b) { return veorq_u64(a, b); }
static inline sixteen product_low(sixteen a, sixteen b) {
    const poly64_t left = (poly64_t)vgetq_lane_u64(a, 0), right = (poly64_t)vgetq_lane_u64(b, 0);
    return vreinterpretq_u64_p128(vmull_p64(left, right));
}
static inline sixteen product_high(sixteen a, sixteen b) {
    return vreinterpretq_u64_p128(vmull_high_p64(vreinterpretq_p64_u64(a), vreinterpretq_p64_u64(b)));
}

uint32_t zpp_crc32_by_words(uint32_t state, void *to, const void *from, size_t bytes) {
    const unsigned char *at = from;
    if (to && bytes) memcpy(to, from, bytes);
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        state = __crc32d(state, word);
    }
    for (; bytes; --bytes) state = __crc32b(state, *at++);
    return state;
}
#endif

/* Low half: by x^(d+64), for the half that stands first; high half: by x^d. */
static sixteen by_512_bits(void) { return pair(0x0154442bd4, 0x01c6e41596); }
static sixteen by_128_bits(void) { return pair(0x01751997d0, 0x00ccaa009e); }

static inline sixteen moved(sixteen value, sixteen distance) {
    return sum_of(product_low(value, distance), product_high(value, distance));
}

static inline sixteen next(const unsigned char **from, unsigned char **to) {
    const sixteen value = load(*from);
    *from += 16;
    if (*to) {
        store(*to, value);
        *to += 16;
    }
    return value;
}

void zpp_crc32_fold(uint32_t state, void *to, const void *from, size_t bytes, unsigned char rest[16]) {
    assert(bytes >= 16 * LANES && bytes % 16 == 0);
    const unsigned char *source = from, *const end = source + bytes;
    unsigned char *target = to;
    sixteen lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = next(&source, &target);
    lanes[0] = sum_of(lanes[0], pair(state, 0));
    while (end - source >= 16 * LANES)
        for (int i = 0; i < LANES; ++i)
            lanes[i] = sum_of(moved(lanes[i], by_512_bits()), next(&source, &target));
    sixteen all = lanes[0];
    for (int i = 1; i < LANES; ++i) all = sum_of(moved(all, by_128_bits()), lanes[i]);
    while (source < end) all = sum_of(moved(all, by_128_bits()), next(&source, &target));
    store(rest, all);
}
