/* SPDX-License-Identifier: Apache-2.0
 *
 * The record of clip.h on CUDA, with the CPU's bits. One block: its threads fetch the sums of all ranks, which may lie
 * in memory of other GPUs, side by side into shared memory, and the first thread adds them in order.
 */
#ifndef ZPP_ON_CPU
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_CLIP_CUDA_THREADS)
#endif

#include "clip_cuda.h"

/* Element i of the line that has every rank's sum of unit 0, then of unit 1, and so on. */
static __device__ __forceinline__ double sum_at(const struct zpp_clip_cuda_args *args, uint64_t i) {
    return *(const volatile double *)&args->sums[i % args->ranks][i / args->ranks];
}

KERNEL zpp_clip_cuda(const __grid_constant__ struct zpp_clip_cuda_args args) {
    __shared__ double tile[ZPP_CLIP_CUDA_THREADS];
    const uint64_t all = args.units * args.ranks;
    double squares = 0.0;
    for (uint64_t begin = 0; begin < all; begin += ZPP_CLIP_CUDA_THREADS) {
        const uint64_t left = all - begin, count = left < ZPP_CLIP_CUDA_THREADS ? left : ZPP_CLIP_CUDA_THREADS;
        if (threadIdx.x < count) tile[threadIdx.x] = sum_at(&args, begin + threadIdx.x);
        __syncthreads();
        for (uint64_t k = 0; threadIdx.x == 0 && k < count; ++k) squares = __dadd_rn(squares, tile[k]);
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    const int halted = args.halt && *(const volatile uint64_t *)args.halt;
    zpp_clip_parts(args.record, &args.rule, halted ? (double)NAN : squares, halted);
}

KERNEL zpp_norm_groups_cuda(const __grid_constant__ struct zpp_norm_groups_cuda_args args) {
    const uint32_t group = blockIdx.x * ZPP_CLIP_CUDA_THREADS + threadIdx.x;
    if (group >= args.count) return;
    double sum = 0.0;
    for (uint32_t k = args.firsts[group]; k < args.firsts[group + 1]; ++k) {
        sum = __dadd_rn(sum, args.of_segments[k]);
    }
    args.sums[group] = sum;
}
