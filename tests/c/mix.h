/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers for C tests that look random and depend on nothing but `x`.
 */
#ifndef ZPP_TESTS_MIX_H
#define ZPP_TESTS_MIX_H

#include <stdint.h>

static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

#endif
