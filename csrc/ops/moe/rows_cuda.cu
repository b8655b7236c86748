/* SPDX-License-Identifier: Apache-2.0
 *
 * Plan, dispatch, combine and the backward of combine on CUDA, with the CPU's results (plan.c, rows.c), bit for bit.
 *
 * Plan: a block an expert. Its threads cut the walk over assignments among them, count their own, and walk again from
 * what the threads before them counted. Two walks, since assignments are kept in order of choices, and placed in order
 * of tokens. The random order of tokens is drawn by one thread: each draw follows from the one before.
 *
 * Rows: a block an assignment, or a token, or a row of the buffer. What is not a slot is left out: slots are checked on
 * the CPU only.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
/* Eight blocks a processor: left to itself, ptxas takes 32 registers for more of them, and spills. */
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_ROWS_CUDA_THREADS, 8)
#endif

#include "../copy_words_cuda.h"
#include "../element_cuda.h"
#include "../random.h"
#include "rows_cuda.h"

/* --- plan --------------------------------------------------------------------------------------------------------- */
KERNEL zpp_moe_cuda_shuffle(const __grid_constant__ struct zpp_rows_cuda_args a) {
    if (threadIdx.x != 0) return;
    uint64_t state = a.seed;
    for (uint64_t i = 0; i < a.tokens; ++i) {
        const uint32_t j = zpp_random_below(&state, (uint32_t)(i + 1));
        a.order[i] = (uint32_t)i;
        a.order[i] = a.order[j];
        a.order[j] = (uint32_t)i;
    }
}

KERNEL zpp_moe_cuda_drop(const __grid_constant__ struct zpp_rows_cuda_args a) {
    const uint64_t at = (uint64_t)blockIdx.x * ZPP_ROWS_CUDA_THREADS + threadIdx.x;
    if (at < a.tokens * a.k) a.slots[at] = -1;
}

/* This thread's part of the walk over all assignments. */
struct piece {
    uint64_t begin, end;
};
static __device__ __forceinline__ struct piece piece_of(const struct zpp_rows_cuda_args *a) {
    const uint64_t all = a->tokens * a->k;
    const uint64_t each = (all + ZPP_ROWS_CUDA_THREADS - 1) / ZPP_ROWS_CUDA_THREADS;
    struct piece piece = { threadIdx.x * each, (threadIdx.x + 1) * each };
    if (piece.begin > all) piece.begin = all;
    if (piece.end > all) piece.end = all;
    return piece;
}

/* What the threads before this one counted; *total: all of them. */
static __device__ __forceinline__ uint64_t counted_before(uint64_t mine, uint64_t *counts, uint64_t *total) {
    uint64_t before = 0, sum = 0;
    counts[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned int t = 0; t < ZPP_ROWS_CUDA_THREADS; ++t) {
        if (t == threadIdx.x) before = sum;
        sum += counts[t];
    }
    *total = sum;
    return before;
}

/* The assignment at a place of the walk by choices. */
static __device__ __forceinline__ uint64_t by_choices(const struct zpp_rows_cuda_args *a, uint64_t place) {
    const uint64_t j = place / a->tokens, i = place % a->tokens;
    return (a->order ? a->order[i] : i) * a->k + j;
}

KERNEL zpp_moe_cuda_keep(const __grid_constant__ struct zpp_rows_cuda_args a) {
    __shared__ uint64_t counts[ZPP_ROWS_CUDA_THREADS];
    const struct piece piece = piece_of(&a);
    const int32_t expert = (int32_t)blockIdx.x;
    uint64_t mine = 0, total;
    for (uint64_t p = piece.begin; p < piece.end; ++p) mine += a.chosen[by_choices(&a, p)] == expert;
    uint64_t n = counted_before(mine, counts, &total);
    for (uint64_t p = piece.begin; p < piece.end; ++p) {
        const uint64_t at = by_choices(&a, p);
        if (a.chosen[at] != expert) continue;
        if (a.capacity == 0 || n < a.capacity) a.slots[at] = 0;
        ++n;
    }
    if (threadIdx.x == 0) a.kept[expert] = (int64_t)(a.capacity && total > a.capacity ? a.capacity : total);
}

