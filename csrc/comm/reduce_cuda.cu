/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum of several ranks' arrays on CUDA, in rank order and in fp32, each addition rounded once, so with the bits of
 * reduce_scalar.c. A thread adds ZPP_SUM_CUDA_WIDTH neighbouring elements at once: it loads them from each source in
 * words of 16 bytes where all arrays allow it, and all sources are in flight together. No thread needs another one.
 * Float64 has a kernel of its own, without such words.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_SUM_CUDA_THREADS)
#endif

#include "../ops/element_cuda.h"
#include "../ops/round.h"
#include "reduce_cuda.h"

/* Scale the sums and add what dst has; true if a result is not finite. */
static __device__ __forceinline__ bool finish(const struct zpp_sum_cuda_args *args, uint32_t count, const float *old,
                                              float *total) {
    bool nonfinite = false;
    for (uint32_t i = 0; i < count; ++i) {
        total[i] = ZPP_MUL(total[i], args->scale);
        if (args->accumulate) total[i] = ZPP_ADD(old[i], total[i]);
        nonfinite = nonfinite || (ZPP_BITS(total[i]) & 0x7f800000u) == 0x7f800000u;
    }
    return nonfinite;
}

static __device__ __forceinline__ bool sum_words(const struct zpp_sum_cuda_args *args, uint64_t begin) {
    float total[ZPP_SUM_CUDA_WIDTH], next[ZPP_SUM_CUDA_WIDTH];
    zpp_cuda_load8(args->src[0], args->kind, begin, total);
#pragma unroll 4
    for (uint32_t r = 1; r < args->sources; ++r) {
        zpp_cuda_load8(args->src[r], args->kind, begin, next);
        for (int i = 0; i < ZPP_SUM_CUDA_WIDTH; ++i) total[i] = ZPP_ADD(total[i], next[i]);
    }
    if (args->accumulate) zpp_cuda_load8(args->dst, args->dst_kind, begin, next);
    const bool nonfinite = finish(args, ZPP_SUM_CUDA_WIDTH, next, total);
    zpp_cuda_store8(args->dst, args->dst_kind, begin, total);
    return nonfinite;
}

/* For arrays that are not aligned, and for the last elements. */
static __device__ __forceinline__ bool sum_each(const struct zpp_sum_cuda_args *args, uint64_t begin) {
    bool nonfinite = false;
    for (uint64_t at = begin; at < begin + ZPP_SUM_CUDA_WIDTH && at < args->elems; ++at) {
        float total = zpp_cuda_load(args->src[0], args->kind, at);
        for (uint32_t r = 1; r < args->sources; ++r) {
            total = ZPP_ADD(total, zpp_cuda_load(args->src[r], args->kind, at));
        }
        const float old = args->accumulate ? zpp_cuda_load(args->dst, args->dst_kind, at) : 0.0f;
        nonfinite = finish(args, 1, &old, &total) || nonfinite;
        zpp_cuda_store(args->dst, args->dst_kind, at, total);
    }
    return nonfinite;
}

KERNEL zpp_sum_cuda_kernel(const __grid_constant__ struct zpp_sum_cuda_args args) {
    if (args.halt && *(const volatile uint64_t *)args.halt) return;
    const uint64_t first = ((uint64_t)blockIdx.x * ZPP_SUM_CUDA_THREADS + threadIdx.x) * ZPP_SUM_CUDA_WIDTH;
    const uint64_t stride = (uint64_t)args.blocks * ZPP_SUM_CUDA_THREADS * ZPP_SUM_CUDA_WIDTH;
    bool nonfinite = false;
    for (uint64_t begin = first; begin < args.elems; begin += stride) {
        const bool words = args.aligned && args.elems - begin >= ZPP_SUM_CUDA_WIDTH;
        nonfinite = (words ? sum_words(&args, begin) : sum_each(&args, begin)) || nonfinite;
    }
    if (nonfinite && args.nonfinite) *(volatile uint32_t *)args.nonfinite = 1;
}

KERNEL zpp_sum_f64_cuda_kernel(const __grid_constant__ struct zpp_sum_cuda_args args) {
    if (args.halt && *(const volatile uint64_t *)args.halt) return;
    const uint64_t stride = (uint64_t)args.blocks * ZPP_SUM_CUDA_THREADS;
    double *dst = (double *)args.dst;
    bool nonfinite = false;
    for (uint64_t at = (uint64_t)blockIdx.x * ZPP_SUM_CUDA_THREADS + threadIdx.x; at < args.elems; at += stride) {
        double total = ((const double *)args.src[0])[at];
        for (uint32_t r = 1; r < args.sources; ++r) total = ZPP_ADD64(total, ((const double *)args.src[r])[at]);
        total = ZPP_MUL64(total, args.scale_f64);
        if (args.accumulate) total = ZPP_ADD64(dst[at], total);
        nonfinite = nonfinite || !(ZPP_SUB64(total, total) == 0.0);
        dst[at] = total;
    }
    if (nonfinite && args.nonfinite) *(volatile uint32_t *)args.nonfinite = 1;
}
