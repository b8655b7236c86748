/* SPDX-License-Identifier: Apache-2.0
 *
 * Gather, sum and pick over the memory of several GPUs, with the CPU's results (peers.c), bit for bit. A block has a
 * row of this rank's buffer, or a token; it reads the memory of the rank that has what it needs over the links between
 * GPUs, and writes memory of its own. The host made the plan, so places are not checked here.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
/* Eight blocks a processor, as in rows_cuda.cu. */
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_PEERS_CUDA_THREADS, 8)
#endif

#include "../copy_words_cuda.h"
#include "../element_cuda.h"
#include "../round.h"
#include "peers_cuda.h"

static __device__ __forceinline__ int is_halted(const struct zpp_peers_cuda_args *a) {
    return a->halt && *(const volatile uint64_t *)a->halt;
}

/* The rank whose token the block takes: rows of `taken` are in order of the ranks. */
static __device__ __forceinline__ uint32_t owner_of(const struct zpp_peers_cuda_args *a) {
    uint32_t owner = 0;
    while (a->starts[owner + 1] <= (int64_t)blockIdx.x) ++owner;
    return owner;
}

KERNEL zpp_moe_peer_cuda_gather(const __grid_constant__ struct zpp_peers_cuda_args a) {
    const struct zpp_peers_cuda_taken taken = a.taken[blockIdx.x];
    const uint64_t row_bytes = a.row_words * a.word_bytes;
    if (is_halted(&a)) return;
    zpp_words_copy((char *)a.out + (uint64_t)taken.row * row_bytes,
                   (const char *)a.bases[owner_of(&a)] + (uint64_t)taken.assignment / a.k * row_bytes, a.row_words,
                   a.word_bytes, ZPP_PEERS_CUDA_THREADS);
}

/* All threads of a block stop, or none: another one may have set the word between their looks at it. */
KERNEL zpp_moe_peer_cuda_scale(const __grid_constant__ struct zpp_peers_cuda_args a) {
    __shared__ float lanes[ZPP_PEERS_CUDA_LANES];
    __shared__ int halted;
    const struct zpp_peers_cuda_taken taken = a.taken[blockIdx.x];
    const uint32_t owner = owner_of(&a);
    const void *from = a.bases[owner];
    const uint64_t grad = (uint64_t)taken.assignment / a.k * a.width_elems, row = (uint64_t)taken.row * a.width_elems;
    if (threadIdx.x == 0) halted = is_halted(&a);
    __syncthreads();
    if (halted) return;
    const float weight = a.weights_of[owner][taken.assignment];
    for (uint64_t i = threadIdx.x; i < a.width_elems; i += ZPP_PEERS_CUDA_THREADS) {
        zpp_cuda_store(a.out, a.dtype, row + i, ZPP_MUL(weight, zpp_cuda_load(from, a.dtype, grad + i)));
    }
    if (threadIdx.x < ZPP_PEERS_CUDA_LANES && a.values) {
        float sum = 0.0f;
#pragma unroll 4
        for (uint64_t i = threadIdx.x; i < a.width_elems; i += ZPP_PEERS_CUDA_LANES) {
            sum = ZPP_ADD(sum, ZPP_MUL(zpp_cuda_load(a.made, a.dtype, row + i),
                                       zpp_cuda_load(from, a.dtype, grad + i)));
        }
        lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0 || !a.values) return;
    for (int width = ZPP_PEERS_CUDA_LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] = ZPP_ADD(lanes[l], lanes[l + width]);
    }
    a.values[taken.row] = lanes[0];
}

KERNEL zpp_moe_peer_cuda_sum(const __grid_constant__ struct zpp_peers_cuda_args a) {
    const uint64_t token = blockIdx.x;
    if (is_halted(&a)) return;
    for (uint64_t i = threadIdx.x; i < a.width_elems; i += ZPP_PEERS_CUDA_THREADS) {
        float total = 0.0f;
        int first = 1;
        for (uint64_t at = token * a.k; at < (token + 1) * a.k; ++at) {
            const int64_t slot = a.slots[at];
            if (slot < 0) continue;
            const float value =
                zpp_cuda_load(a.bases[slot >> 32], a.dtype, (uint64_t)(uint32_t)slot * a.width_elems + i);
            const float part = a.weights ? ZPP_MUL(a.weights[at], value) : value;
            total = first ? part : ZPP_ADD(total, part);
            first = 0;
        }
        zpp_cuda_store(a.out, a.dtype, token * a.width_elems + i, total);
    }
}

KERNEL zpp_moe_peer_cuda_pick(const __grid_constant__ struct zpp_peers_cuda_args a) {
    const uint64_t at = (uint64_t)blockIdx.x * ZPP_PEERS_CUDA_THREADS + threadIdx.x;
    if (at >= a.count || is_halted(&a)) return;
    const int64_t slot = a.slots[at];
    a.values[at] = slot < 0 ? 0.0f : ((const float *)a.bases[slot >> 32])[(uint32_t)slot];
}
