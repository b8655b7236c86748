/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types and their conversion (dtype.h). Training converts between fp32 and the 16-bit types: these four pairs
 * have an AVX2 and a NEON version (convert_*.c). Every other pair goes through double or int64, element by element.
 */
#include "dtype.h"

#include <assert.h>

#include "convert.h"
#include "cpu.h"

static const struct {
    const char *name;
    size_t bytes;
} dtypes[ZPP_DTYPES] = {
    [ZPP_F32] = {"float32", 4}, [ZPP_BF16] = {"bfloat16", 2}, [ZPP_F16] = {"float16", 2}, [ZPP_F64] = {"float64", 8},
    [ZPP_I8] = {"int8", 1},     [ZPP_U8] = {"uint8", 1},      [ZPP_I16] = {"int16", 2},   [ZPP_I32] = {"int32", 4},
    [ZPP_I64] = {"int64", 8},   [ZPP_BOOL] = {"bool", 1},
};

size_t zpp_dtype_bytes(zpp_dtype dtype) { return (unsigned)dtype < ZPP_DTYPES ? dtypes[dtype].bytes : 0; }
const char *zpp_dtype_name(zpp_dtype dtype) { return (unsigned)dtype < ZPP_DTYPES ? dtypes[dtype].name : "unknown"; }

static float f32_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float zpp_f16_to_f32(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 0x1f) { /* infinity, or NaN made quiet */
        return f32_of_bits(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x00400000u : 0));
    }
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24 is exact in fp32 */
        const float magnitude = (float)fraction * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return f32_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

uint16_t zpp_f16_from_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu)); /* quiet NaN */
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    if (magnitude < 0x38800000u) { /* below 2^-14: adding 0.5 makes the FPU round at 2^-24, the subnormals' unit */
        const float shifted = f32_of_bits(magnitude) + 0.5f;
        uint32_t shifted_bits;
        memcpy(&shifted_bits, &shifted, sizeof shifted_bits);
        return (uint16_t)(sign | (shifted_bits - 0x3f000000u));
    }
    const uint32_t odd = magnitude >> 13 & 1u;
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

/* --- any pair ----------------------------------------------------------------------------------------------------- */
static int is_float(zpp_dtype dtype) {
    return dtype == ZPP_F32 || dtype == ZPP_BF16 || dtype == ZPP_F16 || dtype == ZPP_F64;
}

#define READ(type)                                   \
    (__extension__({                                 \
        type element_;                               \
        memcpy(&element_, from, sizeof element_);    \
        element_;                                    \
    }))

static double load_float(const unsigned char *from, zpp_dtype dtype) {
    switch (dtype) {
    case ZPP_F32: return READ(float);
    case ZPP_BF16: return zpp_bf16_to_f32(READ(uint16_t));
    case ZPP_F16: return zpp_f16_to_f32(READ(uint16_t));
    default: return READ(double);
    }
}

static int64_t load_integer(const unsigned char *from, zpp_dtype dtype) {
    switch (dtype) {
    case ZPP_I8: return READ(int8_t);
    case ZPP_I16: return READ(int16_t);
    case ZPP_I32: return READ(int32_t);
    case ZPP_I64: return READ(int64_t);
    default: return READ(uint8_t); /* U8, BOOL */
    }
}

static void store_float(unsigned char *to, zpp_dtype dtype, double value) {
    const float narrow = (float)value; /* the 16-bit kinds round twice coming from double, as torch does */
    uint16_t bits;
    switch (dtype) {
    case ZPP_F32: memcpy(to, &narrow, sizeof narrow); return;
    case ZPP_BF16: bits = zpp_bf16_from_f32(narrow); break;
    case ZPP_F16: bits = zpp_f16_from_f32(narrow); break;
    default: memcpy(to, &value, sizeof value); return;
    }
    memcpy(to, &bits, sizeof bits);
}

/* Integers wrap, as casts do. */
static void store_integer(unsigned char *to, zpp_dtype dtype, int64_t value) {
    const unsigned char truth = value != 0;
    /* Little endian: the low bytes of the 64 are the narrower integer. */
    memcpy(to, dtype == ZPP_BOOL ? (const void *)&truth : (const void *)&value, zpp_dtype_bytes(dtype));
}

