/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB on CUDA, over many tensors: the arithmetic of lamb_body.h and the order of lamb.h, so the CPU's bits; only the
 * payload of a NaN may differ. Four kernels one after the other, with no exchange between threads, so that a CPU can
 * run them too (tests/c/test_lamb_cuda.c):
 *
 *   moments  a thread a lane of a block of 4096 elements: sixteen neighbours on sixteen neighbouring elements; 128
 *            bytes of sums written for 4096 elements
 *   blocks   a thread a block: its lanes in order
 *   rates    a thread a tensor: its blocks in order, its trust ratio
 *   move     a thread an element at a time, with neighbours on neighbours
 *
 * and in place of the last two, where a tensor's norms are sums over more than one process has:
 *
 *   norms    a thread a tensor, those without elements too: its blocks in order
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_LAMB_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "../grad_scale_cuda.h"
#include "../segment_cuda.h"
#include "lamb_cuda.h"
#include "lamb_trust.h"

static __device__ __forceinline__ unsigned int index_of_thread(void) {
    return blockIdx.x * ZPP_LAMB_CUDA_THREADS + threadIdx.x;
}

static __device__ __forceinline__ uint64_t block_begin(const struct zpp_lamb_cuda_segment *s, unsigned int block) {
    return (uint64_t)(block - s->first_block) * ZPP_LAMB_CUDA_BLOCK_ELEMS;
}

static __device__ __forceinline__ uint64_t block_end(const struct zpp_lamb_cuda_segment *s, unsigned int block) {
    const uint64_t most = block_begin(s, block) + ZPP_LAMB_CUDA_BLOCK_ELEMS;
    return s->elems < most ? s->elems : most;
}

KERNEL zpp_lamb_cuda_moments(const __grid_constant__ struct zpp_lamb_cuda_batch batch) {
    const unsigned int block = index_of_thread() / ZPP_LAMB_CUDA_LANES, lane = index_of_thread() % ZPP_LAMB_CUDA_LANES;
    if (block >= batch.blocks || zpp_grad_scale_skips(&batch.scale)) return;
    const float factor = zpp_grad_scale_factor(&batch.scale);
    const struct zpp_lamb_cuda_segment *s = &batch.segments[ZPP_SEGMENT_OF(batch.segments, batch.count, block)];
    const uint64_t end = block_end(s, block);
    float params = 0.0f, updates = 0.0f;
#pragma unroll 4
    for (uint64_t i = block_begin(s, block) + lane; i < end; i += ZPP_LAMB_CUDA_LANES) {
        const float p = s->param[i];
        float m = s->exp_avg[i], v = s->exp_avg_sq[i];
        const float g = ZPP_MUL(zpp_cuda_load(s->grad, s->grad_dtype, i), factor);
        const float u = zpp_lamb_moments(&s->consts, g, p, &m, &v);
        s->exp_avg[i] = m;
        s->exp_avg_sq[i] = v;
        params = ZPP_ADD(params, ZPP_MUL(p, p));
        updates = ZPP_ADD(updates, ZPP_MUL(u, u));
    }
    float *to = batch.lanes + (uint64_t)block * 2 * ZPP_LAMB_CUDA_LANES;
    to[lane] = params;
    to[ZPP_LAMB_CUDA_LANES + lane] = updates;
}

KERNEL zpp_lamb_cuda_blocks(const __grid_constant__ struct zpp_lamb_cuda_batch batch) {
    const unsigned int at = index_of_thread(); /* of either sum of a block */
    if (at >= 2 * batch.blocks) return;
    double sum = 0.0;
    for (int l = 0; l < ZPP_LAMB_CUDA_LANES; ++l) {
        sum = __dadd_rn(sum, (double)batch.lanes[(uint64_t)at * ZPP_LAMB_CUDA_LANES + l]);
    }
    batch.sums[at] = sum;
}

KERNEL zpp_lamb_cuda_rates(const __grid_constant__ struct zpp_lamb_cuda_batch batch) {
    const unsigned int k = index_of_thread();
    if (k >= batch.count) return;
    const struct zpp_lamb_cuda_segment *s = &batch.segments[k];
    const unsigned int end = k + 1 < batch.count ? batch.segments[k + 1].first_block : batch.blocks;
    double params = 0.0, updates = 0.0;
#pragma unroll 4
    for (unsigned int block = s->first_block; block < end; ++block) {
        params = __dadd_rn(params, batch.sums[2 * (uint64_t)block]);
        updates = __dadd_rn(updates, batch.sums[2 * (uint64_t)block + 1]);
    }
    batch.rates[k] = (float)(s->lr * zpp_lamb_trust(params, updates, s->trust_least, s->trust_most));
}

KERNEL zpp_lamb_cuda_norms(const __grid_constant__ struct zpp_lamb_cuda_batch batch) {
    const unsigned int at = index_of_thread();
    if (at >= batch.taken) return;
    double params = 0.0, updates = 0.0;
    for (unsigned int k = 0; k < batch.count && !zpp_grad_scale_skips(&batch.scale); ++k) {
        if (batch.places[k] != at) continue;
        const unsigned int end = k + 1 < batch.count ? batch.segments[k + 1].first_block : batch.blocks;
        for (unsigned int block = batch.segments[k].first_block; block < end; ++block) {
            params = __dadd_rn(params, batch.sums[2 * (uint64_t)block]);
            updates = __dadd_rn(updates, batch.sums[2 * (uint64_t)block + 1]);
        }
    }
    batch.norms[2 * (uint64_t)at] = params;
    batch.norms[2 * (uint64_t)at + 1] = updates;
}

KERNEL zpp_lamb_cuda_move(const __grid_constant__ struct zpp_lamb_cuda_batch batch) {
    if (zpp_grad_scale_skips(&batch.scale)) return;
    const unsigned int block = blockIdx.x, k = ZPP_SEGMENT_OF(batch.segments, batch.count, block);
    const struct zpp_lamb_cuda_segment *s = &batch.segments[k];
    struct zpp_lamb_consts consts = s->consts;
    consts.rate = batch.rates[k];
    const uint64_t end = block_end(s, block);
#pragma unroll 4
    for (uint64_t i = block_begin(s, block) + threadIdx.x; i < end; i += ZPP_LAMB_CUDA_THREADS) {
        const float moved = zpp_lamb_moved(&consts, s->param[i], s->exp_avg[i], s->exp_avg_sq[i]);
        s->param[i] = moved;
        zpp_cuda_store(s->param_out, s->out_dtype, i, moved);
    }
}
