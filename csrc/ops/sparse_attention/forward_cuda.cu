/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention on CUDA, forward: a block of threads takes a strip of queries (tiles_cuda.h) through the keys
 * that its row of the layout has, with the online softmax of the CPU's version (forward.c). Sums are in fp32 and go in
 * the same order, but a step has another number of keys: equal to the CPU but for rounding. Products are plain
 * multiply-adds, not tensor cores: a first version, that no GPU has timed.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
/* One block a processor at least: left to itself, ptxas saves registers for more of them, and spills. */
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_SPARSE_CUDA_THREADS, 1)
#endif

#include <float.h>
#include <math.h>
#include <stdint.h>

#include "../element_cuda.h"
#include "../exp.h"
#include "tiles_cuda.h"

struct strip {
    uint64_t head, first, row; /* first: position of the first query; row of the layout */
    float *q, *keys, *out;     /* keys: k, then v */
    float *scores, *most, *sum, *factor;
};

static __device__ __forceinline__ struct strip strip_of(const struct zpp_sparse_cuda_args *a) {
    const struct place place = place_of(a, a->first, a->first + a->queries);
    const uint64_t tile = a->rows * (a->dim + 1);
    struct strip s;
    s.head = place.head, s.first = place.first, s.row = place.block;
    s.q = scratch;
    s.keys = s.q + tile;
    s.out = s.keys + tile;
    s.scores = s.out + tile;
    s.most = s.scores + (uint64_t)a->rows * a->rows;
    s.sum = s.most + a->rows;
    s.factor = s.sum + a->rows;
    return s;
}

static __device__ __forceinline__ void score(const struct zpp_sparse_cuda_args *a, const struct strip *s,
                                             uint64_t key) {
    for (uint64_t at = threadIdx.x; at < (uint64_t)a->rows * a->rows; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t i = at / a->rows, j = at % a->rows;
        const int seen = is_seen(a, s->head, s->first + i, key + j);
        s->scores[at] = seen ? ZPP_MUL(product(a, s->q, i, s->keys, j), a->scale) : -INFINITY;
    }
}

/* Weights of dropped keys become 0, after their sum. */
static __device__ __forceinline__ void drop(const struct zpp_sparse_cuda_args *a, const struct strip *s, uint64_t key) {
    for (uint64_t at = threadIdx.x; at < (uint64_t)a->rows * a->rows; at += ZPP_SPARSE_CUDA_THREADS) {
        const float keep = keep_of(a, s->head, s->first + at / a->rows, key + at % a->rows);
        s->scores[at] = keep == 0.0f ? 0.0f : ZPP_MUL(s->scores[at], keep);
    }
}

/* A thread a query: the maximum and sum carried on, scores become weights. */
static __device__ __forceinline__ void softmax(const struct zpp_sparse_cuda_args *a, const struct strip *s) {
    if (threadIdx.x >= a->rows) return;
    float *scores = s->scores + threadIdx.x * a->rows, most = s->most[threadIdx.x];
    for (uint32_t j = 0; j < a->rows; ++j) most = scores[j] > most ? scores[j] : most;
    const float shift = most > -FLT_MAX ? most : -FLT_MAX; /* nothing seen yet: -inf - shift is -inf, not NaN */
    const float factor = zpp_exp_or_zero(ZPP_SUB(s->most[threadIdx.x], shift));
    float sum = ZPP_MUL(s->sum[threadIdx.x], factor);
    for (uint32_t j = 0; j < a->rows; ++j) {
        scores[j] = zpp_exp_or_zero(ZPP_SUB(scores[j], shift));
        sum = ZPP_ADD(sum, scores[j]);
    }
    s->most[threadIdx.x] = most, s->sum[threadIdx.x] = sum, s->factor[threadIdx.x] = factor;
}

static __device__ __forceinline__ void add_values(const struct zpp_sparse_cuda_args *a, const struct strip *s) {
    for (uint64_t at = threadIdx.x; at < a->rows * a->dim; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t i = at / a->dim, d = at % a->dim;
        float total = ZPP_MUL(s->out[i * (a->dim + 1) + d], s->factor[i]);
        for (uint32_t j = 0; j < a->rows; ++j) {
            total = fmaf(s->scores[i * a->rows + j], s->keys[j * (a->dim + 1) + d], total);
        }
        s->out[i * (a->dim + 1) + d] = total;
    }
}

static __device__ __forceinline__ void step(const struct zpp_sparse_cuda_args *a, const struct strip *s, uint64_t key) {
    __syncthreads(); /* the step before still read keys and weights */
    load_tile(a, of_keys(a, a->k, s->head / a->group), key, s->keys);
    __syncthreads();
    score(a, s, key);
    __syncthreads();
    load_tile(a, of_keys(a, a->v, s->head / a->group), key, s->keys);
    softmax(a, s);
    __syncthreads();
    if (a->dropout > 0.0f) {
        drop(a, s, key);
        __syncthreads();
    }
    add_values(a, s);
}

static __device__ __forceinline__ void finish(const struct zpp_sparse_cuda_args *a, const struct strip *s) {
    __syncthreads();
    if (threadIdx.x < a->rows) {
        const float sum = s->sum[threadIdx.x], lse = ZPP_ADD(s->most[threadIdx.x], logf(sum));
        const uint64_t i = s->first + threadIdx.x - a->first; /* before the first one: far beyond the last */
        s->factor[threadIdx.x] = sum == 0.0f ? 0.0f : ZPP_DIV(1.0f, sum); /* a query that sees nothing */
        if (i < a->queries) a->lse[s->head * a->queries + i] = sum == 0.0f ? -INFINITY : lse;
    }
    __syncthreads();
    for (uint64_t at = threadIdx.x; at < a->rows * a->dim; at += ZPP_SPARSE_CUDA_THREADS) {
        float *out = &s->out[at / a->dim * (a->dim + 1) + at % a->dim];
        *out = ZPP_MUL(*out, s->factor[at / a->dim]);
    }
    __syncthreads();
    store_tile(a, s->out, of_queries(a, a->out, s->head), s->first, a->out);
}

KERNEL zpp_sparse_attention_cuda(const __grid_constant__ struct zpp_sparse_cuda_args a) {
    const struct strip s = strip_of(&a);
    const struct span span = span_of(&a, s.head, s.row);
    load_tile(&a, of_queries(&a, a.q, s.head), s.first, s.q);
    zero_tile(&a, s.out);
    if (threadIdx.x < a.rows) s.most[threadIdx.x] = -INFINITY, s.sum[threadIdx.x] = 0.0f;
    for (uint64_t e = span.begin; e < span.end; ++e) {
        const uint64_t column = (uint64_t)(uint32_t)a.columns[e];
        if (column >= a.blocks || (a.causal && column > s.row)) continue;
        const uint64_t most = (column + 1) * a.block, end = most < a.seq ? most : a.seq;
        for (uint64_t key = column * a.block; key < end; key += a.rows) {
            if (!a.causal || key < s.first + a.rows) step(&a, &s, key);
        }
    }
    finish(&a, &s);
}