/* A C cast of a double outside of the range is undefined; this saturates, and makes NaN 0. */
static int64_t integer_of(double value) {
    if (value != value) return 0;
    if (value >= 0x1p63) return INT64_MAX;
    return value <= -0x1p63 ? INT64_MIN : (int64_t)value;
}

static void convert_any(unsigned char *dst, zpp_dtype dst_dtype, const unsigned char *src, zpp_dtype src_dtype,
                        size_t elems) {
    const size_t dst_step = zpp_dtype_bytes(dst_dtype), src_step = zpp_dtype_bytes(src_dtype);
    for (size_t i = 0; i < elems; ++i, dst += dst_step, src += src_step) {
        if (is_float(src_dtype)) {
            const double value = load_float(src, src_dtype);
            if (is_float(dst_dtype)) store_float(dst, dst_dtype, value);
            else store_integer(dst, dst_dtype, dst_dtype == ZPP_BOOL ? value != 0 : integer_of(value));
        } else {
            const int64_t value = load_integer(src, src_dtype);
            if (dst_dtype == ZPP_F32) memcpy(dst, &(float){(float)value}, sizeof(float)); /* one rounding */
            else if (is_float(dst_dtype)) store_float(dst, dst_dtype, (double)value);
            else store_integer(dst, dst_dtype, value);
        }
    }
}

/* --- the pairs of training ---------------------------------------------------------------------------------------- */

static inline void widen(float *dst, const uint16_t *src, size_t elems, float (*one)(uint16_t)) {
    for (size_t i = 0; i < elems; ++i) dst[i] = one(src[i]);
}

static inline void narrow(uint16_t *dst, const float *src, size_t elems, uint16_t (*one)(float)) {
    for (size_t i = 0; i < elems; ++i) dst[i] = one(src[i]);
}

static void bf16_to_f32(void *dst, const void *src, size_t elems) { widen(dst, src, elems, zpp_bf16_to_f32); }
static void f32_to_bf16(void *dst, const void *src, size_t elems) { narrow(dst, src, elems, zpp_bf16_from_f32); }
static void f16_to_f32(void *dst, const void *src, size_t elems) { widen(dst, src, elems, zpp_f16_to_f32); }
static void f32_to_f16(void *dst, const void *src, size_t elems) { narrow(dst, src, elems, zpp_f16_from_f32); }

#if ZPP_CPU_X86
#define PAIR(name) name, zpp_convert_##name##_avx2
#elif ZPP_CPU_ARM
#define PAIR(name) name, zpp_convert_##name##_neon
#else
#define PAIR(name) name, name
#endif

static const struct pair {
    zpp_dtype src_dtype, dst_dtype;
    void (*scalar)(void *dst, const void *src, size_t elems);
    void (*vectors)(void *dst, const void *src, size_t elems);
} pairs[] = {
    {ZPP_BF16, ZPP_F32, PAIR(bf16_to_f32)},
    {ZPP_F32, ZPP_BF16, PAIR(f32_to_bf16)},
    {ZPP_F16, ZPP_F32, PAIR(f16_to_f32)},
    {ZPP_F32, ZPP_F16, PAIR(f32_to_f16)},
};

void zpp_convert(void *dst, zpp_dtype dst_dtype, const void *src, zpp_dtype src_dtype, size_t elems) {
    assert(zpp_dtype_bytes(dst_dtype) && zpp_dtype_bytes(src_dtype));
    if (dst_dtype == src_dtype) {
        memcpy(dst, src, elems * zpp_dtype_bytes(dst_dtype));
        return;
    }
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; ++i) {
        const struct pair *pair = &pairs[i];
        if (pair->src_dtype != src_dtype || pair->dst_dtype != dst_dtype) continue;
        (zpp_cpu_level() > ZPP_CPU_SCALAR ? pair->vectors : pair->scalar)(dst, src, elems);
        return;
    }
    convert_any(dst, dst_dtype, src, src_dtype, elems);
}
