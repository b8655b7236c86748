/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention on CUDA, backward (formulas: sparse_attention.h). Scores are computed again. Three kernels:
 *
 *   delta     a thread a query: <do_i, o_i>
 *   queries   a block a strip of queries, over the keys of its row: dq
 *   keys      a block a strip of keys, over the rows whose layout has them, found by bisection: dk and dv
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
    uint64_t head, first, block; /* of the strip: its first row, and its block of the layout */
    float *q, *go, *k, *v, *d1, *d2; /* d1: dq or dk; d2: dv */
    float *p, *ds, *lse, *delta;     /* [queries][keys]; of the queries */
};

/* Tiles of a kernel that has dv or has not. */
static __device__ __forceinline__ struct tiles tiles_of(const struct zpp_sparse_cuda_args *a, int tiles) {
    const struct place place = place_of(a);
    const uint64_t tile = a->rows * (a->dim + 1);
    struct tiles t;
    t.head = place.head, t.first = place.first, t.block = place.block;
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
                                                    uint64_t query) {
    load_tile(a, a->q, t->head, query, t->q);
    load_tile(a, a->grad_out, t->head, query, t->go);
    if (threadIdx.x >= a->rows) return;
    const uint64_t i = query + threadIdx.x;
    t->lse[threadIdx.x] = i < a->seq ? a->lse[t->head * a->seq + i] : -INFINITY;
    t->delta[threadIdx.x] = i < a->seq ? a->delta[t->head * a->seq + i] : 0.0f;
}

static __device__ __forceinline__ void load_keys(const struct zpp_sparse_cuda_args *a, const struct tiles *t,
                                                 uint64_t key) {
    load_tile(a, a->k, t->head, key, t->k);
    load_tile(a, a->v, t->head, key, t->v);
}

/* p and ds of queries by keys. */
static __device__ __forceinline__ void weigh(const struct zpp_sparse_cuda_args *a, const struct tiles *t,
                                             uint64_t query, uint64_t key) {
    for (uint64_t at = threadIdx.x; at < (uint64_t)a->rows * a->rows; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t i = at / a->rows, j = at % a->rows;
        const int seen = is_seen(a, t->head, query + i, key + j) && t->lse[i] != -INFINITY;
        const float s = ZPP_MUL(product(a, t->q, i, t->k, j), a->scale);
        const float p = seen ? zpp_exp_or_zero(ZPP_SUB(s, t->lse[i])) : 0.0f;
        const float d = ZPP_SUB(product(a, t->go, i, t->v, j), t->delta[i]);
        t->p[at] = p;
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
    if (i >= a.heads_all * a.seq) return;
    float total = 0.0f;
    for (uint64_t d = 0; d < a.dim; ++d) {
        total = fmaf(zpp_cuda_load(a.grad_out, a.dtype, i * a.dim + d),
                     zpp_cuda_load(a.made_out, a.dtype, i * a.dim + d), total);
    }
    a.delta[i] = total;
}

KERNEL zpp_sparse_attention_cuda_queries(const __grid_constant__ struct zpp_sparse_cuda_args a) {
    const struct tiles t = tiles_of(&a, ZPP_SPARSE_CUDA_QUERY_TILES);
    const struct span span = span_of(&a, t.head, t.block);
    load_queries(&a, &t, t.first);
    zero_tile(&a, t.d1);
    for (uint64_t e = span.begin; e < span.end; ++e) {
        const uint64_t column = (uint64_t)(uint32_t)a.columns[e];
        if (column >= a.blocks || (a.causal && column > t.block)) continue;
        const uint64_t most = (column + 1) * a.block, end = most < a.seq ? most : a.seq;
        for (uint64_t key = column * a.block; key < end; key += a.rows) {
            if (a.causal && key >= t.first + a.rows) break;
            __syncthreads(); /* the step before still read its tiles */
            load_keys(&a, &t, key);
            __syncthreads();
            weigh(&a, &t, t.first, key);
            __syncthreads();
            add_product(&a, t.ds, a.rows, 1, t.k, t.d1);
        }
    }
    __syncthreads();
    store_tile(&a, t.d1, t.head, t.first, a.grad_q);
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

KERNEL zpp_sparse_attention_cuda_keys(const __grid_constant__ struct zpp_sparse_cuda_args a) {
    const struct tiles t = tiles_of(&a, ZPP_SPARSE_CUDA_KEY_TILES);
    load_keys(&a, &t, t.first);
    zero_tile(&a, t.d1);
    zero_tile(&a, t.d2);
    for (uint64_t row = a.causal ? t.block : 0; row < a.blocks; ++row) {
        if (!has_column(&a, t.head, row, t.block)) continue;
        const uint64_t most = (row + 1) * a.block, end = most < a.seq ? most : a.seq;
        for (uint64_t query = row * a.block; query < end; query += a.rows) {
            if (a.causal && query + a.rows <= t.first) continue;
            __syncthreads();
            load_queries(&a, &t, query);
            __syncthreads();
            weigh(&a, &t, query, t.first);
            __syncthreads();
            add_product(&a, t.ds, 1, a.rows, t.q, t.d1);
            add_product(&a, t.p, 1, a.rows, t.go, t.d2);
        }
    }
    __syncthreads();
    store_tile(&a, t.d1, t.head, t.first, a.grad_k);
    store_tile(&a, t.d2, t.head, t.first, a.grad_v);
}
