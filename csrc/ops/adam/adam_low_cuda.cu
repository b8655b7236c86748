/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on moments in bf16 or 8 bits on CUDA: the arithmetic of adam_body.h between that of moments_body.h, so the CPU's
 * bits; only the payload of a NaN may differ.
 *
 * Chunks count from the block of moments that a segment begins in, so that a thread always has the same place in a
 * block. A turn takes four blocks: each thread decodes and steps its four elements, keeps the new moments in registers
 * and leaves their magnitudes in shared memory; a few threads find the greatest of 32 each; then every thread knows the
 * scale and encodes. bf16 has no scale and needs no barrier. It is C as well: tests/c/test_ops_adam_low_cuda.c.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_ADAM_LOW_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "../segment_cuda.h"
#include "adam_low_cuda.h"

enum { THREADS = ZPP_ADAM_LOW_CUDA_THREADS, ROWS = ZPP_ADAM_LOW_CUDA_ROWS, GROUP = ZPP_ADAM_LOW_CUDA_GROUP,
       GROUPS = THREADS / GROUP };

/* Of one turn: magnitudes of the new moments as bits, and the greatest of each group. */
struct turn_tops {
    uint32_t each[3][ROWS][THREADS];
    uint32_t most[3][ROWS][GROUPS];
};

static __device__ __forceinline__ uint32_t k_of(int moment) { return moment == 0 ? 7 : 8; }

static __device__ __forceinline__ float decoded(const struct zpp_adam_low_cuda_segment *s, int moment, uint64_t i,
                                                uint64_t block) {
    if (!s->int8) return zpp_moments_from_bf16(((const uint16_t *)s->codes[moment])[i]);
    return zpp_moments_value(((const uint8_t *)s->codes[moment])[i], s->scales[moment][block], k_of(moment));
}

static __device__ __forceinline__ uint32_t random_of(const struct zpp_adam_low_cuda_segment *s, int moment,
                                                     uint64_t i) {
    return zpp_moments_random(s->key + (uint64_t)moment * ZPP_MOMENTS_WHICH_KEY, s->index + (uint32_t)i);
}

/* One element's step; its new moments. */
static __device__ __forceinline__ void step(const struct zpp_adam_low_cuda_segment *s, uint64_t i, uint64_t block,
                                            float moments[3]) {
    for (int k = 0; k < s->moments; ++k) moments[k] = decoded(s, k, i, block);
    float p = s->param[i];
    zpp_adam_element(&s->consts, zpp_cuda_load(s->grad, s->grad_kind, i), &p, &moments[0], &moments[1],
                     s->moments == 3 ? &moments[2] : NULL);
    s->param[i] = p;
    zpp_cuda_store(s->param_out, s->out_kind, i, p);
}

/* Thread t < 3 * ROWS * GROUPS joins the t-th group; neighbours begin elsewhere in theirs, or all would want one
 * bank. */
static __device__ __forceinline__ void join_groups(struct turn_tops *tops, int moments) {
    const unsigned int t = threadIdx.x, moment = t / (ROWS * GROUPS), row = t / GROUPS % ROWS, group = t % GROUPS;
    if (moment >= (unsigned int)moments) return;
    uint32_t most = 0;
    for (unsigned int j = 0; j < GROUP; ++j) {
        const uint32_t one = tops->each[moment][row][group * GROUP + (j + t) % GROUP];
        if (one > most) most = one;
    }
    tops->most[moment][row][group] = most;
}

static __device__ __forceinline__ void encode(const struct zpp_adam_low_cuda_segment *s, const struct turn_tops *tops,
                                              int row, int moment, uint64_t i, uint64_t block, int first, float value) {
    uint32_t most = 0;
    for (int g = 0; g < GROUPS; ++g) if (tops->most[moment][row][g] > most) most = tops->most[moment][row][g];
    float scale, inverse;
    const int finite = zpp_moments_scale_of(most, &scale, &inverse);
    const uint32_t code = finite ? zpp_moments_code(value, inverse, k_of(moment), random_of(s, moment, i)) : 0;
    ((uint8_t *)s->codes[moment])[i] = (uint8_t)code;
    if (first) s->scales[moment][block] = scale;
}

/* Elements from `line` on, four blocks of them; `into`: where the segment begins in its first block. */
static __device__ __forceinline__ void turn(const struct zpp_adam_low_cuda_segment *s, uint64_t line, uint32_t into,
                                            struct turn_tops *tops) {
    float moments[ROWS][3] = { { 0.0f } };
    for (int row = 0; row < ROWS; ++row) {
        const uint64_t at = line + (uint64_t)row * THREADS + threadIdx.x, i = at - into; /* wraps before the first */
        if (at >= into && i < s->elems) step(s, i, at / THREADS, moments[row]);
        for (int k = 0; s->int8 && k < s->moments; ++k) {
            tops->each[k][row][threadIdx.x] = ZPP_BITS(moments[row][k]) & ZPP_MOMENTS_ABS;
        }
    }
    if (s->int8) { /* the same for all threads of a block */
        __syncthreads();
        join_groups(tops, s->moments);
        __syncthreads();
    }
    for (int row = 0; row < ROWS; ++row) {
        const uint64_t at = line + (uint64_t)row * THREADS + threadIdx.x, i = at - into;
        if (at < into || i >= s->elems) continue;
        const int first = i == 0 || threadIdx.x == 0;
        for (int k = 0; k < s->moments; ++k) {
            if (s->int8) encode(s, tops, row, k, i, at / THREADS, first, moments[row][k]);
            else ((uint16_t *)s->codes[k])[i] = zpp_moments_to_bf16(moments[row][k], random_of(s, k, i));
        }
    }
}

KERNEL zpp_adam_low_cuda(const __grid_constant__ struct zpp_adam_low_cuda_batch batch) {
    __shared__ struct turn_tops tops;
    const struct zpp_adam_low_cuda_segment *s =
        &batch.segments[ZPP_SEGMENT_OF(batch.segments, batch.segments_count, blockIdx.x)];
    const uint32_t into = s->index % THREADS;
    const uint64_t begin = (uint64_t)(blockIdx.x - s->first_block) * ZPP_ADAM_LOW_CUDA_CHUNK_ELEMS;
    const uint64_t all = s->elems + into, left = all - begin;
    const uint64_t end = begin + (left < ZPP_ADAM_LOW_CUDA_CHUNK_ELEMS ? left : ZPP_ADAM_LOW_CUDA_CHUNK_ELEMS);
    for (uint64_t line = begin; line < end; line += (uint64_t)ROWS * THREADS) turn(s, line, into, &tops);
}
