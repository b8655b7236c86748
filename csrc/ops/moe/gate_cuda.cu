/* SPDX-License-Identifier: Apache-2.0
 *
 * The gate and its backward on CUDA: the order of sums of the CPU's (gate.c), so its bits, except that the logarithm is
 * the device's own. 32 threads a token, with its row in shared memory: k rounds of a choice cost k reductions of 32
 * numbers. Sums over tokens, which the losses need in a fixed order, are kernels of their own:
 *
 *   zero     counts
 *   token    scores, choice, weights, counts; the scores are left in memory
 *   shares   a thread an expert of a block of 64 tokens
 *   losses   one block: blocks of tokens in order
 */
#ifndef ZPP_ON_CPU
#define KERNEL extern "C" __global__ void
#endif

#include <math.h>
#include <stdint.h>

#include "../exp.h"
#include "gate_cuda.h"

/* What the threads of a token share. */
struct row {
    float logits[ZPP_GATE_CUDA_MAX_EXPERTS], scores[ZPP_GATE_CUDA_MAX_EXPERTS], work[ZPP_GATE_CUDA_MAX_EXPERTS];
    float lanes[ZPP_GATE_CUDA_THREADS], by_choice[ZPP_GATE_CUDA_MAX_CHOICES], mean;
    uint32_t best[ZPP_GATE_CUDA_THREADS];
};
struct sums {
    float max, sum;
};

#define EACH_EXPERT(e, a) for (uint64_t e = threadIdx.x; e < (a)->experts; e += ZPP_GATE_CUDA_THREADS)

static __device__ __forceinline__ float greatest(const struct zpp_gate_cuda_args *a, const float *from, float *lanes) {
    float most = -INFINITY;
    EACH_EXPERT(e, a) most = from[e] > most ? from[e] : most;
    __syncthreads(); /* others may still read the lanes of before */
    lanes[threadIdx.x] = most;
    __syncthreads();
    for (int t = 0; t < ZPP_GATE_CUDA_THREADS; ++t) most = lanes[t] > most ? lanes[t] : most;
    return most;
}

static __device__ __forceinline__ float sum_of(const struct zpp_gate_cuda_args *a, const float *from, float *lanes) {
    float sum = 0.0f, all[ZPP_GATE_CUDA_LANES];
    for (uint64_t e = threadIdx.x; e < a->experts && threadIdx.x < ZPP_GATE_CUDA_LANES; e += ZPP_GATE_CUDA_LANES) {
        sum = ZPP_ADD(sum, from[e]);
    }
    __syncthreads();
    lanes[threadIdx.x] = sum;
    __syncthreads();
    for (int l = 0; l < ZPP_GATE_CUDA_LANES; ++l) all[l] = lanes[l];
#pragma unroll
    for (int width = ZPP_GATE_CUDA_LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) all[l] = ZPP_ADD(all[l], all[l + width]);
    }
    return all[0];
}

/* The scores of the row, all of them there for every thread after the barrier that is the next use of lanes. */
static __device__ __forceinline__ struct sums scores_of(const struct zpp_gate_cuda_args *a, struct row *row,
                                                        int sigmoid, float *scores) {
    struct sums sums = { 0.0f, 0.0f };
    if (!sigmoid) sums.max = greatest(a, row->logits, row->lanes);
    EACH_EXPERT(e, a) {
        if (sigmoid) scores[e] = ZPP_DIV(1.0f, ZPP_ADD(1.0f, zpp_exp(ZPP_SUB(0.0f, row->logits[e]))));
        else scores[e] = zpp_exp(ZPP_SUB(row->logits[e], sums.max));
    }
    __syncthreads();
    sums.sum = sum_of(a, scores, row->lanes);
    if (!sigmoid) EACH_EXPERT(e, a) scores[e] = ZPP_DIV(scores[e], sums.sum);
    __syncthreads();
    return sums;
}

static __device__ __forceinline__ void load_row(const struct zpp_gate_cuda_args *a, struct row *row) {
    EACH_EXPERT(e, a) row->logits[e] = a->logits[blockIdx.x * a->experts + e];
    __syncthreads();
}

static __device__ __forceinline__ float log_sum_exp(const struct zpp_gate_cuda_args *a, struct row *row,
                                                    struct sums sums) {
    if (a->sigmoid) sums = scores_of(a, row, 0, row->work);
    return ZPP_ADD(sums.max, logf(sums.sum));
}

