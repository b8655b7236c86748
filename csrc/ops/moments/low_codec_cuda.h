/* SPDX-License-Identifier: Apache-2.0
 *
 * Decoding and encoding of one element of a moment on CUDA, and the greatest magnitude of each block: what the walk
 * over moments in fewer bits (low_walk_cuda.h) has whatever the optimizer.
 */
#ifndef ZPP_OPS_MOMENTS_LOW_CODEC_CUDA_H
#define ZPP_OPS_MOMENTS_LOW_CODEC_CUDA_H

#include "low_cuda.h"
#include "moments_body.h"

enum { ZPP_LOW_CUDA_GROUPS = ZPP_LOW_CUDA_THREADS / ZPP_LOW_CUDA_GROUP };

/* Of one turn: magnitudes of the new moments as bits, and the greatest of each group. */
struct zpp_low_tops {
    uint32_t each[3][ZPP_LOW_CUDA_ROWS][ZPP_LOW_CUDA_THREADS];
    uint32_t most[3][ZPP_LOW_CUDA_ROWS][ZPP_LOW_CUDA_GROUPS];
};

/* Magnitude bits of the k-th moment: a first moment has a sign. */
static __device__ __forceinline__ uint32_t zpp_low_k(const struct zpp_low_cuda_segment *s, int k) {
    return s->first + k == 0 ? 7 : 8;
}

static __device__ __forceinline__ float zpp_low_decoded(const struct zpp_low_cuda_segment *s, int k, uint64_t i,
                                                        uint64_t block) {
    if (!s->int8) return zpp_moments_from_bf16(((const uint16_t *)s->codes[k])[i]);
    return zpp_moments_value(((const uint8_t *)s->codes[k])[i], s->scales[k][block], zpp_low_k(s, k));
}

/* Thread t < 3 * ROWS * GROUPS joins the t-th group; neighbours begin elsewhere in theirs, or all would want one
 * bank. */
static __device__ __forceinline__ void zpp_low_join_groups(struct zpp_low_tops *tops, int moments) {
    enum { ROWS = ZPP_LOW_CUDA_ROWS, GROUPS = ZPP_LOW_CUDA_GROUPS, GROUP = ZPP_LOW_CUDA_GROUP };
    const unsigned int t = threadIdx.x, k = t / (ROWS * GROUPS), row = t / GROUPS % ROWS, group = t % GROUPS;
    if (k >= (unsigned int)moments) return;
    uint32_t most = 0;
    for (unsigned int j = 0; j < GROUP; ++j) {
        const uint32_t one = tops->each[k][row][group * GROUP + (j + t) % GROUP];
        if (one > most) most = one;
    }
    tops->most[k][row][group] = most;
}

/* The k-th moment of element i, in `row` of the turn; `first`: of its block, in this segment. */
static __device__ __forceinline__ void zpp_low_encode(const struct zpp_low_cuda_segment *s,
                                                      const struct zpp_low_tops *tops, int row, int k, uint64_t i,
                                                      uint64_t block, int first, float value) {
    const uint64_t key = s->key + (uint64_t)(s->first + k) * ZPP_MOMENTS_WHICH_KEY;
    const uint32_t random = zpp_moments_random(key, s->index + (uint32_t)i);
    if (!s->int8) {
        ((uint16_t *)s->codes[k])[i] = zpp_moments_to_bf16(value, random);
        return;
    }
    uint32_t most = 0;
    for (int g = 0; g < ZPP_LOW_CUDA_GROUPS; ++g) if (tops->most[k][row][g] > most) most = tops->most[k][row][g];
    float scale, inverse;
    const int finite = zpp_moments_scale_of(most, &scale, &inverse);
    const uint32_t code = finite ? zpp_moments_code(value, inverse, zpp_low_k(s, k), random) : 0;
    ((uint8_t *)s->codes[k])[i] = (uint8_t)code;
    if (first) s->scales[k][block] = scale;
}

#endif
