/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of block-sparse attention in plain C: their meaning on CPU.
 */
#include "kernels.h"

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

const struct zpp_sparse_kernels zpp_sparse_scalar = { matmul, softmax, scale_rows, weigh, dot };
