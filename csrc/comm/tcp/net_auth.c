/* SPDX-License-Identifier: Apache-2.0
 *
 * SipHash-2-4, the keyed hash with which members of a group prove that they know a secret (Aumasson and Bernstein,
 * 2012: "SipHash: a fast short-input PRF"): a 128-bit key, a 64-bit answer. An attacker has one guess for each
 * connection.
 */
#include <string.h>

#include "net.h"

static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static void rounds(uint64_t v[4], int count) {
    while (count-- > 0) {
        v[0] += v[1];
        v[1] = rotate(v[1], 13) ^ v[0];
        v[0] = rotate(v[0], 32);
        v[2] += v[3];
        v[3] = rotate(v[3], 16) ^ v[2];
        v[0] += v[3];
        v[3] = rotate(v[3], 21) ^ v[0];
        v[2] += v[1];
        v[1] = rotate(v[1], 17) ^ v[2];
        v[2] = rotate(v[2], 32);
    }
}

static uint64_t little_endian(const uint8_t *at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) value |= (uint64_t)at[i] << 8 * i;
    return value;
}

uint64_t zpp_net_mac(const uint8_t key[ZPP_NET_SECRET_BYTES], const void *data, size_t bytes) {
    const uint64_t k0 = little_endian(key, 8), k1 = little_endian(key + 8, 8);
    uint64_t v[4] = {k0 ^ UINT64_C(0x736f6d6570736575), k1 ^ UINT64_C(0x646f72616e646f6d),
                     k0 ^ UINT64_C(0x6c7967656e657261), k1 ^ UINT64_C(0x7465646279746573)};
    const uint8_t *at = data;
    for (size_t left = bytes; ; left -= 8, at += 8) {
        const bool last = left < 8;
        const uint64_t counter = little_endian(at, last ? left : 8) | (last ? (uint64_t)bytes << 56 : 0);
        v[3] ^= counter;
        rounds(v, 2);
        v[0] ^= counter;
        if (last) break;
    }
    v[2] ^= 0xff;
    rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

bool zpp_net_same_mac(uint64_t a, uint64_t b) {
    volatile uint64_t difference = a ^ b; /* one 64-bit comparison takes constant time; volatile keeps it that way */
    return difference == 0;
}
