/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation on CUDA: the arithmetic of quant_body.h, each operation rounded once, so the CPU's bits.
 *
 * Quantise: 64 threads a quantisation block, which is read twice, the second time from the cache. Each thread finds the
 * span of its own elements, then all threads widen the spans of all (64 reads of shared memory: cheaper than a tree
 * with its barriers, and greatest and least know no order). Dequantise: a thread a pair of elements, that is, a byte of
 * 4-bit codes. The steps between barriers are functions, so that a CPU can run them one after the other
 * (tests/c/test_quant_cuda.c).
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_QUANT_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "quant_cuda.h"

typedef struct zpp_quant_span span_of_threads[ZPP_QUANT_CUDA_THREADS];

static __device__ __forceinline__ uint64_t block_end(const struct zpp_quant_cuda_args *a, uint64_t begin) {
    return a->elems - begin < a->block_elems ? a->elems : begin + a->block_elems;
}

static __device__ __forceinline__ void find_span(const struct zpp_quant_cuda_args *a, span_of_threads spans) {
    const uint64_t begin = blockIdx.x * a->block_elems, end = block_end(a, begin);
    struct zpp_quant_span span = ZPP_QUANT_EMPTY_SPAN;
    for (uint64_t i = begin + threadIdx.x; i < end; i += ZPP_QUANT_CUDA_THREADS) {
        zpp_quant_widen(&span, zpp_cuda_load(a->floats, a->kind, i));
    }
    spans[threadIdx.x] = span;
}

static __device__ __forceinline__ unsigned int code_at(const struct zpp_quant_cuda_args *a,
                                                       const struct zpp_quant_consts *consts, int finite, uint64_t i,
                                                       uint64_t end) {
    if (!finite || i >= end) return 0;
    return (unsigned int)zpp_quant_code_of(zpp_cuda_load(a->floats, a->kind, i), consts, a->bits);
}

static __device__ __forceinline__ void write_codes(const struct zpp_quant_cuda_args *a, const span_of_threads spans) {
    const uint64_t begin = blockIdx.x * a->block_elems, end = block_end(a, begin);
    struct zpp_quant_span span = spans[0];
    for (int t = 1; t < ZPP_QUANT_CUDA_THREADS; ++t) {
        if (spans[t].top_bits > span.top_bits) span.top_bits = spans[t].top_bits;
        if (spans[t].low < span.low) span.low = spans[t].low;
        if (spans[t].high > span.high) span.high = spans[t].high;
    }
    struct zpp_quant_consts consts;
    const int finite = zpp_quant_consts_of(&span, a->bits, a->mids != NULL, &consts);
    if (threadIdx.x == 0) {
        a->scales[blockIdx.x] = consts.scale;
        if (a->mids) a->mids[blockIdx.x] = consts.mid;
    }
    for (uint64_t i = begin + 2u * threadIdx.x; i < end; i += 2u * ZPP_QUANT_CUDA_THREADS) {
        const unsigned int first = code_at(a, &consts, finite, i, end), next = code_at(a, &consts, finite, i + 1, end);
        if (a->bits == 4) {
            a->codes[i / 2] = (uint8_t)((first & 15u) | (next & 15u) << 4);
        } else {
            a->codes[i] = (uint8_t)first;
            if (i + 1 < end) a->codes[i + 1] = (uint8_t)next;
        }
    }
}

KERNEL zpp_quantise_cuda(const __grid_constant__ struct zpp_quant_cuda_args args) {
    __shared__ span_of_threads spans;
    find_span(&args, spans);
    __syncthreads();
    write_codes(&args, spans);
}

static __device__ __forceinline__ void put_value(const struct zpp_quant_cuda_args *a, uint64_t i) {
    const uint64_t block = i / a->block_elems;
    const int code = a->bits == 8 ? ((const int8_t *)a->codes)[i] : zpp_quant_nibble(a->codes, i);
    float value = zpp_quant_value_of(code, a->scales[block], a->mids ? a->mids[block] : 0.0f);
    if (a->accumulate) value = QUANT_ADD(zpp_cuda_load(a->floats, a->kind, i), value);
    zpp_cuda_store(a->floats, a->kind, i, value);
}

KERNEL zpp_dequantise_cuda(const __grid_constant__ struct zpp_quant_cuda_args args) {
    const uint64_t first = (uint64_t)blockIdx.x * ZPP_QUANT_CUDA_PAIRS;
    for (uint64_t pair = first + threadIdx.x; pair < first + ZPP_QUANT_CUDA_PAIRS; pair += ZPP_QUANT_CUDA_THREADS) {
        if (2 * pair < args.elems) put_value(&args, 2 * pair);
        if (2 * pair + 1 < args.elems) put_value(&args, 2 * pair + 1);
    }
}
