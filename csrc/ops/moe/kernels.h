/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/moe: what a CPU version offers. All are thread-free and ask
 * for no alignment. Sums run in sixteen lanes (element i in lane i % 16), added as zpp_moe_lanes_sum does.
 */
#ifndef ZPP_OPS_MOE_KERNELS_H
#define ZPP_OPS_MOE_KERNELS_H

#include "../isa.h"
#include "moe.h"

enum {
    ZPP_MOE_LANES = 16,
    ZPP_MOE_GATE_BLOCK_TOKENS = 64, /* whose sums for the losses belong together */
};

struct zpp_moe_row_sums {
    float max; /* softmax: greatest logit */
    float sum; /* softmax: of e^(x - max); sigmoid: of the scores */
};

/* What is less does not count, for the choice of experts: it comes last, as NaN and -inf do. */
static const float ZPP_MOE_LEAST = -3.4e38f;

/* A row of SwiGLU's backward; what is written may be what is read at the same place. */
struct zpp_moe_swiglu_row {
    const void *gate, *up, *grad;
    void *grad_gate, *grad_up, *out;
};

struct zpp_moe_kernels {
    /* A row of scores, which have room for whole sixteens; what is beyond `experts` becomes 0. */
    struct zpp_moe_row_sums (*scores)(const float *logits, size_t experts, bool sigmoid, float *scores);
    /* The k greatest of by [experts], greatest first, ties to the lower index. work: whole sixteens; it may be `by`. */
    void (*choose)(const float *by, size_t experts, size_t k, float *work, int32_t *chosen);
    /* to += by * from; whole sixteens, of as many as hold `experts` */
    void (*add)(float *to, const float *from, float by, size_t experts);
    /* out = sum_j weights[j] rows[j]; weights NULL: plain sum. count >= 1. `stream`, here and below: past the cache;
     * the caller ends with zpp_streamed(). */
    void (*combine)(void *out, const void *const *rows, const float *weights, size_t count, size_t elems,
                    zpp_dtype dtype, bool stream);
    /* out = weight * row */
    void (*scale)(void *out, const void *row, float weight, size_t elems, zpp_dtype dtype, bool stream);
    float (*dot)(const void *a, const void *b, size_t elems, zpp_dtype dtype);
    void (*copy)(void *to, const void *from, size_t bytes, bool stream);
    /* out = silu(gate) * up; out may be gate or up */
    void (*swiglu)(void *out, const void *gate, const void *up, size_t elems, zpp_dtype dtype);
    void (*swiglu_backward)(const struct zpp_moe_swiglu_row *row, size_t elems, zpp_dtype dtype);
};

ZPP_ISA_DECLARE(struct zpp_moe_kernels, zpp_moe);

/* The version for this CPU; the one of a level, NULL where there is none. */
const struct zpp_moe_kernels *zpp_moe_kernels(void);
const struct zpp_moe_kernels *zpp_moe_kernels_at(enum zpp_cpu_level level);

/* Experts in whole sixteens. */
static inline size_t zpp_moe_padded(size_t experts) {
    return (experts + ZPP_MOE_LANES - 1) / ZPP_MOE_LANES * ZPP_MOE_LANES;
}

static inline float zpp_moe_lanes_sum(float lanes[ZPP_MOE_LANES]) {
    for (int width = ZPP_MOE_LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    }
    return lanes[0];
}

/* maxps: the second where they are not ordered. */
static inline float zpp_moe_max(float a, float b) { return a > b ? a : b; }

static inline float zpp_moe_lanes_max(float lanes[ZPP_MOE_LANES]) {
    for (int width = ZPP_MOE_LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] = zpp_moe_max(lanes[l], lanes[l + width]);
    }
    return lanes[0];
}

#endif