KERNEL zpp_moe_cuda_place(const __grid_constant__ struct zpp_rows_cuda_args a) {
    __shared__ uint64_t counts[ZPP_ROWS_CUDA_THREADS];
    const struct piece piece = piece_of(&a);
    const int32_t expert = (int32_t)blockIdx.x;
    uint64_t row = blockIdx.x * a.capacity, mine = 0, total;
    for (unsigned int e = 0; e < blockIdx.x && a.capacity == 0; ++e) row += (uint64_t)a.kept[e];
    for (uint64_t at = piece.begin; at < piece.end; ++at) mine += a.chosen[at] == expert && a.slots[at] >= 0;
    row += counted_before(mine, counts, &total);
    for (uint64_t at = piece.begin; at < piece.end; ++at) {
        if (a.chosen[at] == expert && a.slots[at] >= 0) a.slots[at] = (int32_t)row++;
    }
}

/* --- rows --------------------------------------------------------------------------------------------------------- */
static __device__ __forceinline__ int is_row(const struct zpp_rows_cuda_args *a, int32_t slot) {
    return slot >= 0 && (uint64_t)slot < a->buffer_rows;
}

KERNEL zpp_moe_cuda_dispatch(const __grid_constant__ struct zpp_rows_cuda_args a) {
    const int32_t slot = a.slots[blockIdx.x];
    const uint64_t row_bytes = a.row_words * a.word_bytes;
    if (!is_row(&a, slot)) return;
    zpp_words_copy((char *)a.out + (uint64_t)slot * row_bytes,
                   (const char *)a.tokens_in + blockIdx.x / a.k * row_bytes, a.row_words, a.word_bytes,
                   ZPP_ROWS_CUDA_THREADS);
}

/* The rows of each expert beyond those that are used. */
KERNEL zpp_moe_cuda_blank(const __grid_constant__ struct zpp_rows_cuda_args a) {
    if ((int64_t)(blockIdx.x % a.capacity) < a.kept[blockIdx.x / a.capacity]) return;
    zpp_words_copy((char *)a.out + blockIdx.x * a.row_words * a.word_bytes, NULL, a.row_words, a.word_bytes,
                   ZPP_ROWS_CUDA_THREADS);
}

KERNEL zpp_moe_cuda_combine(const __grid_constant__ struct zpp_rows_cuda_args a) {
    const uint64_t token = blockIdx.x;
    for (uint64_t i = threadIdx.x; i < a.width_elems; i += ZPP_ROWS_CUDA_THREADS) {
        float total = 0.0f;
        int first = 1;
        for (uint64_t j = 0; j < a.k; ++j) {
            const int32_t slot = a.slots[token * a.k + j];
            if (!is_row(&a, slot)) continue;
            const float value = zpp_cuda_load(a.buffer_in, a.dtype, (uint64_t)slot * a.width_elems + i);
            const float part = a.weights ? ZPP_MUL(a.weights[token * a.k + j], value) : value;
            total = first ? part : ZPP_ADD(total, part);
            first = 0;
        }
        zpp_cuda_store(a.out, a.dtype, token * a.width_elems + i, total);
    }
}

KERNEL zpp_moe_cuda_combine_backward(const __grid_constant__ struct zpp_rows_cuda_args a) {
    __shared__ float lanes[ZPP_ROWS_CUDA_LANES];
    const int32_t slot = a.slots[blockIdx.x];
    const int live = is_row(&a, slot); /* of the whole block */
    const uint64_t grad = blockIdx.x / a.k * a.width_elems, row = live ? (uint64_t)slot * a.width_elems : 0;
    const float weight = a.weights[blockIdx.x];
    for (uint64_t i = threadIdx.x; i < a.width_elems && live; i += ZPP_ROWS_CUDA_THREADS) {
        zpp_cuda_store(a.out, a.dtype, row + i, ZPP_MUL(weight, zpp_cuda_load(a.tokens_in, a.dtype, grad + i)));
    }
    if (threadIdx.x < ZPP_ROWS_CUDA_LANES) {
        float sum = 0.0f;
#pragma unroll 4
        for (uint64_t i = threadIdx.x; i < a.width_elems && live; i += ZPP_ROWS_CUDA_LANES) {
            sum = ZPP_ADD(sum, ZPP_MUL(zpp_cuda_load(a.buffer_in, a.dtype, row + i),
                                       zpp_cuda_load(a.tokens_in, a.dtype, grad + i)));
        }
        lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int width = ZPP_ROWS_CUDA_LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] = ZPP_ADD(lanes[l], lanes[l + width]);
    }
    a.grad_weights[blockIdx.x] = lanes[0];
}
