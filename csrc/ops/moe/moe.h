/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts: from a token's logits to rows grouped by expert and back (Shazeer et al. 2017; GShard, Lepikhin
 * et al. 2021; Switch, Fedus et al. 2022; DeepSpeed-MoE, Rajbhandari et al. 2022). Four steps, each with its backward:
 *
 *   gate      scores of T tokens for E experts, the best k of each, their weights, and two losses
 *   plan      a counting sort: the row of each of the T k assignments in a buffer grouped by expert
 *   dispatch  tokens into that buffer; backward: combine without weights
 *   combine   y_t = sum_j w_tj row_tj; backward: rows and weights
 *
 * DeepSpeed writes dispatch and combine as einsums over a T x E x C mask, T E C W operations each; here every row is
 * moved once. An assignment is a pair (token t, choice j), numbered t k + j.
 *
 * The buffer. capacity 0 (dropless): T k rows, expert after expert, none empty. capacity C > 0: E C rows, expert e has
 * rows e C to e C + C - 1, of which the first kept[e] are used and the others are zero; what does not fit is dropped.
 * Experts lie in their order, so with E / R of them on each of R ranks, what goes to a rank is one slice of the buffer.
 *
 * Every result is the same bits for every CPU level and number of threads (a NaN is a NaN).
 */
#ifndef ZPP_OPS_MOE_H
#define ZPP_OPS_MOE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"

enum {
    ZPP_MOE_MAX_EXPERTS = 1024,
    ZPP_MOE_MAX_CHOICES = 64,
    ZPP_MOE_LOSSES = 2, /* balance, z */
};

/* --- gate ----------------------------------------------------------------------------------------------------------
 *   s_te = softmax_e(x_t) or sigmoid(x_te)
 *   chosen: the k experts with the greatest x_te + bias_e (bias_te), greatest first, ties to the lower expert. The bias
 *           (noise, or the balancing bias of loss-free routing) picks only; a NaN counts as the least number.
 *   w_tj  = s of the j-th chosen; with `normalise` divided by their sum over j
 *   f_e   = counts_e / (T k),  P_e = mean_t p_te,  p_te = s_te / sum_e s_te     (softmax: s itself)
 *   balance = E sum_e f_e P_e                    (Switch, equation 4, for any k; f is taken as constant)
 *   z       = mean_t (log sum_e exp x_te)^2      (ST-MoE, equation 5)
 * e^x is a polynomial (exp.h), within 2 ulp; an expert masked by -inf has a score below 1e-37. */
struct zpp_moe_gate {
    const float *logits; /* [tokens][experts] */
    const float *bias;   /* [experts] or, with bias_per_token, [tokens][experts]; NULL: none */
    size_t tokens, experts, k; /* 1 <= experts <= ZPP_MOE_MAX_EXPERTS, 1 <= k <= experts and ZPP_MOE_MAX_CHOICES */
    bool bias_per_token, sigmoid, normalise;
};
/* weights and chosen [tokens][k]; counts [experts]: assignments before any is dropped; losses [ZPP_MOE_LOSSES], 0
 * without tokens. NOMEM: nothing was written. */
zpp_status zpp_moe_gate(const struct zpp_moe_gate *gate, float *weights, int32_t *chosen, int64_t *counts,
                        float *losses, zpp_pool *pool, struct zpp_err *err);
/* Gradient by the logits from those by weights [tokens][k] and losses [ZPP_MOE_LOSSES]. `gate` as in the forward (its
 * bias is not read), with its results chosen (each in [0, experts)) and counts. */
void zpp_moe_gate_backward(const struct zpp_moe_gate *gate, const int32_t *chosen, const int64_t *counts,
                           const float *grad_weights, const float *grad_losses, float *grad_logits, zpp_pool *pool);

/* --- plan ----------------------------------------------------------------------------------------------------------
 * slots [tokens * k]: the row of each assignment, -1 for one that is dropped; kept [experts]: rows used of each expert.
 * Within an expert, rows are in order of tokens; where rows are short, all first choices come before all second ones
 * (GShard, algorithm 1), and among equals earlier tokens, or, with a seed >= 0, tokens in a random order that the seed
 * determines (random token selection, DeepSpeed-MoE section 3.2): the end of a sequence is not always what is dropped.
 * Serial: it costs about a thousandth of moving the rows. NOMEM: nothing was written. */
struct zpp_moe_plan {
    const int32_t *chosen; /* [tokens * k], each in [0, experts) */
    size_t tokens, experts, k;
    size_t capacity; /* rows an expert; 0: dropless */
    int64_t seed;    /* < 0: in order */
};
zpp_status zpp_moe_plan(const struct zpp_moe_plan *plan, int32_t *slots, int64_t *kept, struct zpp_err *err);