/* One choice: the greatest of work, ties to the lower expert; it becomes -inf there. */
static __device__ __forceinline__ uint32_t choose_one(const struct zpp_gate_cuda_args *a, struct row *row) {
    float most = -INFINITY;
    uint32_t best = (uint32_t)a->experts;
    EACH_EXPERT(e, a) {
        if (row->work[e] > most) most = row->work[e], best = (uint32_t)e;
    }
    row->lanes[threadIdx.x] = most, row->best[threadIdx.x] = best;
    __syncthreads();
    for (int t = 0; t < ZPP_GATE_CUDA_THREADS; ++t) {
        const int before = row->lanes[t] == most && row->best[t] < best;
        if (row->lanes[t] > most || before) most = row->lanes[t], best = row->best[t];
    }
    if (best % ZPP_GATE_CUDA_THREADS == threadIdx.x) row->work[best] = -INFINITY; /* its own thread reads it next */
    __syncthreads();
    return best;
}

static __device__ __forceinline__ void choose(const struct zpp_gate_cuda_args *a, struct row *row) {
    const float *bias = a->bias ? a->bias + (a->bias_per_token ? blockIdx.x * a->experts : 0) : NULL;
    EACH_EXPERT(e, a) {
        const float by = bias ? ZPP_ADD(row->logits[e], bias[e]) : row->logits[e];
        row->work[e] = by > -3.4e38f ? by : -3.4e38f;
    }
    float total = 0.0f;
    for (uint64_t j = 0; j < a->k; ++j) {
        const uint32_t best = choose_one(a, row);
        total = ZPP_ADD(total, row->scores[best]);
        if (threadIdx.x != 0) continue;
        a->chosen[blockIdx.x * a->k + j] = (int32_t)best;
        a->weights[blockIdx.x * a->k + j] = row->scores[best];
        atomicAdd(&a->counts[best], 1);
    }
    for (uint64_t j = 0; j < a->k && a->normalise && threadIdx.x == 0; ++j) {
        float *weight = &a->weights[blockIdx.x * a->k + j];
        *weight = ZPP_DIV(*weight, total);
    }
}

KERNEL zpp_moe_cuda_zero(const __grid_constant__ struct zpp_gate_cuda_args a) {
    const uint64_t e = (uint64_t)blockIdx.x * ZPP_GATE_CUDA_SUM_THREADS + threadIdx.x;
    if (e < a.experts) a.counts[e] = 0;
}

KERNEL zpp_moe_cuda_token(const __grid_constant__ struct zpp_gate_cuda_args a) {
    __shared__ struct row row;
    load_row(&a, &row);
    const struct sums sums = scores_of(&a, &row, a.sigmoid, row.scores);
    choose(&a, &row);
    __syncthreads(); /* work is free again */
    const float lse = log_sum_exp(&a, &row, sums);
    float *to = a.scores + blockIdx.x * (a.experts + 2);
    EACH_EXPERT(e, &a) to[e] = row.scores[e];
    if (threadIdx.x == 0) {
        to[a.experts] = a.sigmoid ? ZPP_DIV(1.0f, sums.sum) : 1.0f;
        to[a.experts + 1] = lse;
    }
}

KERNEL zpp_moe_cuda_shares(const __grid_constant__ struct zpp_gate_cuda_args a) {
    const uint64_t line = a.experts + 1, at = (uint64_t)blockIdx.x * ZPP_GATE_CUDA_SUM_THREADS + threadIdx.x;
    const uint64_t begin = at / line * ZPP_GATE_CUDA_BLOCK_TOKENS, e = at % line;
    if (begin >= a.tokens) return;
    const uint64_t most = begin + ZPP_GATE_CUDA_BLOCK_TOKENS, end = a.tokens < most ? a.tokens : most;
    float share = 0.0f;
    double squares = 0.0;
    for (uint64_t t = begin; t < end; ++t) {
        const float *from = a.scores + t * (a.experts + 2);
        const double lse = (double)from[a.experts + 1];
        if (e < a.experts) share = ZPP_ADD(share, ZPP_MUL(from[e], from[a.experts]));
        else squares = __dadd_rn(squares, __dmul_rn(lse, lse));
    }
    a.sums[at] = e < a.experts ? (double)share : squares;
}

