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
#include <immintrin.h>

enum { LANES = 4 };

/* Low half: by x^(d+64), for the half that stands first; high half: by x^d. */
static __m128i by_512_bits(void) { return _mm_set_epi64x(0x01c6e41596, 0x0154442bd4); }
static __m128i by_128_bits(void) { return _mm_set_epi64x(0x00ccaa009e, 0x01751997d0); }

static inline __m128i moved(__m128i value, __m128i distance) {
    return _mm_xor_si128(_mm_clmulepi64_si128(value, distance, 0x00), _mm_clmulepi64_si128(value, distance, 0x11));
}

static inline __m128i next(const unsigned char **from, unsigned char **to) {
    const __m128i value = _mm_loadu_si128((const __m128i *)*from);
    *from += 16;
    if (*to) {
        _mm_storeu_si128((__m128i *)*to, value);
        *to += 16;
    }
    return value;
}

void zpp_crc32_fold(uint32_t state, void *to, const void *from, size_t bytes, unsigned char rest[16]) {
    assert(bytes >= 16 * LANES && bytes % 16 == 0);
    const unsigned char *source = from, *const end = source + bytes;
    unsigned char *target = to;
    __m128i lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = next(&source, &target);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)state));
    while (end - source >= 16 * LANES)
        for (int i = 0; i < LANES; ++i)
            lanes[i] = _mm_xor_si128(moved(lanes[i], by_512_bits()), next(&source, &target));
    __m128i all = lanes[0];
    for (int i = 1; i < LANES; ++i) all = _mm_xor_si128(moved(all, by_128_bits()), lanes[i]);
    while (source < end) all = _mm_xor_si128(moved(all, by_128_bits()), next(&source, &target));
    _mm_storeu_si128((__m128i *)rest, all);
}
