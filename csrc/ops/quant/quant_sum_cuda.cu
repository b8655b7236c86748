/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of quantised arrays on CUDA, to floats or quantised again (the middle step of qgZ): decoded and added in the
 * order given, each operation rounded once, so the CPU's bits. Sum: a thread a pair of elements. Reduce:
 * quant_block_cuda.h, where an element is the sum, computed twice in place of a place in memory.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_QUANT_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "quant_cuda.h"

#define BLOCK_SOURCE struct zpp_quant_sum_cuda_args
static __device__ __forceinline__ float block_element(const struct zpp_quant_sum_cuda_args *a, uint64_t i) {
    const uint64_t block = i / a->block_elems;
    float sum = 0.0f;
    for (uint32_t s = 0; s < a->sources_count; ++s) {
        const uint8_t *codes = a->sources[s].codes;
        const int code = a->bits == 8 ? ((const int8_t *)codes)[i] : zpp_quant_nibble(codes, i);
        const float mid = a->sources[s].mids ? a->sources[s].mids[block] : 0.0f;
        const float value = zpp_quant_value_of(code, a->sources[s].scales[block], mid);
        sum = s == 0 ? value : ZPP_ADD(sum, value);
    }
    return ZPP_MUL(sum, a->factor);
}
#include "quant_block_cuda.h"

KERNEL zpp_quant_sum_cuda(const __grid_constant__ struct zpp_quant_sum_cuda_args args) {
    if (args.halt && *(const volatile uint64_t *)args.halt) return;
    const uint64_t first = (uint64_t)blockIdx.x * ZPP_QUANT_CUDA_PAIRS;
    for (uint64_t pair = first + threadIdx.x; pair < first + ZPP_QUANT_CUDA_PAIRS; pair += ZPP_QUANT_CUDA_THREADS) {
        for (uint64_t i = 2 * pair; i < 2 * pair + 2 && i < args.to.elems; ++i) {
            float value = block_element(&args, i);
            if (args.to.accumulate) value = ZPP_ADD(value, zpp_cuda_load(args.to.floats, args.to.dtype, i));
            zpp_cuda_store(args.to.floats, args.to.dtype, i, value);
        }
    }
}

KERNEL zpp_quant_reduce_cuda(const __grid_constant__ struct zpp_quant_sum_cuda_args args) {
    __shared__ span_of_threads spans;
    find_span(&args, &args.to, spans);
    __syncthreads();
    write_codes(&args, &args.to, spans);
}
