/* SPDX-License-Identifier: Apache-2.0
 *
 * One-bit compression in plain C: the meaning of the op on CPU. onebit_body.h has the arithmetic.
 */
#include "kernels.h"

static float sum(const void *src, zpp_dtype dtype, const float *error, size_t elems) {
    float lanes[ZPP_ONEBIT_LANES] = { 0 };
    return zpp_onebit_sum_tail(lanes, src, dtype, error, 0, elems);
}

static void emit(const void *src, zpp_dtype dtype, float *error, size_t elems, float scale, uint8_t *bits) {
    zpp_onebit_emit_tail(src, dtype, error, 0, elems, scale, bits);
}

static void decode(const uint8_t *bits, float scale, size_t elems, void *dst, zpp_dtype dtype,
                   enum zpp_onebit_how how) {
    zpp_onebit_decode_tail(bits, scale, 0, elems, dst, dtype, how == ZPP_ONEBIT_ADD);
}

const struct zpp_onebit_kernels zpp_onebit_scalar = { sum, emit, decode };
