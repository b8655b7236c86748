/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum of squares on CUDA, in the order that norm.h states, so with the CPU's bits. Four kernels one after the
 * other, with no exchange between threads, so that a CPU can run them too (tests/c/test_ops_norm_cuda.c):
 *
 *   zero      a thread a segment: its number of non-finite elements, which lanes add to
 *   lanes     a thread a lane of a block: neighbouring threads read neighbouring elements; 8 bytes written for 128
 *             elements read
 *   blocks    a thread a block: the tree over its lanes
 *   segments  a thread a segment: its blocks one after the other, which the order asks for
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_NORM_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "../round.h"
#include "../segment_cuda.h"
#include "norm_cuda.h"

static __device__ __forceinline__ unsigned int index_of_thread(void) {
    return blockIdx.x * ZPP_NORM_CUDA_THREADS + threadIdx.x;
}

/* Element i, which in float64 is exact for every type, and counted where it is not finite. */
static __device__ __forceinline__ double element(const struct zpp_norm_cuda_segment *s, uint64_t i,
                                                 unsigned long long *nonfinite) {
    if (s->dtype == ZPP_CUDA_F64) {
        const double wide = ((const double *)s->data)[i];
        *nonfinite += !(wide - wide == 0.0);
        return wide;
    }
    const float x = zpp_cuda_load(s->data, (int)s->dtype, i);
    *nonfinite += (ZPP_BITS(x) & 0x7f800000u) == 0x7f800000u;
    return (double)x;
}

KERNEL zpp_norm_cuda_zero(const __grid_constant__ struct zpp_norm_cuda_batch batch) {
    if (index_of_thread() < batch.count) batch.nonfinite[index_of_thread()] = 0;
}

KERNEL zpp_norm_cuda_lanes(const __grid_constant__ struct zpp_norm_cuda_batch batch) {
    const unsigned int block = index_of_thread() / ZPP_NORM_CUDA_LANES, lane = index_of_thread() % ZPP_NORM_CUDA_LANES;
    if (block >= batch.blocks) return;
    const unsigned int k = ZPP_SEGMENT_OF(batch.segments, batch.count, block);
    const struct zpp_norm_cuda_segment *s = &batch.segments[k];
    const uint64_t begin = (uint64_t)(block - s->first_block) * ZPP_NORM_CUDA_BLOCK_ELEMS;
    const uint64_t most = begin + ZPP_NORM_CUDA_BLOCK_ELEMS, end = s->elems < most ? s->elems : most;
    double sum = 0.0;
    unsigned long long nonfinite = 0;
#pragma unroll 4
    for (uint64_t i = begin + lane; i < end; i += ZPP_NORM_CUDA_LANES) {
        const double x = element(s, i, &nonfinite);
        sum = __dadd_rn(sum, __dmul_rn(x, x));
    }
    batch.lanes[(uint64_t)block * ZPP_NORM_CUDA_LANES + lane] = sum;
    if (nonfinite) atomicAdd(&batch.nonfinite[k], nonfinite);
}

KERNEL zpp_norm_cuda_blocks(const __grid_constant__ struct zpp_norm_cuda_batch batch) {
    const unsigned int block = index_of_thread();
    if (block >= batch.blocks) return;
    double lanes[ZPP_NORM_CUDA_LANES];
    for (int l = 0; l < ZPP_NORM_CUDA_LANES; ++l) lanes[l] = batch.lanes[(uint64_t)block * ZPP_NORM_CUDA_LANES + l];
#pragma unroll
    for (int width = ZPP_NORM_CUDA_LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] = __dadd_rn(lanes[l], lanes[l + width]);
    }
    batch.lanes[(uint64_t)block * ZPP_NORM_CUDA_LANES] = lanes[0];
}

KERNEL zpp_norm_cuda_segments(const __grid_constant__ struct zpp_norm_cuda_batch batch) {
    const unsigned int k = index_of_thread();
    if (k >= batch.count) return;
    const unsigned int end = k + 1 < batch.count ? batch.segments[k + 1].first_block : batch.blocks;
    double sum = 0.0;
    for (unsigned int block = batch.segments[k].first_block; block < end; ++block) {
        sum = __dadd_rn(sum, batch.lanes[(uint64_t)block * ZPP_NORM_CUDA_LANES]);
    }
    batch.sums[k] = sum;
}
