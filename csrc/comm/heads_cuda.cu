/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies of an exchange of heads for tokens on CUDA. A thread moves one word of one head. Or it adds up one element of
 * the heads that several ranks have, in the order of ranks and in fp32 (fp64 for itself), with one rounding. Those are
 * the CPU's bits.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_HEADS_CUDA_THREADS)
#endif

#include "../ops/copy_words_cuda.h"
#include "../ops/element_cuda.h"
#include "heads_cuda.h"

/* The batch, token and head that an item lies in; `item` becomes its number there. */
struct zpp_heads_cuda_row {
    uint64_t batch, token, head;
};

static __device__ __forceinline__ struct zpp_heads_cuda_row row_of(uint64_t *item, uint64_t tokens, uint32_t heads,
                                                                   uint32_t each) {
    const uint64_t row = *item / each, line = row / heads;
    *item -= row * each;
    const struct zpp_heads_cuda_row found = {line / tokens, line % tokens, row - line * heads};
    return found;
}

static __device__ __forceinline__ char *at(const struct zpp_heads_cuda_place *place,
                                           const struct zpp_heads_cuda_row *row) {
    return place->data + row->batch * place->batch + row->token * place->token + row->head * place->head;
}

static __device__ __forceinline__ void move(char *to, const char *from, uint64_t word, uint32_t word_bytes) {
    switch (word_bytes) {
    case 16: ((struct zpp_word16 *)to)[word] = ((const struct zpp_word16 *)from)[word]; break;
    case 8: ((uint64_t *)to)[word] = ((const uint64_t *)from)[word]; break;
    case 4: ((uint32_t *)to)[word] = ((const uint32_t *)from)[word]; break;
    default: ((uint16_t *)to)[word] = ((const uint16_t *)from)[word]; break;
    }
}

KERNEL zpp_heads_cuda_copies(const __grid_constant__ struct zpp_heads_cuda_copies a) {
    uint32_t b = 0;
    while (b + 1 < a.boxes && blockIdx.x >= a.box[b + 1].first_block) b++;
    const struct zpp_heads_cuda_box *box = &a.box[b];
    uint64_t item = (uint64_t)(blockIdx.x - box->first_block) * ZPP_HEADS_CUDA_THREADS + threadIdx.x;
    if (item >= box->items) return;
    const struct zpp_heads_cuda_row row = row_of(&item, box->tokens, box->heads, box->words);
    move(at(&box->dst, &row), at(&box->src, &row), item, box->word_bytes);
}

KERNEL zpp_heads_cuda_sum(const __grid_constant__ struct zpp_heads_cuda_sum a) {
    uint64_t item = (uint64_t)blockIdx.x * ZPP_HEADS_CUDA_THREADS + threadIdx.x;
    if (item >= a.items) return;
    const struct zpp_heads_cuda_row row = row_of(&item, a.tokens, a.heads, a.elems);
    if (a.kind == ZPP_HEADS_CUDA_F64) {
        double sum = 0;
        for (uint32_t s = 0; s < a.sources; s++) sum += ((const double *)at(&a.src[s], &row))[item];
        ((double *)at(&a.dst, &row))[item] = sum;
        return;
    }
    float sum = zpp_cuda_load(at(&a.src[0], &row), (int)a.kind, item);
    for (uint32_t s = 1; s < a.sources; s++) sum += zpp_cuda_load(at(&a.src[s], &row), (int)a.kind, item);
    zpp_cuda_store(at(&a.dst, &row), (int)a.kind, item, sum);
}
