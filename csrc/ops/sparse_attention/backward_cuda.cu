/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention on CUDA, backward (formulas: sparse_attention.h). Scores are computed again. Three kernels:
 *
 *   delta     a thread a query: <do_i, o_i>
 *   queries   a block a strip of queries, over the keys of its row: dq
 *   keys      a block a strip of keys, over the heads of its group and the rows whose layout has them, found by
 *             bisection: dk and dv
 *
 * So nothing is added by atomics: the same bits each time, and the CPU's but for rounding (forward_cuda.cu).
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
/* One block a processor at least: left to itself, ptxas saves registers for more of them, and spills. */
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_SPARSE_CUDA_THREADS, 1)
#endif

#include <math.h>
#include <stdint.h>

#include "../element_cuda.h"
#include "../exp.h"
#include "tiles_cuda.h"

struct tiles {
    struct place at;                 /* of the strip; its head is of q or of k, as the kernel's units are */
    float *q, *go, *k, *v, *d1, *d2; /* d1: dq or dk; d2: dv */
    float *p, *ds, *lse, *delta;     /* [queries][keys]; of the queries */
};

/* Tiles of a kernel that has dv or has not. */
static __device__ __forceinline__ struct tiles tiles_of(const struct zpp_sparse_cuda_args *a, int tiles, uint64_t begin,
                                                        uint64_t end) {
    const uint64_t tile = a->rows * (a->dim + 1);
    struct tiles t;
    t.at = place_of(a, begin, end);
    t.q = scratch;
    t.go = t.q + tile;
    t.k = t.go + tile;
    t.v = t.k + tile;
    t.d1 = t.v + tile;
    t.d2 = t.d1 + tile;
    t.p = scratch + (uint64_t)tiles * tile;
    t.ds = t.p + (uint64_t)a->rows * a->rows;
    t.lse = t.ds + (uint64_t)a->rows * a->rows;
    t.delta = t.lse + a->rows;
    return t;
}

static __device__ __forceinline__ void load_queries(const struct zpp_sparse_cuda_args *a, const struct tiles *t,
                                                    uint64_t head, uint64_t query) {
    load_tile(a, of_queries(a, a->q, head), query, t->q);
    load_tile(a, of_queries(a, a->grad_out, head), query, t->go);
    if (threadIdx.x >= a->rows) return;
    const uint64_t i = query + threadIdx.x - a->first; /* before the first one: far beyond the last */
    t->lse[threadIdx.x] = i < a->queries ? a->lse[head * a->queries + i] : -INFINITY;
    t->delta[threadIdx.x] = i < a->queries ? a->delta[head * a->queries + i] : 0.0f;
}

static __device__ __forceinline__ void load_keys(const struct zpp_sparse_cuda_args *a, const struct tiles *t,
                                                 uint64_t kv_head, uint64_t key) {
    load_tile(a, of_keys(a, a->k, kv_head), key, t->k);
    load_tile(a, of_keys(a, a->v, kv_head), key, t->v);
}

/* p (dropped ones 0) and ds of queries by keys. */
static __device__ __forceinline__ void weigh(const struct zpp_sparse_cuda_args *a, const struct tiles *t, uint64_t head,
                                             uint64_t query, uint64_t key) {
    for (uint64_t at = threadIdx.x; at < (uint64_t)a->rows * a->rows; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t i = at / a->rows, j = at % a->rows;
        const int seen = is_seen(a, head, query + i, key + j) && t->lse[i] != -INFINITY;
        const float keep = a->dropout > 0.0f ? keep_of(a, head, query + i, key + j) : 1.0f;
        const float s = ZPP_MUL(product(a, t->q, i, t->k, j), a->scale), dp = product(a, t->go, i, t->v, j);
        const float p = seen ? zpp_exp_or_zero(ZPP_SUB(s, t->lse[i])) : 0.0f;
        const float d = ZPP_SUB(keep == 0.0f ? 0.0f : ZPP_MUL(dp, keep), t->delta[i]);
        t->p[at] = keep == 0.0f ? 0.0f : ZPP_MUL(p, keep);
        t->ds[at] = seen ? ZPP_MUL(ZPP_MUL(p, d), a->scale) : 0.0f;
    }
}

/* to [r][d] += sum_c weights(r, c) from [c][d], where weights(r, c) stands at r * by_row + c * by_column. */
static __device__ __forceinline__ void add_product(const struct zpp_sparse_cuda_args *a, const float *weights,
                                                   uint64_t by_row, uint64_t by_column, const float *from, float *to) {
    for (uint64_t at = threadIdx.x; at < a->rows * a->dim; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t r = at / a->dim, d = at % a->dim;
        float total = to[r * (a->dim + 1) + d];
        for (uint64_t c = 0; c < a->rows; ++c) {
            total = fmaf(weights[r * by_row + c * by_column], from[c * (a->dim + 1) + d], total);
        }
        to[r * (a->dim + 1) + d] = total;
    }
}