/* --- rows ----------------------------------------------------------------------------------------------------------
 * What is common to the moves. dtype is F32, BF16 or F16; sums are taken in fp32 in order of j and rounded once. */
struct zpp_moe_rows {
    const int32_t *slots; /* [tokens * k], each -1 or a row of its own below the buffer's rows */
    const int64_t *kept;  /* [experts]; read with capacity > 0 only */
    size_t tokens, k, experts, capacity, width_elems;
    zpp_dtype dtype;
};
size_t zpp_moe_buffer_rows(const struct zpp_moe_rows *rows);
/* buffer[slot_tj] = x_t, bit for bit; empty rows are zeroed. */
void zpp_moe_dispatch(const struct zpp_moe_rows *rows, const void *x, void *buffer, zpp_pool *pool);
/* y_t = sum_j w_tj buffer[slot_tj] over those not dropped; weights [tokens * k] or NULL: all 1. */
void zpp_moe_combine(const struct zpp_moe_rows *rows, const void *buffer, const float *weights, void *y,
                     zpp_pool *pool);
/* grad_buffer[slot_tj] = w_tj grad_y_t (empty rows zero), grad_weights_tj = <buffer[slot_tj], grad_y_t>, dropped: 0 */
void zpp_moe_combine_backward(const struct zpp_moe_rows *rows, const void *buffer, const float *weights,
                              const void *grad_y, void *grad_buffer, float *grad_weights, zpp_pool *pool);

/* --- SwiGLU --------------------------------------------------------------------------------------------------------
 * The activation of gated experts (Shazeer 2020): out = silu(g) * u, silu(g) = g s, s = 1 / (1 + e^-g), of rows [g | u]
 * of 2 inner elements; F32, BF16 or F16, computed in fp32 and rounded once. The backward, from grad by out, makes `out`
 * again, for the gradient of what follows:
 *   grad_u = grad silu(g),   grad_g = grad u (s + silu(g) (1 - s))
 * gate_up, grad_gate_up: [rows][2 * inner]; grad, out: [rows][inner]. grad_gate_up may be gate_up, and out grad. */
void zpp_moe_swiglu(const void *gate_up, void *out, size_t rows, size_t inner_elems, zpp_dtype dtype, zpp_pool *pool);
void zpp_moe_swiglu_backward(const void *gate_up, const void *grad, void *grad_gate_up, void *out, size_t rows,
                             size_t inner_elems, zpp_dtype dtype, zpp_pool *pool);

/* --- on CUDA -------------------------------------------------------------------------------------------------------
 * The same, where all pointers in the structs and beside them are device memory: enqueued on `native` (torch's current
 * stream). Same bits, but for the z loss and its gradient, which take the device's logarithm. Experts and slots are not
 * checked, which would wait for the device: one out of range is left out. NOT_BUILT without the kernels, DEVICE if a
 * launch fails. `work`: zpp_moe_gate_cuda_work_bytes, aligned to 8; `order`: of tokens, NULL where seed < 0 or capacity
 * 0. */
size_t zpp_moe_gate_cuda_work_bytes(const struct zpp_moe_gate *gate);
zpp_status zpp_moe_gate_cuda(zpp_device *device, void *native, const struct zpp_moe_gate *gate, float *weights,
                             int32_t *chosen, int64_t *counts, float *losses, void *work, struct zpp_err *err);
zpp_status zpp_moe_gate_backward_cuda(zpp_device *device, void *native, const struct zpp_moe_gate *gate,
                                      const int32_t *chosen, const int64_t *counts, const float *grad_weights,
                                      const float *grad_losses, float *grad_logits, struct zpp_err *err);
zpp_status zpp_moe_plan_cuda(zpp_device *device, void *native, const struct zpp_moe_plan *plan, int32_t *slots,
                             int64_t *kept, uint32_t *order, struct zpp_err *err);
zpp_status zpp_moe_dispatch_cuda(zpp_device *device, void *native, const struct zpp_moe_rows *rows, const void *x,
                                 void *buffer, struct zpp_err *err);
zpp_status zpp_moe_combine_cuda(zpp_device *device, void *native, const struct zpp_moe_rows *rows, const void *buffer,
                                const float *weights, void *y, struct zpp_err *err);
zpp_status zpp_moe_combine_backward_cuda(zpp_device *device, void *native, const struct zpp_moe_rows *rows,
                                         const void *buffer, const float *weights, const void *grad_y,
                                         void *grad_buffer, float *grad_weights, struct zpp_err *err);

#endif
