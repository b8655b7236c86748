/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches the gate on CUDA (gate_cuda.cu).
 */
#include "gate_cuda.h"

#include "../launch_cuda.h"
#include "kernels.h"

_Static_assert(ZPP_GATE_CUDA_LANES == (int)ZPP_MOE_LANES, "the order of moe.h");
_Static_assert(ZPP_GATE_CUDA_MAX_EXPERTS == (int)ZPP_MOE_MAX_EXPERTS, "room for a row");
_Static_assert(ZPP_GATE_CUDA_MAX_CHOICES == (int)ZPP_MOE_MAX_CHOICES, "room for the choices");
_Static_assert(ZPP_GATE_CUDA_BLOCK_TOKENS == (int)ZPP_MOE_GATE_BLOCK_TOKENS, "the order of gate.c");

static uint64_t sums_elems(const struct zpp_moe_gate *gate) {
    return zpp_launch_cuda_blocks(gate->tokens, ZPP_GATE_CUDA_BLOCK_TOKENS) * (gate->experts + 1);
}

size_t zpp_moe_gate_cuda_work_bytes(const struct zpp_moe_gate *gate) {
    return sums_elems(gate) * sizeof(double) + gate->tokens * (gate->experts + 2) * sizeof(float);
}

static struct zpp_gate_cuda_args args_of(const struct zpp_moe_gate *gate) {
    return (struct zpp_gate_cuda_args){
        .logits = gate->logits, .bias = gate->bias, .tokens = gate->tokens, .experts = gate->experts, .k = gate->k,
        .bias_per_token = gate->bias_per_token, .sigmoid = gate->sigmoid, .normalise = gate->normalise };
}

zpp_status zpp_moe_gate_cuda(zpp_device *device, void *native, const struct zpp_moe_gate *gate, float *weights,
                             int32_t *chosen, int64_t *counts, float *losses, void *work, struct zpp_err *err) {
    struct zpp_gate_cuda_args args = args_of(gate);
    args.weights = weights;
    args.chosen = chosen;
    args.counts = (unsigned long long *)(void *)counts;
    args.losses = losses;
    args.sums = work;
    args.scores = (float *)(void *)(args.sums + sums_elems(gate));
    const unsigned int threads = ZPP_GATE_CUDA_SUM_THREADS;
    const struct zpp_launch_cuda launches[] = {
        { "zpp_moe_cuda_zero", zpp_launch_cuda_blocks(gate->experts, threads), threads, 0 },
        { "zpp_moe_cuda_token", gate->tokens, ZPP_GATE_CUDA_THREADS, 0 },
        { "zpp_moe_cuda_shares", zpp_launch_cuda_blocks(sums_elems(gate), threads), threads, 0 },
        { "zpp_moe_cuda_losses", 1, threads, 0 } };
    zpp_status status = ZPP_OK;
    for (size_t k = 0; k < sizeof launches / sizeof launches[0] && status == ZPP_OK; ++k) {
        status = zpp_launch_cuda(device, native, &launches[k], &args, err);
    }
    return status;
}

zpp_status zpp_moe_gate_backward_cuda(zpp_device *device, void *native, const struct zpp_moe_gate *gate,
                                      const int32_t *chosen, const int64_t *counts, const float *grad_weights,
                                      const float *grad_losses, float *grad_logits, struct zpp_err *err) {
    struct zpp_gate_cuda_args args = args_of(gate);
    args.chosen = (int32_t *)(uintptr_t)chosen;
    args.counts = (unsigned long long *)(uintptr_t)counts;
    args.grad_weights = grad_weights;
    args.grad_losses = grad_losses;
    args.grad_logits = grad_logits;
    const struct zpp_launch_cuda launch = { "zpp_moe_cuda_gate_backward", gate->tokens, ZPP_GATE_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, &args, err);
}
