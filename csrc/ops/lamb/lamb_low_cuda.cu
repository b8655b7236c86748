/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB on CUDA where moments are in bf16 or 8 bits: the first and the last of the four kernels of lamb_cuda.cu; the two
 * between see sums only. The first decodes and forgets, the last makes the moments again and encodes them, so that both
 * have the same u.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
/* Three blocks a processor: left to itself, ptxas takes 64 registers and spills. */
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_LAMB_CUDA_THREADS, 3)
#endif

#include "lamb_cuda.h"

#include "../moments/low_walk_cuda.h"

static __device__ __forceinline__ void low_lamb(const void *consts, float grad, float *p, float *moments) {
    const struct zpp_lamb_low_consts *low = (const struct zpp_lamb_low_consts *)consts;
    struct zpp_lamb_consts c = low->lamb;
    c.rate = *low->rate;
    (void)zpp_lamb_moments(&c, grad, *p, &moments[0], &moments[1]);
    *p = zpp_lamb_moved(&c, *p, moments[0], moments[1]);
}

KERNEL zpp_lamb_low_cuda_lanes(const __grid_constant__ struct zpp_lamb_low_cuda_batch batch) {
    const unsigned int at = blockIdx.x * ZPP_LAMB_CUDA_THREADS + threadIdx.x;
    const unsigned int block = at / ZPP_LAMB_CUDA_LANES, lane = at % ZPP_LAMB_CUDA_LANES;
    if (block >= batch.blocks || zpp_grad_scale_skips(&batch.list.scale)) return;
    const float factor = zpp_grad_scale_factor(&batch.list.scale);
    const unsigned int k = zpp_segment_of(batch.firsts, sizeof batch.firsts[0], batch.list.count, block);
    const struct zpp_low_cuda_segment *s = &batch.list.at[k];
    const uint64_t begin = (uint64_t)(block - batch.firsts[k]) * ZPP_LAMB_CUDA_BLOCK_ELEMS;
    const uint64_t most = begin + ZPP_LAMB_CUDA_BLOCK_ELEMS, end = s->elems < most ? s->elems : most;
    float params = 0.0f, updates = 0.0f;
#pragma unroll 4
    for (uint64_t i = begin + lane; i < end; i += ZPP_LAMB_CUDA_LANES) {
        const uint64_t scale = i / ZPP_LOW_CUDA_THREADS; /* a segment is a whole tensor */
        const float p = s->param[i];
        float m = zpp_low_decoded(s, 0, i, scale), v = zpp_low_decoded(s, 1, i, scale);
        const float g = ZPP_MUL(zpp_cuda_load(s->grad, s->grad_dtype, i), factor);
        const float u = zpp_lamb_moments(&batch.consts[k].lamb, g, p, &m, &v);
        params = ZPP_ADD(params, ZPP_MUL(p, p));
        updates = ZPP_ADD(updates, ZPP_MUL(u, u));
    }
    float *to = batch.lanes + (uint64_t)block * 2 * ZPP_LAMB_CUDA_LANES;
    to[lane] = params;
    to[ZPP_LAMB_CUDA_LANES + lane] = updates;
}

KERNEL zpp_lamb_low_cuda_move(const __grid_constant__ struct zpp_lamb_low_cuda_batch batch) {
    __shared__ struct zpp_low_tops tops;
    low_walk(&batch.list, batch.consts, sizeof batch.consts[0], low_lamb, 0, &tops);
}
