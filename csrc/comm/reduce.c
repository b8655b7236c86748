/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions of any operation and dtype; sums of floating point elements go to the kernels of this CPU. The rest works
 * in blocks that stay in the first-level cache: start with source 0, combine source after source, finish.
 */
#include "reduce.h"

#include <math.h>
#include <string.h>

#include "../base/cpu.h"

enum { BLOCK_ELEMS = 512, PIECE_BYTES = 8192, STREAM_MIN_BYTES = 16384 };

const struct zpp_sum_kernels *zpp_sum_kernels(void) {
#if ZPP_CPU_X86
    switch (zpp_cpu_level()) {
    case ZPP_CPU_AVX512: return &zpp_sum_avx512;
    case ZPP_CPU_AVX2: return &zpp_sum_avx2;
    default: break;
    }
#elif ZPP_CPU_ARM
    if (zpp_cpu_level() == ZPP_CPU_NEON) return &zpp_sum_neon;
#endif
    return &zpp_sum_scalar;
}

void zpp_copy(void *dst, const void *src, size_t bytes, bool stream) {
    if (stream && bytes >= STREAM_MIN_BYTES)
        zpp_sum_kernels()->copy(dst, src, bytes);
    else
        memcpy(dst, src, bytes);
}

static bool is_float(zpp_dtype dtype) {
    return dtype == ZPP_F32 || dtype == ZPP_BF16 || dtype == ZPP_F16 || dtype == ZPP_F64;
}

zpp_status zpp_reduce_check(zpp_reduce_op op, zpp_dtype dtype, struct zpp_err *err) {
    if ((unsigned)dtype >= ZPP_DTYPES)
        return zpp_fail(err, ZPP_INVALID, "comm: unknown dtype %d of a reduction", (int)dtype);
    if ((unsigned)op >= ZPP_REDUCE_OPS)
        return zpp_fail(err, ZPP_INVALID, "comm: reduce operation %d, wanted 0..%d", (int)op, ZPP_REDUCE_OPS - 1);
    const bool bits = op == ZPP_BAND || op == ZPP_BOR || op == ZPP_BXOR;
    if (bits && is_float(dtype))
        return zpp_fail(err, ZPP_INVALID, "comm: %s of %s, wanted an integer or bool dtype", zpp_reduce_op_name(op),
                        zpp_dtype_name(dtype));
    if (op == ZPP_AVG && !is_float(dtype))
        return zpp_fail(err, ZPP_INVALID, "comm: avg of %s, wanted a floating point dtype; use sum and divide",
                        zpp_dtype_name(dtype));
    return ZPP_OK;
}

/* --- combine one block: acc[i] = acc[i] op src[i] ---------------------------------------------------------------- */

#define COMBINE_ARITHMETIC(name, type, wide)                                                                   \
    static void combine_##name(type *acc, const type *src, size_t elems, zpp_reduce_op op) {                   \
        switch (op) {                                                                                          \
        case ZPP_PRODUCT:                                                                                      \
            for (size_t i = 0; i < elems; i++) acc[i] = (type)((wide)acc[i] * (wide)src[i]);                   \
            break;                                                                                             \
        case ZPP_MIN:                                                                                          \
            for (size_t i = 0; i < elems; i++) acc[i] = src[i] < acc[i] || src[i] != src[i] ? src[i] : acc[i]; \
            break;                                                                                             \
        case ZPP_MAX:                                                                                          \
            for (size_t i = 0; i < elems; i++) acc[i] = src[i] > acc[i] || src[i] != src[i] ? src[i] : acc[i]; \
            break;                                                                                             \
        default:                                                                                               \
            for (size_t i = 0; i < elems; i++) acc[i] = (type)((wide)acc[i] + (wide)src[i]);                   \
            break;                                                                                             \
        }                                                                                                      \
    }

/* Signed sums wrap, as torch's do: computed unsigned, where C defines it. */
#define COMBINE_INTEGER(name, type, wide)                                                    \
    COMBINE_ARITHMETIC(name##_arithmetic, type, wide)                                        \
    static void combine_##name(type *acc, const type *src, size_t elems, zpp_reduce_op op) { \
        switch (op) {                                                                        \
        case ZPP_BAND:                                                                       \
            for (size_t i = 0; i < elems; i++) acc[i] = (type)(acc[i] & src[i]);             \
            break;                                                                           \
        case ZPP_BOR:                                                                        \
            for (size_t i = 0; i < elems; i++) acc[i] = (type)(acc[i] | src[i]);             \
            break;                                                                           \
        case ZPP_BXOR:                                                                       \
            for (size_t i = 0; i < elems; i++) acc[i] = (type)(acc[i] ^ src[i]);             \
            break;                                                                           \
        default: combine_##name##_arithmetic(acc, src, elems, op); break;                    \
        }                                                                                    \
    }

