/* SPDX-License-Identifier: Apache-2.0
 *
 * Whole random numbers that a seed determines, the same on every machine: SplitMix64 (Steele, Lea & Flood 2014), and
 * Lemire's unbiased choice below a bound. For sampling of tokens; not for secrets.
 */
#ifndef ZPP_OPS_RANDOM_H
#define ZPP_OPS_RANDOM_H

#include <stdint.h>

#include "round.h" /* ZPP_FN: CUDA samples too */

ZPP_FN uint64_t zpp_random_next(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Evenly one of 0 .. below - 1; 1 <= below. */
ZPP_FN uint32_t zpp_random_below(uint64_t *state, uint32_t below) {
    uint64_t product = (zpp_random_next(state) >> 32) * below;
    if ((uint32_t)product < below) {
        const uint32_t unfair = (0u - below) % below;
        while ((uint32_t)product < unfair) product = (zpp_random_next(state) >> 32) * below;
    }
    return (uint32_t)(product >> 32);
}

#endif
