/* SPDX-License-Identifier: Apache-2.0
 *
 * Token moves on CUDA: a block a row of the result. Sampling: a thread a sample, since each draw follows from the one
 * before; the same numbers as on the CPU.
 */
#ifndef ZPP_ON_CPU
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_TOKENS_CUDA_THREADS)
#endif

#include "../copy_words_cuda.h"
#include "tokens_body.h"
#include "tokens_cuda.h"

KERNEL zpp_tokens_cuda_sample(const __grid_constant__ struct zpp_tokens_cuda_args a) {
    const uint64_t b = (uint64_t)blockIdx.x * ZPP_TOKENS_CUDA_THREADS + threadIdx.x;
    if (b < a.batch) zpp_tokens_draw(a.kept + b * a.keep, a.seq, a.keep, a.seed, a.layer, a.first + b);
}

static __device__ __forceinline__ void move(const struct zpp_tokens_cuda_args *a, const void *from, uint64_t row) {
    const uint64_t row_bytes = a->row_words * a->word_bytes;
    zpp_words_copy((char *)a->out + blockIdx.x * row_bytes, from ? (const char *)from + row * row_bytes : NULL,
                   a->row_words, a->word_bytes, ZPP_TOKENS_CUDA_THREADS);
}

KERNEL zpp_tokens_cuda_gather(const __grid_constant__ struct zpp_tokens_cuda_args a) {
    const uint64_t at = (uint64_t)(uint32_t)a.kept[blockIdx.x]; /* negative: far beyond seq */
    move(&a, at < a.seq ? a.full : NULL, blockIdx.x / a.keep * a.seq + at);
}

KERNEL zpp_tokens_cuda_scatter(const __grid_constant__ struct zpp_tokens_cuda_args a) {
    const uint64_t b = blockIdx.x / a.seq, s = blockIdx.x % a.seq;
    const int32_t *kept = a.kept + b * a.keep;
    const uint64_t k = zpp_tokens_first(kept, a.keep, s);
    if (k < a.keep && (uint64_t)(uint32_t)kept[k] == s) move(&a, a.part, b * a.keep + k);
    else move(&a, a.full, blockIdx.x);
}
