/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation on CUDA: the arithmetic of quant_body.h, each operation rounded once, so the CPU's bits.
 *
 * Quantise: quant_block_cuda.h; a block is read twice, the second time from the cache. Dequantise: a thread a pair of
 * elements, that is, a byte of 4-bit codes.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_QUANT_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "quant_cuda.h"

#define BLOCK_SOURCE struct zpp_quant_cuda_args
static __device__ __forceinline__ float block_element(const struct zpp_quant_cuda_args *a, uint64_t i) {
    return zpp_cuda_load(a->floats, a->dtype, i);
}
#include "quant_block_cuda.h"

KERNEL zpp_quantise_cuda(const __grid_constant__ struct zpp_quant_cuda_args args) {
    __shared__ span_of_threads spans;
    find_span(&args, &args, spans);
    __syncthreads();
    write_codes(&args, &args, spans);
}

static __device__ __forceinline__ void put_value(const struct zpp_quant_cuda_args *a, uint64_t i) {
    const uint64_t block = i / a->block_elems;
    const int code = a->bits == 8 ? ((const int8_t *)a->codes)[i] : zpp_quant_nibble(a->codes, i);
    float value = zpp_quant_value_of(code, a->scales[block], a->mids ? a->mids[block] : 0.0f);
    if (a->accumulate) value = ZPP_ADD(zpp_cuda_load(a->floats, a->dtype, i), value);
    zpp_cuda_store(a->floats, a->dtype, i, value);
}

KERNEL zpp_dequantise_cuda(const __grid_constant__ struct zpp_quant_cuda_args args) {
    const uint64_t first = (uint64_t)blockIdx.x * ZPP_QUANT_CUDA_PAIRS;
    for (uint64_t pair = first + threadIdx.x; pair < first + ZPP_QUANT_CUDA_PAIRS; pair += ZPP_QUANT_CUDA_THREADS) {
        if (2 * pair < args.elems) put_value(&args, 2 * pair);
        if (2 * pair + 1 < args.elems) put_value(&args, 2 * pair + 1);
    }
}