KERNEL zpp_sparse_attention_cuda_delta(const __grid_constant__ struct zpp_sparse_cuda_args a) {
    const uint64_t i = (uint64_t)blockIdx.x * ZPP_SPARSE_CUDA_THREADS + threadIdx.x;
    if (i >= a.heads_all * a.queries) return;
    float total = 0.0f;
    for (uint64_t d = 0; d < a.dim; ++d) {
        total = fmaf(zpp_cuda_load(a.grad_out, a.dtype, i * a.dim + d),
                     zpp_cuda_load(a.made_out, a.dtype, i * a.dim + d), total);
    }
    a.delta[i] = total;
}

KERNEL zpp_sparse_attention_cuda_queries(const __grid_constant__ struct zpp_sparse_cuda_args a) {
    const struct tiles t = tiles_of(&a, ZPP_SPARSE_CUDA_QUERY_TILES, a.first, a.first + a.queries);
    const struct span span = span_of(&a, t.at.head, t.at.block);
    load_queries(&a, &t, t.at.head, t.at.first);
    zero_tile(&a, t.d1);
    for (uint64_t e = span.begin; e < span.end; ++e) {
        const uint64_t column = (uint64_t)(uint32_t)a.columns[e];
        if (column >= a.blocks || (a.causal && column > t.at.block)) continue;
        const uint64_t most = (column + 1) * a.block, end = most < a.seq ? most : a.seq;
        for (uint64_t key = column * a.block; key < end; key += a.rows) {
            if (a.causal && key >= t.at.first + a.rows) break;
            __syncthreads(); /* the step before still read its tiles */
            load_keys(&a, &t, t.at.head / a.group, key);
            __syncthreads();
            weigh(&a, &t, t.at.head, t.at.first, key);
            __syncthreads();
            add_product(&a, t.ds, a.rows, 1, t.k, t.d1);
        }
    }
    __syncthreads();
    store_tile(&a, t.d1, of_queries(&a, a.q, t.at.head), t.at.first, a.grad_q);
}

/* Row `row` of the layout has column `column`. */
static __device__ __forceinline__ int has_column(const struct zpp_sparse_cuda_args *a, uint64_t head, uint64_t row,
                                                 uint64_t column) {
    const struct span span = span_of(a, head, row);
    uint64_t low = span.begin, high = span.end;
    while (low < high) {
        const uint64_t middle = (low + high) / 2;
        if ((uint64_t)(uint32_t)a->columns[middle] < column) low = middle + 1;
        else high = middle;
    }
    return low < span.end && (uint64_t)(uint32_t)a->columns[low] == column;
}

/* dk and dv of the strip from one row of one head's layout. */
static __device__ __forceinline__ void add_row(const struct zpp_sparse_cuda_args *a, const struct tiles *t,
                                               uint64_t head, uint64_t row) {
    const uint64_t most = (row + 1) * a->block, last = a->first + a->queries, end = most < last ? most : last;
    const uint64_t edge = row * a->block, least = a->first / a->rows * a->rows;
    for (uint64_t query = edge > least ? edge : least; query < end; query += a->rows) {
        if (a->causal && query + a->rows <= t->at.first) continue;
        __syncthreads();
        load_queries(a, t, head, query);
        __syncthreads();
        weigh(a, t, head, query, t->at.first);
        __syncthreads();
        add_product(a, t->ds, 1, a->rows, t->q, t->d1);
        add_product(a, t->p, 1, a->rows, t->go, t->d2);
    }
}

KERNEL zpp_sparse_attention_cuda_keys(const __grid_constant__ struct zpp_sparse_cuda_args a) {
    const struct tiles t = tiles_of(&a, ZPP_SPARSE_CUDA_KEY_TILES, 0, a.seq);
    const uint64_t first_row = a.first / a.block, rows = (a.first + a.queries - 1) / a.block + 1;
    load_keys(&a, &t, t.at.head, t.at.first);
    zero_tile(&a, t.d1);
    zero_tile(&a, t.d2);
    for (uint64_t head = t.at.head * a.group; head < (t.at.head + 1) * a.group; ++head) {
        for (uint64_t row = a.causal && t.at.block > first_row ? t.at.block : first_row; row < rows; ++row) {
            if (has_column(&a, head, row, t.at.block)) add_row(&a, &t, head, row);
        }
    }
    __syncthreads();
    store_tile(&a, t.d1, of_keys(&a, a.k, t.at.head), t.at.first, a.grad_k);
    store_tile(&a, t.d2, of_keys(&a, a.v, t.at.head), t.at.first, a.grad_v);
}
