/* SPDX-License-Identifier: Apache-2.0
 *
 * One-bit compression: first in plain C, which is its meaning on CPU, then sixteen lanes at once.
 * Operation by operation the order of onebit_body.h; the sixteen lanes are those of the sum's order.
 */
#include "kernels.h"

#if ZPP_LANES == 1

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

#else

#include "../vec16.h"

V16_FN float sum_vec(const void *src, const zpp_dtype dtype, const float *error, size_t elems) {
    v16 total = v16_set1(0.0f);
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        total = v16_add(total, v16_abs(v16_add(v16_load_as(src, i, dtype), v16_load(error + i))));
    }
    float lanes[ZPP_ONEBIT_LANES];
    v16_store(lanes, total);
    return zpp_onebit_sum_tail(lanes, src, dtype, error, i, elems);
}

V16_FN void emit_vec(const void *src, const zpp_dtype dtype, float *error, size_t elems, float scale, uint8_t *bits) {
    const v16 scales = v16_set1(scale);
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const v16 owed = v16_add(v16_load_as(src, i, dtype), v16_load(error + i));
        const uint16_t positive = v16_not_negative(owed);
        memcpy(bits + i / 8, &positive, sizeof positive); /* little endian: bit l of the 16 is element i + l */
        v16_store(error + i, v16_sub(owed, v16_signed(scales, positive)));
    }
    zpp_onebit_emit_tail(src, dtype, error, i, elems, scale, bits);
}

V16_FN void decode_vec(const uint8_t *bits, float scale, size_t elems, void *dst, const zpp_dtype dtype,
                       const enum zpp_onebit_how how) {
    const v16 scales = v16_set1(scale);
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        uint16_t positive;
        memcpy(&positive, bits + i / 8, sizeof positive);
        const v16 value = v16_signed(scales, positive);
        if (how == ZPP_ONEBIT_STREAM) v16_stream_as(dst, i, dtype, value);
        else if (how == ZPP_ONEBIT_STORE) v16_store_as(dst, i, dtype, value);
        else v16_store_as(dst, i, dtype, v16_add(v16_load_as(dst, i, dtype), value));
    }
    zpp_onebit_decode_tail(bits, scale, i, elems, dst, dtype, how == ZPP_ONEBIT_ADD);
}

static float sum(const void *src, zpp_dtype dtype, const float *error, size_t elems) {
    switch (dtype) {
    case ZPP_BF16: return sum_vec(src, ZPP_BF16, error, elems);
    case ZPP_F16: return sum_vec(src, ZPP_F16, error, elems);
    default: return sum_vec(src, ZPP_F32, error, elems);
    }
}

static void emit(const void *src, zpp_dtype dtype, float *error, size_t elems, float scale, uint8_t *bits) {
    switch (dtype) {
    case ZPP_BF16: emit_vec(src, ZPP_BF16, error, elems, scale, bits); return;
    case ZPP_F16: emit_vec(src, ZPP_F16, error, elems, scale, bits); return;
    default: emit_vec(src, ZPP_F32, error, elems, scale, bits); return;
    }
}

V16_FN void decode_how(const uint8_t *bits, float scale, size_t elems, void *dst, const zpp_dtype dtype,
                       enum zpp_onebit_how how) {
    switch (how) {
    case ZPP_ONEBIT_STREAM: decode_vec(bits, scale, elems, dst, dtype, ZPP_ONEBIT_STREAM); return;
    case ZPP_ONEBIT_ADD: decode_vec(bits, scale, elems, dst, dtype, ZPP_ONEBIT_ADD); return;
    default: decode_vec(bits, scale, elems, dst, dtype, ZPP_ONEBIT_STORE); return;
    }
}

static void decode(const uint8_t *bits, float scale, size_t elems, void *dst, zpp_dtype dtype,
                   enum zpp_onebit_how how) {
    switch (dtype) {
    case ZPP_BF16: decode_how(bits, scale, elems, dst, ZPP_BF16, how); return;
    case ZPP_F16: decode_how(bits, scale, elems, dst, ZPP_F16, how); return;
    default: decode_how(bits, scale, elems, dst, ZPP_F32, how); return;
    }
}

#endif

const struct zpp_onebit_kernels ZPP_ISA_NAME(zpp_onebit) = { sum, emit, decode };
