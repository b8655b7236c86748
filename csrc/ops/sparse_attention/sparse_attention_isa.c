/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of block-sparse attention: first in plain C, which is their meaning on CPU, then sixteen lanes at once.
 * AVX2, AVX-512 and NEON differ in vec16.h and in how many rows of a result stay in registers. Each element sees the
 * same operations in the same order.
 */
#include "kernels.h"

#if ZPP_LANES == 1

#include <float.h>
#include <math.h>

#include "../exp.h"

static void matmul(float *c, size_t ldc, struct zpp_sparse_tile a, const float *b, size_t ldb,
                   struct zpp_sparse_sizes sizes, bool add) {
    for (size_t m = 0; m < sizes.m; ++m) {
        for (size_t n = 0; n < sizes.n; ++n) {
            float total = add ? c[m * ldc + n] : 0.0f;
            for (size_t k = 0; k < sizes.k; ++k) {
                total = fmaf(a.at[m * a.row + k * a.column], b[k * ldb + n], total);
            }
            c[m * ldc + n] = total;
        }
    }
}

static void softmax(float *s, size_t rows, size_t lanes, float scale, float *most, float *sum, float *factor) {
    for (size_t i = 0; i < lanes; ++i) {
        float max = most[i];
        for (size_t j = 0; j < rows; ++j) max = zpp_sparse_max(ZPP_MUL(s[j * lanes + i], scale), max);
        const float shift = zpp_sparse_max(max, -FLT_MAX); /* nothing seen yet: -inf - shift is -inf, not NaN */
        factor[i] = zpp_exp_or_zero(ZPP_SUB(most[i], shift));
        float total = ZPP_MUL(sum[i], factor[i]);
        for (size_t j = 0; j < rows; ++j) {
            const float p = zpp_exp_or_zero(ZPP_SUB(ZPP_MUL(s[j * lanes + i], scale), shift));
            s[j * lanes + i] = p;
            total = ZPP_ADD(total, p);
        }
        most[i] = max;
        sum[i] = total;
    }
}

static void scale_rows(float *o, size_t rows, size_t width, const float *factor) {
    for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < width; ++c) o[r * width + c] = ZPP_MUL(o[r * width + c], factor[r]);
    }
}

static void weigh(float *s, float *d, size_t rows, size_t width, float scale, const float *lse, const float *delta) {
    for (size_t r = 0; r < rows; ++r) {
        const float by = lse[r] == -INFINITY ? INFINITY : lse[r];
        for (size_t c = 0; c < width; ++c) {
            const float p = zpp_exp_or_zero(ZPP_SUB(ZPP_MUL(s[r * width + c], scale), by));
            s[r * width + c] = p;
            d[r * width + c] = ZPP_MUL(ZPP_MUL(p, ZPP_SUB(d[r * width + c], delta[r])), scale);
        }
    }
}

static float dot(const float *a, const float *b, size_t elems) {
    float lanes[ZPP_SPARSE_LANES] = { 0 };
    for (size_t i = 0; i < elems; ++i) lanes[i % ZPP_SPARSE_LANES] = fmaf(a[i], b[i], lanes[i % ZPP_SPARSE_LANES]);
    return zpp_sparse_lanes_sum(lanes);
}

#else

#include <float.h>
#include <math.h>

#include "../exp_vec16.h"
#include "../vec16.h"

/* Accumulators of `rows` x 16 elements: enough chains to hide the latency of a multiply-add (4 or 5 cycles, two a
 * cycle), few enough for the registers. */
#if defined(__AVX512F__)
enum { TILE_ROWS = 8 };
#else
enum { TILE_ROWS = 4 };
#endif