COMBINE_ARITHMETIC(f32, float, float)
COMBINE_ARITHMETIC(f64, double, double)
COMBINE_INTEGER(i8, int8_t, uint32_t)
COMBINE_INTEGER(u8, uint8_t, uint32_t)
COMBINE_INTEGER(i16, int16_t, uint32_t)
COMBINE_INTEGER(i32, int32_t, uint32_t)
COMBINE_INTEGER(i64, int64_t, uint64_t)

/* bool: sum and max are "any", product and min are "all". Bytes other than 0 and 1 count as true. */
static void combine_bool(uint8_t *acc, const uint8_t *src, size_t elems, zpp_reduce_op op) {
    for (size_t i = 0; i < elems; i++) {
        const bool a = acc[i] != 0, b = src[i] != 0;
        acc[i] = op == ZPP_BXOR ? a != b : op == ZPP_PRODUCT || op == ZPP_MIN || op == ZPP_BAND ? a && b : a || b;
    }
}

static void combine(void *acc, const void *src, size_t elems, zpp_dtype dtype, zpp_reduce_op op) {
    switch (dtype) {
    case ZPP_F32: combine_f32(acc, src, elems, op); break;
    case ZPP_F64: combine_f64(acc, src, elems, op); break;
    case ZPP_I8: combine_i8(acc, src, elems, op); break;
    case ZPP_U8: combine_u8(acc, src, elems, op); break;
    case ZPP_I16: combine_i16(acc, src, elems, op); break;
    case ZPP_I32: combine_i32(acc, src, elems, op); break;
    case ZPP_I64: combine_i64(acc, src, elems, op); break;
    case ZPP_BOOL: combine_bool(acc, src, elems, op); break;
    default: break; /* 16-bit floats are widened before they come here */
    }
}

/* --- blocks ------------------------------------------------------------------------------------------------------ */

/* The sources are combined here, in their own dtype or widened. */
union block {
    float f32[BLOCK_ELEMS];
    double f64[BLOCK_ELEMS];
    uint8_t bytes[BLOCK_ELEMS * 8];
};

/* Combine 16-bit elements in fp32. */
static void combine_halves(union block *acc, zpp_reduce_op op, const void *from, bool first, zpp_dtype dtype,
                           size_t elems) {
    float wide[BLOCK_ELEMS];
    zpp_convert(first ? acc->f32 : wide, ZPP_F32, from, dtype, elems);
    if (!first) combine_f32(acc->f32, wide, elems, op);
}

static void reduce_block(void *dst, zpp_reduce_op op, const void *const *src, int sources, zpp_dtype dtype, size_t at,
                         size_t elems) {
    union block acc;
    const bool half = dtype == ZPP_BF16 || dtype == ZPP_F16;
    const size_t elem_bytes = zpp_dtype_bytes(dtype);
    for (int r = 0; r < sources; r++) {
        const uint8_t *from = (const uint8_t *)src[r] + at * elem_bytes;
        if (half)
            combine_halves(&acc, op, from, r == 0, dtype, elems);
        else if (r == 0)
            memcpy(acc.bytes, from, elems * elem_bytes);
        else
            combine(acc.bytes, from, elems, dtype, op);
    }
    if (op == ZPP_AVG && dtype == ZPP_F64)
        for (size_t i = 0; i < elems; i++) acc.f64[i] *= 1.0 / sources;
    uint8_t *to = (uint8_t *)dst + at * elem_bytes;
    if (half)
        zpp_convert(to, dtype, acc.f32, ZPP_F32, elems);
    else
        memcpy(to, acc.bytes, elems * elem_bytes);
}

