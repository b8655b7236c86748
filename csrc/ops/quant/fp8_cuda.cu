/* SPDX-License-Identifier: Apache-2.0
 *
 * 8-bit floats on CUDA: the arithmetic of fp8_body.h, each operation rounded once, so the CPU's bits.
 *
 * Quantise: 64 threads a quantisation block, which is read twice, the second time from the cache; every thread takes
 * the greatest magnitude of all (64 reads of shared memory: cheaper than a tree with its barriers). Dequantise: a
 * thread an element at a time, neighbours on neighbours.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_FP8_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "fp8_body.h"
#include "fp8_cuda.h"

KERNEL zpp_fp8_quantise_cuda(const __grid_constant__ struct zpp_fp8_cuda_args a) {
    __shared__ uint32_t tops[ZPP_FP8_CUDA_THREADS];
    const uint64_t begin = blockIdx.x * a.block_elems;
    const uint64_t end = a.elems - begin < a.block_elems ? a.elems : begin + a.block_elems;
    uint32_t top = 0;
    for (uint64_t i = begin + threadIdx.x; i < end; i += ZPP_FP8_CUDA_THREADS) {
        const uint32_t bits = ZPP_BITS(zpp_cuda_load(a.floats, a.dtype, i)) & 0x7fffffffu;
        if (bits > top) top = bits;
    }
    tops[threadIdx.x] = top;
    __syncthreads();
    for (int t = 0; t < ZPP_FP8_CUDA_THREADS; ++t) top = tops[t] > top ? tops[t] : top;
    const struct zpp_fp8_kind kind = ZPP_FP8_KIND(a.format);
    const struct zpp_fp8_consts consts = zpp_fp8_consts_of(kind, top);
    if (threadIdx.x == 0) a.scales[blockIdx.x] = consts.scale;
    for (uint64_t i = begin + threadIdx.x; i < end; i += ZPP_FP8_CUDA_THREADS) {
        const float x = ZPP_MUL(zpp_cuda_load(a.floats, a.dtype, i), consts.inverse);
        a.codes[i] = consts.inverse == 0.0f ? (uint8_t)0 : zpp_fp8_encode(kind, x);
    }
}

KERNEL zpp_fp8_dequantise_cuda(const __grid_constant__ struct zpp_fp8_cuda_args a) {
    const uint64_t first = (uint64_t)blockIdx.x * ZPP_FP8_CUDA_ELEMS, most = first + ZPP_FP8_CUDA_ELEMS;
    const uint64_t end = a.elems < most ? a.elems : most;
#pragma unroll 4
    for (uint64_t i = first + threadIdx.x; i < end; i += ZPP_FP8_CUDA_THREADS) {
        const float value = ZPP_MUL(zpp_fp8_decode(a.format, a.codes[i]), a.scales[i / a.block_elems]);
        zpp_cuda_store(a.floats, a.dtype, i,
                       a.accumulate ? ZPP_ADD(zpp_cuda_load(a.floats, a.dtype, i), value) : value);
    }
}
