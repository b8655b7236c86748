/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/sparse_attention: what a CPU version offers. All work on
 * fp32 tiles, are thread-free, and ask for no alignment.
 */
#ifndef ZPP_OPS_SPARSE_ATTENTION_KERNELS_H
#define ZPP_OPS_SPARSE_ATTENTION_KERNELS_H

#include "../isa.h"
#include "sparse_attention.h"

enum { ZPP_SPARSE_LANES = 16 };

/* A tile whose element (r, c) is at[r * row + c * column]: transposed by exchanging the strides, one of which is 1. */
struct zpp_sparse_tile {
    const float *at;
    size_t row, column;
};

struct zpp_sparse_sizes {
    size_t m, n, k; /* result rows, a multiple of 16; result columns, a multiple of 16; inner, any */
};

struct zpp_sparse_kernels {
    /* c [m][n] (rows ldc apart) = a [m][k] b [k][n] (rows ldb apart), or c + that with `add`: for each element one
     * chain of fused multiply-adds from 0 (or c) over rising k. */
    void (*matmul)(float *c, size_t ldc, struct zpp_sparse_tile a, const float *b, size_t ldb,
                   struct zpp_sparse_sizes sizes, bool add);
    /* The next `rows` keys of the softmax over `lanes` queries (a multiple of 16); s [rows][lanes] are scores before
     * the scale, and become e^(scale s - max). most and sum are carried on; what was summed before is to be multiplied
     * by factor. */
    void (*softmax)(float *s, size_t rows, size_t lanes, float scale, float *most, float *sum, float *factor);
    /* o [rows][width] *= factor[row]; width a multiple of 16. */
    void (*scale_rows)(float *o, size_t rows, size_t width, const float *factor);
    /* Scores s and d = <do, v>, [rows][width] of queries by keys: s becomes p, d becomes scale p (d - delta). A row
     * whose lse is -inf has p = 0. */
    void (*weigh)(float *s, float *d, size_t rows, size_t width, float scale, const float *lse, const float *delta);
    /* Sum of a_i b_i: sixteen chains, i in i % 16, added by halves; elems a multiple of 16. */
    float (*dot)(const float *a, const float *b, size_t elems);
};

ZPP_ISA_DECLARE(struct zpp_sparse_kernels, zpp_sparse);

/* The version for this CPU; the one of a level, NULL where there is none. */
const struct zpp_sparse_kernels *zpp_sparse_kernels(void);
const struct zpp_sparse_kernels *zpp_sparse_kernels_at(enum zpp_cpu_level level);

/* maxps: the second where they are not ordered. */
static inline float zpp_sparse_max(float a, float b) { return a > b ? a : b; }

static inline float zpp_sparse_lanes_sum(float lanes[ZPP_SPARSE_LANES]) {
    for (int width = ZPP_SPARSE_LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    }
    return lanes[0];
}

#endif
