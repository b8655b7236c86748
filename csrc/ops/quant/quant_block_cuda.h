/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantising a block on CUDA, for a kernel whose elements come from somewhere. Included once a file, after
 *
 *     BLOCK_SOURCE                                         struct of where they come from
 *     float block_element(const BLOCK_SOURCE *, uint64_t i)
 *
 * 64 threads a quantisation block, whose elements are asked for twice. Each thread finds the span of its own elements,
 * then all threads widen the spans of all (64 reads of shared memory: cheaper than a tree with its barriers, and
 * greatest and least know no order). The two steps are functions, so that a CPU can run them one after the other
 * (tests/c/test_quant_cuda.c).
 */
#ifndef ZPP_OPS_QUANT_BLOCK_CUDA_H
#define ZPP_OPS_QUANT_BLOCK_CUDA_H

#include "quant_cuda.h"

typedef struct zpp_quant_span span_of_threads[ZPP_QUANT_CUDA_THREADS];

static __device__ __forceinline__ uint64_t block_end(const struct zpp_quant_cuda_args *a, uint64_t begin) {
    return a->elems - begin < a->block_elems ? a->elems : begin + a->block_elems;
}

static __device__ __forceinline__ void find_span(const BLOCK_SOURCE *from, const struct zpp_quant_cuda_args *a,
                                                 span_of_threads spans) {
    const uint64_t begin = blockIdx.x * a->block_elems, end = block_end(a, begin);
    struct zpp_quant_span span = ZPP_QUANT_EMPTY_SPAN;
    for (uint64_t i = begin + threadIdx.x; i < end; i += ZPP_QUANT_CUDA_THREADS) {
        zpp_quant_widen(&span, block_element(from, i));
    }
    spans[threadIdx.x] = span;
}

static __device__ __forceinline__ unsigned int code_at(const BLOCK_SOURCE *from, int bits,
                                                       const struct zpp_quant_consts *consts, int finite, uint64_t i,
                                                       uint64_t end) {
    if (!finite || i >= end) return 0;
    return (unsigned int)zpp_quant_code_of(block_element(from, i), consts, bits);
}

static __device__ __forceinline__ void write_codes(const BLOCK_SOURCE *from, const struct zpp_quant_cuda_args *a,
                                                   const span_of_threads spans) {
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
        const unsigned int first = code_at(from, a->bits, &consts, finite, i, end);
        const unsigned int next = code_at(from, a->bits, &consts, finite, i + 1, end);
        if (a->bits == 4) {
            a->codes[i / 2] = (uint8_t)((first & 15u) | (next & 15u) << 4);
        } else {
            a->codes[i] = (uint8_t)first;
            if (i + 1 < end) a->codes[i + 1] = (uint8_t)next;
        }
    }
}

#endif
