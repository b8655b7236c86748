/* SPDX-License-Identifier: Apache-2.0
 *
 * The gate on CUDA: the argument of its kernels, shared by gate_cuda.cu and the launcher gate_cuda.c.
 */
#ifndef ZPP_OPS_MOE_GATE_CUDA_H
#define ZPP_OPS_MOE_GATE_CUDA_H

#include <stdint.h>

enum {
    ZPP_GATE_CUDA_THREADS = 32,       /* a token's, and a warp's */
    ZPP_GATE_CUDA_SUM_THREADS = 128,  /* of the kernels that add up */
    ZPP_GATE_CUDA_BLOCK_TOKENS = 64,  /* as gate.c has it, as are the next */
    ZPP_GATE_CUDA_LANES = 16,
    ZPP_GATE_CUDA_MAX_EXPERTS = 1024,
    ZPP_GATE_CUDA_MAX_CHOICES = 64,
};

struct zpp_gate_cuda_args {
    const float *logits, *bias; /* bias NULL: none */
    float *weights, *losses;
    int32_t *chosen;
    unsigned long long *counts;
    double *sums;    /* [blocks][experts + 1]: shares of each expert, squares of log sum exp; work, as is the next */
    float *scores;   /* [tokens][experts + 2]: scores, 1 / their sum, log sum exp */
    const float *grad_weights, *grad_losses; /* of the backward, as is the next */
    float *grad_logits;
    uint64_t tokens, experts, k;
    uint8_t bias_per_token, sigmoid, normalise;
};

#endif
