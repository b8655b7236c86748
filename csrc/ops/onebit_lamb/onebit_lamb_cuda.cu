/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms on CUDA, over many tensors: the arithmetic of onebit_lamb_body.h and the order
 * of onebit_lamb.h, so the CPU's bits; only the payload of a NaN may differ. Three kernels one after the other, with no
 * exchange between threads, so that a CPU can run them too (tests/c/test_onebit_lamb_cuda.c):
 *
 *   lanes    a thread a lane of a block of 4096 elements: sixteen neighbours on sixteen neighbouring elements; 192
 *            bytes written for 4096 elements
 *   blocks   a thread a block: its lanes in order
 *   tensors  a thread a tensor: its blocks in order
 */
#ifndef ZPP_ON_CPU
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_ONEBIT_LAMB_CUDA_THREADS)
#endif

#include "../segment_cuda.h"
#include "onebit_lamb_cuda.h"

static __device__ __forceinline__ unsigned int index_of_thread(void) {
    return blockIdx.x * ZPP_ONEBIT_LAMB_CUDA_THREADS + threadIdx.x;
}

KERNEL zpp_onebit_lamb_cuda_lanes(const __grid_constant__ struct zpp_onebit_lamb_cuda_batch batch) {
    const unsigned int at = index_of_thread();
    const unsigned int block = at / ZPP_ONEBIT_LAMB_CUDA_LANES;
    if (block >= batch.blocks) return;
    const struct zpp_onebit_lamb_cuda_segment *s = &batch.segments[ZPP_SEGMENT_OF(batch.segments, batch.count, block)];
    const uint64_t begin = (uint64_t)(block - s->first_block) * ZPP_ONEBIT_LAMB_CUDA_BLOCK_ELEMS;
    const uint64_t most = begin + ZPP_ONEBIT_LAMB_CUDA_BLOCK_ELEMS, end = s->elems < most ? s->elems : most;
    struct zpp_onebit_lamb_lane lane = { 0.0f, 0.0f, 0.0f };
#pragma unroll 4
    for (uint64_t i = begin + at % ZPP_ONEBIT_LAMB_CUDA_LANES; i < end; i += ZPP_ONEBIT_LAMB_CUDA_LANES) {
        s->fresh_sq[i] = zpp_onebit_lamb_element(&s->consts, s->param[i], s->exp_avg[i], s->before[i],
                                                 s->exp_avg_sq[i], s->fresh_sq[i], &lane);
    }
    batch.lanes[at] = lane;
}

KERNEL zpp_onebit_lamb_cuda_blocks(const __grid_constant__ struct zpp_onebit_lamb_cuda_batch batch) {
    const unsigned int block = index_of_thread();
    if (block >= batch.blocks) return;
    const struct zpp_onebit_lamb_lane *of_block = batch.lanes + (uint64_t)block * ZPP_ONEBIT_LAMB_CUDA_LANES;
    double alone = 0.0, both = 0.0;
    float largest = 0.0f;
    for (int l = 0; l < ZPP_ONEBIT_LAMB_CUDA_LANES; ++l) {
        alone = __dadd_rn(alone, (double)of_block[l].alone);
        both = __dadd_rn(both, (double)of_block[l].both);
        largest = lanes_max_bits(largest, of_block[l].largest);
    }
    batch.block_sums[2 * (uint64_t)block] = alone;
    batch.block_sums[2 * (uint64_t)block + 1] = both;
    batch.block_largest[block] = largest;
}

KERNEL zpp_onebit_lamb_cuda_tensors(const __grid_constant__ struct zpp_onebit_lamb_cuda_batch batch) {
    const unsigned int k = index_of_thread();
    if (k >= batch.count) return;
    const unsigned int end = k + 1 < batch.count ? batch.segments[k + 1].first_block : batch.blocks;
    double alone = 0.0, both = 0.0;
    float largest = 0.0f;
#pragma unroll 4
    for (unsigned int block = batch.segments[k].first_block; block < end; ++block) {
        alone = __dadd_rn(alone, batch.block_sums[2 * (uint64_t)block]);
        both = __dadd_rn(both, batch.block_sums[2 * (uint64_t)block + 1]);
        largest = lanes_max_bits(largest, batch.block_largest[block]);
    }
    batch.sums[2 * (uint64_t)k] = alone;
    batch.sums[2 * (uint64_t)k + 1] = both;
    batch.largest[k] = largest;
}