V16_FN void matmul_rows(float *c, size_t ldc, const struct zpp_sparse_tile a, const float *b, size_t ldb, size_t k,
                        const bool add) {
    v16 total[TILE_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; ++r) total[r] = add ? v16_load(c + (size_t)r * ldc) : v16_set1(0.0f);
    const float *left = a.at;
    for (size_t i = 0; i < k; ++i, left += a.column, b += ldb) {
        const v16 right = v16_load(b);
#pragma GCC unroll 8
        for (int r = 0; r < TILE_ROWS; ++r) total[r] = v16_fma(v16_set1(left[(size_t)r * a.row]), right, total[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; ++r) v16_store(c + (size_t)r * ldc, total[r]);
}

V16_FN void matmul_all(float *c, size_t ldc, struct zpp_sparse_tile a, const float *b, size_t ldb,
                       struct zpp_sparse_sizes sizes, const bool add) {
    for (size_t n = 0; n < sizes.n; n += V16_LANES) {
        struct zpp_sparse_tile left = a;
        for (size_t m = 0; m < sizes.m; m += TILE_ROWS, left.at += TILE_ROWS * a.row) {
            matmul_rows(c + m * ldc + n, ldc, left, b + n, ldb, sizes.k, add);
        }
    }
}

static void matmul(float *c, size_t ldc, struct zpp_sparse_tile a, const float *b, size_t ldb,
                   struct zpp_sparse_sizes sizes, bool add) {
    if (a.column == 1) { /* constants: strides that are known leave registers free */
        const struct zpp_sparse_tile along = { a.at, a.row, 1 };
        if (add) matmul_all(c, ldc, along, b, ldb, sizes, true);
        else matmul_all(c, ldc, along, b, ldb, sizes, false);
    } else {
        const struct zpp_sparse_tile across = { a.at, 1, a.column };
        if (add) matmul_all(c, ldc, across, b, ldb, sizes, true);
        else matmul_all(c, ldc, across, b, ldb, sizes, false);
    }
}

static void softmax(float *s, size_t rows, size_t lanes, float scale, float *most, float *sum, float *factor) {
    const v16 by = v16_set1(scale);
    for (size_t i = 0; i < lanes; i += V16_LANES) {
        const v16 before = v16_load(most + i);
        v16 max = before;
        for (size_t j = 0; j < rows; ++j) max = v16_max(v16_mul(v16_load(s + j * lanes + i), by), max);
        const v16 shift = v16_max(max, v16_set1(-FLT_MAX));
        const v16 less = v16_exp_or_zero(v16_sub(before, shift));
        v16 total = v16_mul(v16_load(sum + i), less);
        for (size_t j = 0; j < rows; ++j) {
            const v16 p = v16_exp_or_zero(v16_sub(v16_mul(v16_load(s + j * lanes + i), by), shift));
            v16_store(s + j * lanes + i, p);
            total = v16_add(total, p);
        }
        v16_store(factor + i, less);
        v16_store(most + i, max);
        v16_store(sum + i, total);
    }
}

static void scale_rows(float *o, size_t rows, size_t width, const float *factor) {
    for (size_t r = 0; r < rows; ++r) {
        const v16 by = v16_set1(factor[r]);
        for (size_t c = 0; c < width; c += V16_LANES) {
            v16_store(o + r * width + c, v16_mul(v16_load(o + r * width + c), by));
        }
    }
}

static void weigh(float *s, float *d, size_t rows, size_t width, float scale, const float *lse, const float *delta) {
    const v16 factor = v16_set1(scale);
    for (size_t r = 0; r < rows; ++r) {
        const v16 by = v16_set1(lse[r] == -INFINITY ? INFINITY : lse[r]), less = v16_set1(delta[r]);
        for (size_t c = r * width; c < (r + 1) * width; c += V16_LANES) {
            const v16 p = v16_exp_or_zero(v16_sub(v16_mul(v16_load(s + c), factor), by));
            v16_store(s + c, p);
            v16_store(d + c, v16_mul(v16_mul(p, v16_sub(v16_load(d + c), less)), factor));
        }
    }
}

static float dot(const float *a, const float *b, size_t elems) {
    v16 total = v16_set1(0.0f);
    for (size_t i = 0; i < elems; i += V16_LANES) total = v16_fma(v16_load(a + i), v16_load(b + i), total);
    float lanes[V16_LANES];
    v16_store(lanes, total);
    return zpp_sparse_lanes_sum(lanes);
}

#endif

const struct zpp_sparse_kernels ZPP_ISA_NAME(zpp_sparse) = { matmul, softmax, scale_rows, weigh, dot };
