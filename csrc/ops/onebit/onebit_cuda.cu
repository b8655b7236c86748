/* SPDX-License-Identifier: Apache-2.0
 *
 * One-bit compression on CUDA: the arithmetic of onebit_body.h and the order of onebit.h, so the CPU's bits. Three
 * kernels one after the other, with no exchange between threads (tests/c/test_onebit_cuda.c runs them on a CPU):
 *
 *   lanes    a thread a lane of a block of 4096 elements: sixteen neighbours read sixteen neighbouring elements
 *   scales   a thread a chunk: the tree over lanes, blocks one after the other in double
 *   emit     a thread a byte of bits: eight elements, read again (cached, for arrays below the second level's size)
 *
 * What is compressed may be the sum of compressed arrays (the server's side): made anew wherever it is read, since its
 * bits are a thirtieth of it. decode: a thread an element at a time.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_ONEBIT_CUDA_THREADS)
#endif

#include <math.h>

#include "../element_cuda.h"
#include "../round.h"
#include "onebit_body.h"
#include "onebit_cuda.h"

static __device__ __forceinline__ uint64_t index_of_thread(void) {
    return (uint64_t)blockIdx.x * ZPP_ONEBIT_CUDA_THREADS + threadIdx.x;
}

static __device__ __forceinline__ float value_of(const struct zpp_onebit_cuda_source *source, uint64_t chunk,
                                                 uint64_t i) {
    return zpp_onebit_value(source->bits[i / 8] >> i % 8 & 1, source->scales[chunk]);
}

/* x + error */
static __device__ __forceinline__ float owed_at(const struct zpp_onebit_cuda_args *a, uint64_t chunk, uint64_t i) {
    if (a->floats) return zpp_onebit_owed(zpp_cuda_load(a->floats, a->dtype, i), a->error[i]);
    float sum = value_of(&a->sources[0], chunk, i);
    for (uint32_t s = 1; s < a->sources_count; ++s) sum = ZPP_ADD(sum, value_of(&a->sources[s], chunk, i));
    return zpp_onebit_owed(ZPP_MUL(sum, a->factor), a->error[i]);
}

static __device__ __forceinline__ uint64_t chunk_end(const struct zpp_onebit_cuda_args *a, uint64_t chunk) {
    const uint64_t begin = chunk * a->chunk_elems;
    return a->elems - begin < a->chunk_elems ? a->elems : begin + a->chunk_elems;
}

KERNEL zpp_onebit_cuda_lanes(const __grid_constant__ struct zpp_onebit_cuda_args a) {
    const uint64_t block = index_of_thread() / ZPP_ONEBIT_CUDA_LANES, lane = index_of_thread() % ZPP_ONEBIT_CUDA_LANES;
    const uint64_t chunk = block / a.chunk_blocks;
    if (chunk >= a.chunks) return;
    const uint64_t begin = chunk * a.chunk_elems + block % a.chunk_blocks * ZPP_ONEBIT_CUDA_BLOCK_ELEMS;
    const uint64_t most = begin + ZPP_ONEBIT_CUDA_BLOCK_ELEMS, last = chunk_end(&a, chunk);
    const uint64_t end = last < most ? last : most;
    float sum = 0.0f;
#pragma unroll 4
    for (uint64_t i = begin + lane; i < end; i += ZPP_ONEBIT_CUDA_LANES) {
        const float owed = owed_at(&a, chunk, i);
        sum = ZPP_ADD(sum, owed < 0.0f ? -owed : owed);
    }
    a.lanes[block * ZPP_ONEBIT_CUDA_LANES + lane] = sum;
}

KERNEL zpp_onebit_cuda_scales(const __grid_constant__ struct zpp_onebit_cuda_args a) {
    const uint64_t chunk = index_of_thread();
    if (chunk >= a.chunks) return;
    const uint64_t elems = chunk_end(&a, chunk) - chunk * a.chunk_elems;
    int finite = 1;
    double sum = 0.0;
    for (uint64_t b = 0; b * ZPP_ONEBIT_CUDA_BLOCK_ELEMS < elems; ++b) {
        float lanes[ZPP_ONEBIT_CUDA_LANES];
        const float *from = a.lanes + (chunk * a.chunk_blocks + b) * ZPP_ONEBIT_CUDA_LANES;
        for (int l = 0; l < ZPP_ONEBIT_CUDA_LANES; ++l) lanes[l] = from[l];
#pragma unroll
        for (int width = ZPP_ONEBIT_CUDA_LANES / 2; width > 0; width /= 2) {
            for (int l = 0; l < width; ++l) lanes[l] = ZPP_ADD(lanes[l], lanes[l + width]);
        }
        finite = finite && (ZPP_BITS(lanes[0]) & 0x7f800000u) != 0x7f800000u;
        sum = __dadd_rn(sum, (double)lanes[0]);
    }
    finite = finite && sum <= 3.4028234663852886e38; /* FLT_MAX */
    a.scales[chunk] = finite ? (float)(sum / (double)elems) : NAN;
}

KERNEL zpp_onebit_cuda_emit(const __grid_constant__ struct zpp_onebit_cuda_args a) {
    const uint64_t begin = index_of_thread() * 8;
    if (begin >= a.elems) return;
    const uint64_t chunk = begin / a.chunk_elems; /* chunks are whole bytes */
    const float scale = a.scales[chunk];
    const uint64_t end = a.elems - begin < 8 ? a.elems : begin + 8;
    unsigned int bits = 0;
    for (uint64_t i = begin; i < end && scale == scale; ++i) { /* scale NaN: no bits, and the error stays */
        const float owed = owed_at(&a, chunk, i);
        const int bit = zpp_onebit_bit(owed);
        bits |= (unsigned int)bit << (i - begin);
        a.error[i] = zpp_onebit_lost(owed, zpp_onebit_value(bit, scale));
    }
    a.bits[begin / 8] = (uint8_t)bits;
}

KERNEL zpp_onebit_cuda_decode(const __grid_constant__ struct zpp_onebit_cuda_args a) {
    const uint64_t first = (uint64_t)blockIdx.x * ZPP_ONEBIT_CUDA_DECODE_ELEMS;
    const uint64_t most = first + ZPP_ONEBIT_CUDA_DECODE_ELEMS, end = a.elems < most ? a.elems : most;
#pragma unroll 4
    for (uint64_t i = first + threadIdx.x; i < end; i += ZPP_ONEBIT_CUDA_THREADS) {
        const float value = value_of(&a.sources[0], i / a.chunk_elems, i);
        zpp_cuda_store(a.floats, a.dtype, i,
                       a.accumulate ? ZPP_ADD(zpp_cuda_load(a.floats, a.dtype, i), value) : value);
    }
}