KERNEL zpp_moe_cuda_losses(const __grid_constant__ struct zpp_gate_cuda_args a) {
    const uint64_t line = a.experts + 1;
    const uint64_t blocks = (a.tokens + ZPP_GATE_CUDA_BLOCK_TOKENS - 1) / ZPP_GATE_CUDA_BLOCK_TOKENS;
    for (uint64_t e = threadIdx.x; e < line; e += ZPP_GATE_CUDA_SUM_THREADS) {
        double sum = blocks ? a.sums[e] : 0.0;
        for (uint64_t block = 1; block < blocks; ++block) sum = __dadd_rn(sum, a.sums[block * line + e]);
        if (blocks) a.sums[e] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const double tokens = (double)a.tokens;
    double balance = 0.0;
    for (uint64_t e = 0; e < a.experts && blocks; ++e) {
        const double share = (double)a.counts[e] / __dmul_rn(tokens, (double)a.k);
        balance = __dadd_rn(balance, __dmul_rn(share, a.sums[e] / tokens));
    }
    a.losses[0] = (float)__dmul_rn((double)a.experts, balance);
    a.losses[1] = blocks ? (float)(a.sums[a.experts] / tokens) : 0.0f;
}

/* --- backward: the formulas of gate.c ----------------------------------------------------------------------------- */
/* Experts chosen are checked on the CPU only: one out of range counts as none. */
static __device__ __forceinline__ float score_of_choice(const struct zpp_gate_cuda_args *a, const float *scores,
                                                        uint64_t j) {
    const uint32_t e = (uint32_t)a->chosen[blockIdx.x * a->k + j];
    return e < a->experts ? scores[e] : 0.0f;
}

static __device__ __forceinline__ float by_share(const struct zpp_gate_cuda_args *a, uint64_t e) {
    const double tokens = (double)a->tokens;
    const double share = (double)a->counts[e] / __dmul_rn(tokens, (double)a->k);
    return (float)(__dmul_rn(__dmul_rn((double)a->grad_losses[0], (double)a->experts), share) / tokens);
}

/* by_choice and mean, by one thread: both are sums in order. */
static __device__ __forceinline__ void weights_backward(const struct zpp_gate_cuda_args *a, struct row *row,
                                                        float per_sum) {
    const float *grad = a->grad_weights + blockIdx.x * a->k;
    float total = 1.0f, mean = 0.0f;
    if (a->normalise) {
        total = 0.0f;
        for (uint64_t j = 0; j < a->k; ++j) total = ZPP_ADD(total, score_of_choice(a, row->scores, j));
        for (uint64_t j = 0; j < a->k; ++j) {
            mean = ZPP_ADD(mean, ZPP_MUL(grad[j], ZPP_DIV(score_of_choice(a, row->scores, j), total)));
        }
    }
    for (uint64_t j = 0; j < a->k; ++j) row->by_choice[j] = ZPP_DIV(ZPP_SUB(grad[j], mean), total);
    float of_shares = 0.0f;
    for (uint64_t e = 0; e < a->experts; ++e) {
        of_shares = ZPP_ADD(of_shares, ZPP_MUL(by_share(a, e), ZPP_MUL(row->scores[e], per_sum)));
    }
    for (uint64_t j = 0; j < a->k && !a->sigmoid; ++j) {
        of_shares = ZPP_ADD(of_shares, ZPP_MUL(row->by_choice[j], score_of_choice(a, row->scores, j)));
    }
    row->mean = of_shares;
}

static __device__ __forceinline__ float grad_of(const struct zpp_gate_cuda_args *a, const struct row *row,
                                                float per_sum, float by_lse, uint64_t e) {
    const float s = row->scores[e], by = ZPP_SUB(by_share(a, e), row->mean);
    if (!a->sigmoid) return ZPP_MUL(s, ZPP_ADD(by, by_lse));
    const float slope = ZPP_MUL(s, ZPP_SUB(1.0f, s));
    return ZPP_ADD(ZPP_MUL(ZPP_MUL(by, per_sum), slope), ZPP_MUL(by_lse, row->work[e]));
}

KERNEL zpp_moe_cuda_gate_backward(const __grid_constant__ struct zpp_gate_cuda_args a) {
    __shared__ struct row row;
    load_row(&a, &row);
    const struct sums sums = scores_of(&a, &row, a.sigmoid, row.scores);
    const float lse = log_sum_exp(&a, &row, sums), per_sum = a.sigmoid ? ZPP_DIV(1.0f, sums.sum) : 1.0f;
    const float by_lse = ZPP_MUL(ZPP_MUL(2.0f, lse), (float)((double)a.grad_losses[1] / (double)a.tokens));
    if (threadIdx.x == 0) weights_backward(&a, &row, per_sum);
    __syncthreads();
    float *out = a.grad_logits + blockIdx.x * a.experts;
    EACH_EXPERT(e, &a) out[e] = grad_of(&a, &row, per_sum, by_lse, e);
    __syncthreads();
    for (uint64_t j = 0; j < a.k && threadIdx.x == 0; ++j) {
        const uint32_t e = (uint32_t)a.chosen[blockIdx.x * a.k + j];
        if (e >= a.experts) continue;
        const float s = row.scores[e], slope = a.sigmoid ? ZPP_MUL(s, ZPP_SUB(1.0f, s)) : s;
        out[e] = ZPP_ADD(out[e], ZPP_MUL(slope, row.by_choice[j]));
    }
}
