/* SPDX-License-Identifier: Apache-2.0
 *
 * Arrays of floats of any kind in C tests: what they are filled with, and when they are the same.
 */
#ifndef ZPP_TESTS_FLOATS_H
#define ZPP_TESTS_FLOATS_H

#include <math.h>

#include "../../csrc/ops/element.h"
#include "harness.h"

/* Equal bits; a NaN equals a NaN. */
static inline __attribute__((unused)) bool same(const void *a, const void *b, zpp_dtype dtype, size_t elems) {
    for (size_t i = 0; i < elems; ++i) {
        const float x = zpp_element_load(a, dtype, i), y = zpp_element_load(b, dtype, i);
        if (!(isnan(x) && isnan(y)) && memcmp(&x, &y, sizeof x) != 0) return false;
    }
    return true;
}

/* Some sign, of one of `orders` binary orders, the least of them 2^least; if wild, now and then what is not finite, or
 * an extreme. */
static inline __attribute__((unused)) float random_float(bool wild, uint32_t orders, int least) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, 1e38f, INFINITY, -INFINITY, NAN, 3e38f };
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint32_t bits = (uint32_t)(state >> 32), kind = bits % 4096;
    if (wild && kind < sizeof special / sizeof special[0]) return special[kind];
    return ldexpf((float)bits / 4294967296.0f - 0.4f, (int)(bits / 4096 % orders) + least);
}

#ifdef ZPP_ON_CPU /* behind cuda_on_cpu.h and a kernel's file */
static inline __attribute__((unused)) uint8_t cuda_dtype_of(zpp_dtype dtype) {
    return dtype == ZPP_BF16 ? ZPP_CUDA_BF16 : dtype == ZPP_F16 ? ZPP_CUDA_F16 : ZPP_CUDA_F32;
}
#endif

#endif
