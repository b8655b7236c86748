/* SPDX-License-Identifier: Apache-2.0
 *
 * Gather, sum and pick over the memory of several GPUs, with the CPU's results (peers.c), bit for bit. A block has a
 * row of this rank's buffer, or a token. It reads the memory of other ranks over the links between GPUs, each element
 * once, and in words of 16 bytes where all rows allow it. It writes memory of its own. The host made the plan, so
 * places are not checked here.
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

/* `count` elements, WIDE or 1 of them; a constant, so that they stay in registers. */
static __device__ __forceinline__ void load_some(const void *from, int dtype, uint64_t at, int count, float *out) {
    if (count == ZPP_PEERS_CUDA_WIDE) zpp_cuda_load8(from, dtype, at, out);
    else out[0] = zpp_cuda_load(from, dtype, at);
}

static __device__ __forceinline__ void store_some(void *to, int dtype, uint64_t at, int count, const float *value) {
    if (count == ZPP_PEERS_CUDA_WIDE) zpp_cuda_store8(to, dtype, at, value);
    else zpp_cuda_store(to, dtype, at, value[0]);
}

enum { PEER_PIECE = ZPP_PEERS_CUDA_THREADS * ZPP_PEERS_CUDA_WIDE }; /* elements of a row that a block has at once */

/* Where a block is in its row, and in the rows that it reads and writes. */
struct peer_piece {
    const void *from;
    uint64_t grad, row, begin; /* elements */
    float weight;
};

/* This thread's elements of a piece: times the weight, and their products with what was made. */
static __device__ __forceinline__ void scale_some(const struct zpp_peers_cuda_args *a, const struct peer_piece *p,
                                                  int count, float *products) {
    for (int at = (int)threadIdx.x * count; at < PEER_PIECE; at += ZPP_PEERS_CUDA_THREADS * count) {
        float grad[ZPP_PEERS_CUDA_WIDE], made[ZPP_PEERS_CUDA_WIDE], scaled[ZPP_PEERS_CUDA_WIDE];
        const uint64_t i = p->begin + (uint64_t)at;
        if (i >= a->width_elems) return;
        load_some(p->from, a->dtype, p->grad + i, count, grad);
        if (a->values) load_some(a->made, a->dtype, p->row + i, count, made);
        for (int e = 0; e < count; ++e) scaled[e] = ZPP_MUL(p->weight, grad[e]);
        for (int e = 0; e < count && a->values; ++e) products[at + e] = ZPP_MUL(made[e], grad[e]);
        store_some(a->out, a->dtype, p->row + i, count, scaled);
    }
}

/* The products of a lane, in order of the elements. */
static __device__ __forceinline__ float add_lane(const struct zpp_peers_cuda_args *a, const struct peer_piece *p,
                                                 const float *products, float sum) {
    for (uint64_t i = threadIdx.x; i < PEER_PIECE && p->begin + i < a->width_elems; i += ZPP_PEERS_CUDA_LANES) {
        sum = ZPP_ADD(sum, products[i]);
    }
    return sum;
}

/* All threads of a block stop, or none: another one may have set the word between their looks at it. */
KERNEL zpp_moe_peer_cuda_scale(const __grid_constant__ struct zpp_peers_cuda_args a) {
    __shared__ float products[PEER_PIECE], lanes[ZPP_PEERS_CUDA_LANES];
    __shared__ int halted;
    const struct zpp_peers_cuda_taken taken = a.taken[blockIdx.x];
    const uint32_t owner = owner_of(&a);
    struct peer_piece p = { a.bases[owner], (uint64_t)taken.assignment / a.k * a.width_elems,
                       (uint64_t)taken.row * a.width_elems, 0, 0.0f };
    float sum = 0.0f;
    if (threadIdx.x == 0) halted = is_halted(&a);
    __syncthreads();
    if (halted) return;
    p.weight = a.weights_of[owner][taken.assignment];
    for (; p.begin < a.width_elems; p.begin += PEER_PIECE) {
        if (a.wide) scale_some(&a, &p, ZPP_PEERS_CUDA_WIDE, products);
        else scale_some(&a, &p, 1, products);
        __syncthreads();
        if (threadIdx.x < ZPP_PEERS_CUDA_LANES && a.values) sum = add_lane(&a, &p, products, sum);
        __syncthreads();
    }
    if (threadIdx.x < ZPP_PEERS_CUDA_LANES) lanes[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x != 0 || !a.values) return;
    for (int width = ZPP_PEERS_CUDA_LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] = ZPP_ADD(lanes[l], lanes[l + width]);
    }
    a.values[taken.row] = lanes[0];
}

static __device__ __forceinline__ void sum_some(const struct zpp_peers_cuda_args *a, int count) {
    const uint64_t token = blockIdx.x;
    for (uint64_t i = (uint64_t)threadIdx.x * (uint64_t)count; i < a->width_elems;
         i += (uint64_t)(ZPP_PEERS_CUDA_THREADS * count)) {
        float total[ZPP_PEERS_CUDA_WIDE] = { 0.0f }, value[ZPP_PEERS_CUDA_WIDE];
        int first = 1;
        for (uint64_t at = token * a->k; at < (token + 1) * a->k; ++at) {
            const int64_t slot = a->slots[at];
            if (slot < 0) continue;
            load_some(a->bases[slot >> 32], a->dtype, (uint64_t)(uint32_t)slot * a->width_elems + i, count, value);
            for (int e = 0; e < count; ++e) {
                const float part = a->weights ? ZPP_MUL(a->weights[at], value[e]) : value[e];
                total[e] = first ? part : ZPP_ADD(total[e], part);
            }
            first = 0;
        }
        store_some(a->out, a->dtype, token * a->width_elems + i, count, total);
    }
}

KERNEL zpp_moe_peer_cuda_sum(const __grid_constant__ struct zpp_peers_cuda_args a) {
    if (is_halted(&a)) return;
    if (a.wide) sum_some(&a, ZPP_PEERS_CUDA_WIDE);
    else sum_some(&a, 1);
}

KERNEL zpp_moe_peer_cuda_pick(const __grid_constant__ struct zpp_peers_cuda_args a) {
    const uint64_t at = (uint64_t)blockIdx.x * ZPP_PEERS_CUDA_THREADS + threadIdx.x;
    if (at >= a.count || is_halted(&a)) return;
    const int64_t slot = a.slots[at];
    a.values[at] = slot < 0 ? 0.0f : ((const float *)a.bases[slot >> 32])[(uint32_t)slot];
}