static void reduce_range(void *dst, zpp_reduce_op op, const void *const *src, int sources, zpp_dtype dtype,
                         size_t elems, bool stream) {
    const float scale = op == ZPP_AVG ? (float)(1.0 / sources) : 1.0f;
    if ((op == ZPP_SUM || op == ZPP_AVG) && is_float(dtype) && dtype != ZPP_F64) {
        const struct zpp_sum_kernels *kernels = zpp_sum_kernels();
        const struct zpp_sum sum = { .dst = dst, .src = src, .sources = sources, .scale = scale, .stream = stream };
        (dtype == ZPP_F32 ? kernels->f32 : dtype == ZPP_BF16 ? kernels->bf16 : kernels->f16)(&sum, elems);
        return;
    }
    for (size_t at = 0; at < elems; at += BLOCK_ELEMS)
        reduce_block(dst, op, src, sources, dtype, at, elems - at < BLOCK_ELEMS ? elems - at : BLOCK_ELEMS);
}

/* Only the fp32 sum streams by itself; the others go through a piece of stack, which stays in the first-level cache. */
static void reduce_and_stream(void *dst, zpp_reduce_op op, const void *const *src, int sources, zpp_dtype dtype,
                              size_t elems) {
    _Alignas(64) uint8_t piece[PIECE_BYTES];
    const void *from[ZPP_RANKS_MAX];
    const size_t elem_bytes = zpp_dtype_bytes(dtype), piece_elems = PIECE_BYTES / elem_bytes;
    for (size_t at = 0; at < elems; at += piece_elems) {
        const size_t count = elems - at < piece_elems ? elems - at : piece_elems;
        for (int r = 0; r < sources; r++) from[r] = (const uint8_t *)src[r] + at * elem_bytes;
        reduce_range(piece, op, from, sources, dtype, count, false);
        zpp_sum_kernels()->copy((uint8_t *)dst + at * elem_bytes, piece, count * elem_bytes);
    }
}

void zpp_reduce_op_sources(void *dst, zpp_reduce_op op, const void *const *src, int sources, zpp_dtype dtype,
                           size_t elems, bool stream) {
    const bool itself = dtype == ZPP_F32 && (op == ZPP_SUM || op == ZPP_AVG);
    if (stream && !itself)
        reduce_and_stream(dst, op, src, sources, dtype, elems);
    else
        reduce_range(dst, op, src, sources, dtype, elems, stream);
}

/* --- the door for users of regions ------------------------------------------------------------------------------- */

static struct zpp_sum_seen sum_f64(const struct zpp_sum *sum, double scale, size_t elems) {
    double *dst = sum->dst;
    struct zpp_sum_seen seen = { 0 };
    for (size_t i = 0; i < elems; i++) {
        double value = ((const double *)sum->src[0])[i];
        for (int r = 1; r < sum->sources; r++) value += ((const double *)sum->src[r])[i];
        value = sum->accumulate ? dst[i] + value * scale : value * scale;
        if (sum->replaces) seen.replaced_nonfinite |= !isfinite(dst[i]);
        seen.nonfinite |= !isfinite(value);
        dst[i] = value;
    }
    return seen;
}

/* Sum integers, without a scale. With `accumulate`, dst becomes the first source. */
static void sum_integers(const struct zpp_sum *sum, zpp_dtype dtype, size_t elems) {
    const void *all[ZPP_RANKS_MAX + 1];
    int sources = 0;
    if (sum->accumulate) all[sources++] = sum->dst;
    for (int r = 0; r < sum->sources && sources <= ZPP_RANKS_MAX; r++) all[sources++] = sum->src[r];
    zpp_reduce_op_sources(sum->dst, ZPP_SUM, all, sources, dtype, elems, false);
}

struct zpp_sum_seen zpp_reduce_sources(void *dst, zpp_dtype dst_dtype, bool accumulate, const void *const *src,
                                       int ranks, zpp_dtype dtype, size_t elems, double scale) {
    const struct zpp_sum_kernels *kernels = zpp_sum_kernels();
    struct zpp_sum sum = { .dst = dst, .src = src, .sources = ranks, .scale = (float)scale, .accumulate = accumulate,
                           .wide = dst_dtype == ZPP_F32, .report = true };
    for (int r = 0; r < ranks; r++) sum.replaces |= src[r] == dst;
    switch (dtype) {
    case ZPP_F32: return kernels->f32(&sum, elems);
    case ZPP_BF16: return kernels->bf16(&sum, elems);
    case ZPP_F16: return kernels->f16(&sum, elems);
    case ZPP_F64: return sum_f64(&sum, scale, elems);
    default: sum_integers(&sum, dtype, elems); return (struct zpp_sum_seen){ 0 };
    }
}
