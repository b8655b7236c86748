/* SPDX-License-Identifier: Apache-2.0
 *
 * The walk of an optimizer's CUDA kernel over moments in bf16 or 8 bits. The optimizer's arithmetic stands between that
 * of moments_body.h, so the CPU's bits; only the payload of a NaN may differ.
 *
 * Chunks count from the block of moments that a segment begins in, so that a thread always has the same place in a
 * block. A turn takes four blocks: each thread decodes and steps its four elements, keeps the new moments in registers
 * and leaves their magnitudes in shared memory; a few threads find the greatest of 32 each; then every thread knows the
 * scale and encodes. bf16 has no scale and needs no barrier. It is C as well: tests/c/cuda_threads.h.
 *
 * `no_master`, a constant of each kernel: parameters are bf16 at param_out, without an fp32 copy.
 */
#ifndef ZPP_OPS_MOMENTS_LOW_WALK_CUDA_H
#define ZPP_OPS_MOMENTS_LOW_WALK_CUDA_H

#include "../element_cuda.h"
#include "../grad_scale_cuda.h"
#include "../segment_cuda.h"
#include "low_codec_cuda.h"

/* An element of a parameter: of its fp32 copy `param`, or (`no_master`) of bf16 `param_out`. */
static __device__ __forceinline__ float zpp_param_at(const float *param, const void *param_out, const int no_master,
                                                     uint64_t i) {
    return no_master ? zpp_moments_from_bf16(((const uint16_t *)param_out)[i]) : param[i];
}

/* Without an fp32 copy it is rounded by random bits of `key`. */
static __device__ __forceinline__ void zpp_put_param(float *param, uint64_t key, void *param_out, int out_dtype,
                                                     const int no_master, uint64_t i, float value) {
    if (no_master) {
        ((uint16_t *)param_out)[i] = zpp_moments_to_bf16(value, zpp_moments_random(key, (uint32_t)i));
        return;
    }
    param[i] = value;
    zpp_cuda_store(param_out, out_dtype, i, value);
}

/* The optimizer's step on one element, with its moments in fp32. */
typedef void (*low_element_fn)(const void *consts, float grad, float *p, float *moments);

/* One element's step; its new moments. */
static __device__ __forceinline__ void low_step(const struct zpp_low_cuda_segment *s, const void *consts,
                                                low_element_fn element, float factor, const int no_master, uint64_t i,
                                                uint64_t block, float moments[3]) {
    for (int k = 0; k < s->moments; ++k) moments[k] = zpp_low_decoded(s, k, i, block);
    float p = zpp_param_at(s->param, s->param_out, no_master, i);
    element(consts, ZPP_MUL(zpp_cuda_load(s->grad, s->grad_dtype, i), factor), &p, moments);
    zpp_put_param(s->param, s->param_key, s->param_out, s->out_dtype, no_master, i, p);
}

/* Elements from `line` on, four blocks of them; `into`: where the segment begins in its first block. */
static __device__ __forceinline__ void low_turn(const struct zpp_low_cuda_segment *s, const void *consts,
                                                low_element_fn element, float factor, const int no_master,
                                                uint64_t line, uint32_t into, struct zpp_low_tops *tops) {
    float moments[ZPP_LOW_CUDA_ROWS][3] = { { 0.0f } };
    for (int row = 0; row < ZPP_LOW_CUDA_ROWS; ++row) {
        const uint64_t at = line + (uint64_t)row * ZPP_LOW_CUDA_THREADS + threadIdx.x;
        const uint64_t i = at - into; /* wraps before the first */
        const uint64_t block = at / ZPP_LOW_CUDA_THREADS;
        if (at >= into && i < s->elems) low_step(s, consts, element, factor, no_master, i, block, moments[row]);
        for (int k = 0; s->int8 && k < s->moments; ++k) {
            tops->each[k][row][threadIdx.x] = ZPP_BITS(moments[row][k]) & ZPP_MOMENTS_ABS;
        }
    }
    if (s->int8) { /* the same for all threads of a block */
        __syncthreads();
        zpp_low_join_groups(tops, s->moments);
        __syncthreads();
    }
    for (int row = 0; row < ZPP_LOW_CUDA_ROWS; ++row) {
        const uint64_t at = line + (uint64_t)row * ZPP_LOW_CUDA_THREADS + threadIdx.x, i = at - into;
        if (at < into || i >= s->elems) continue;
        const int first = i == 0 || threadIdx.x == 0;
        for (int k = 0; k < s->moments; ++k) {
            zpp_low_encode(s, tops, row, k, i, at / ZPP_LOW_CUDA_THREADS, first, moments[row][k]);
        }
    }
}

/* `consts`: an array of the optimizer's constants, consts_bytes each, one a segment; `tops` is in shared memory. */
static __device__ __forceinline__ void low_walk(const struct zpp_low_cuda_segments *list, const void *consts,
                                                uint64_t consts_bytes, low_element_fn element, const int no_master,
                                                struct zpp_low_tops *tops) {
    if (zpp_grad_scale_skips(&list->scale)) return; /* all threads of all blocks */
    const float factor = zpp_grad_scale_factor(&list->scale);
    const unsigned int k = ZPP_SEGMENT_OF(list->at, list->count, blockIdx.x);
    const struct zpp_low_cuda_segment *s = &list->at[k];
    const uint32_t into = s->index % ZPP_LOW_CUDA_THREADS;
    const uint64_t begin = (uint64_t)(blockIdx.x - s->first_block) * ZPP_LOW_CUDA_CHUNK_ELEMS;
    const uint64_t all = s->elems + into, left = all - begin;
    const uint64_t end = begin + (left < ZPP_LOW_CUDA_CHUNK_ELEMS ? left : ZPP_LOW_CUDA_CHUNK_ELEMS);
    for (uint64_t line = begin; line < end; line += (uint64_t)ZPP_LOW_CUDA_ROWS * ZPP_LOW_CUDA_THREADS) {
        low_turn(s, (const char *)consts + k * consts_bytes, element, factor, no_master, line, into, tops);
    }
}

#endif
