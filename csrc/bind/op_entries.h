/* SPDX-License-Identifier: Apache-2.0
 *
 * Entries of ops.def, and the threads that they run on.
 */
#ifndef ZPP_BIND_OP_ENTRIES_H
#define ZPP_BIND_OP_ENTRIES_H

#include "../base/device.h"
#include "../base/pool.h"
#include "shim.h"

/* Boxed functions: read `inputs` arguments from the stack, leave `outputs` results there. Any thread, no GIL. */
void zpp_op_adam_step(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_adam_step_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_adam_step_low(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_adam_step_low_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moments_encode(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moments_decode(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_norm_squares(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_norm_squares_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lion_step(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lion_step_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lion_step_low(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lion_step_low_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_adagrad_step(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_adagrad_step_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_adagrad_step_low(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_adagrad_step_low_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_sgd_step(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_sgd_step_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_sgd_step_low(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_sgd_step_low_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_quantise(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_quantise_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_dequantise(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_dequantise_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_quant_sum(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_quant_sum_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_quant_reduce_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_quant_reduce(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_onebit_compress(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_onebit_compress_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_onebit_decode(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_onebit_decode_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_onebit_reduce(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_onebit_reduce_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lamb_step(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lamb_step_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lamb_step_low(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lamb_step_low_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lamb_moments(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_lamb_moments_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_frozen_adam_step(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_frozen_adam_step_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_zero_one_adam_step(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_zero_one_adam_step_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_onebit_lamb_fresh(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_onebit_lamb_fresh_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_gate(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_gate_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_gate_backward(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_gate_backward_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_plan(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_plan_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_dispatch(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_dispatch_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_dispatch_into(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_dispatch_into_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_combine(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_combine_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_combine_into(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_combine_into_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_combine_backward(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_moe_combine_backward_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_sparse_attention(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_sparse_attention_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_sparse_attention_backward(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_sparse_attention_backward_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_token_sample(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_token_sample_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_token_gather(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_token_gather_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_token_scatter(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_token_scatter_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_fp8_quantise(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_fp8_quantise_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_fp8_dequantise(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_fp8_dequantise_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs);
void zpp_op_adopt(StableIValue *stack, uint64_t inputs, uint64_t outputs);

/* An entry for the CPU and one for CUDA of a static body(stack, inputs, cuda). */
#define ZPP_OP_BOTH(op, body)                                                               \
    void zpp_op_##op(StableIValue *stack, uint64_t inputs, uint64_t outputs) {              \
        (void)outputs;                                                                      \
        body(stack, inputs, false);                                                         \
    }                                                                                       \
    void zpp_op_##op##_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs) {       \
        (void)outputs;                                                                      \
        body(stack, inputs, true);                                                          \
    }

/* A pool over torch's threads. New; free with zpp_pool_destroy. */
zpp_status zpp_op_pool_create(int threads, zpp_pool **out, struct zpp_err *err);

/* The threads of ops: as many as torch.get_num_threads() says, kept between calls and made anew when that number
 * changes. NULL (this thread alone) for one thread, where none can be started, or while another thread runs an op. Give
 * it back. */
zpp_pool *zpp_op_pool_take(void);
void zpp_op_pool_give(zpp_pool *pool);

/* Our device for torch's device `index`, made once and kept for the life of the process, and torch's current stream
 * there. NOT_BUILT without a driver, or in a torch without CUDA. Any thread. */
zpp_status zpp_op_cuda(int32_t index, zpp_device **device, void **stream, struct zpp_err *err);

#endif
