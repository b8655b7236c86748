/* SPDX-License-Identifier: Apache-2.0
 *
 * The element-wise optimizers on CUDA: the arithmetic of their headers, as on the CPU, each operation rounded once, so
 * the same bits; only the payload of a NaN may differ.
 *
 * Each block finds its segment by its number, then walks one chunk with neighbouring threads on neighbouring elements,
 * four elements a thread in flight: their loads are independent of each other's stores. Scalar loads keep any alignment
 * legal and are coalesced all the same: the pass is bound by memory. States in fewer bits are walked by
 * moments/low_walk_cuda.h. It is C as well, and tests/c runs it on a CPU (tests/c/cuda_on_cpu.h).
 *
 * Adam has kernels of its own for parameters without an fp32 copy (`no_master`): they are bf16 at param_out, and are
 * rounded as the CPU rounds them (csrc/zero/step_plan.c). So has Adam in float64.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#endif

#include "../element_cuda.h"
#include "../grad_scale_cuda.h"
#include "../moments/low_walk_cuda.h"
#include "../segment_cuda.h"
#include "adam_f64.h"
#include "optim_cuda.h"

typedef float (*update_fn)(const void *consts, float g, float p, float *x, const uint32_t options);

#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) \
    static __device__ __forceinline__ float update_##name(const void *consts, float g, float p, float *x,             \
                                                          const uint32_t options) {                                   \
        return zpp_##name##_update((const struct zpp_##name##_consts *)consts, g, p, x, options);                     \
    }                                                                                                                 \
    static __device__ __forceinline__ void low_##name(const void *consts, float grad, float *p, float *moments) {     \
        const struct zpp_##name##_consts *c = (const struct zpp_##name##_consts *)consts;                             \
        *p = zpp_##name##_update(c, grad, *p, moments, c->options);                                                   \
    }                                                                                                                 \
    enum { NAME##_WRITTEN = written };
#include "optimizers.def"
#undef ZPP_OPTIMIZER

enum { UNROLL = ZPP_OPTIM_CUDA_UNROLL, MOST_STATES = 4 };

/* This thread's elements of its block's chunk. */
static __device__ __forceinline__ void walk(const struct zpp_optim_cuda_segment *s, float *const *state, int states,
                                            unsigned int written, update_fn update, const void *consts,
                                            uint32_t options, const int no_master, float factor) {
    const uint64_t begin = (uint64_t)(blockIdx.x - s->first_block) * ZPP_OPTIM_CUDA_CHUNK_ELEMS;
    const uint64_t left = s->elems - begin, stride = ZPP_OPTIM_CUDA_THREADS;
    const uint64_t end = begin + (left < ZPP_OPTIM_CUDA_CHUNK_ELEMS ? left : ZPP_OPTIM_CUDA_CHUNK_ELEMS);
    for (uint64_t row = begin + threadIdx.x; row < end; row += stride * UNROLL) {
        float g[UNROLL], p[UNROLL], x[UNROLL][MOST_STATES];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const uint64_t i = row + (uint64_t)u * stride;
            if (i >= end) break;
            g[u] = s->grad_dtype == ZPP_CUDA_NONE ? 0.0f : ZPP_MUL(zpp_cuda_load(s->grad, s->grad_dtype, i), factor);
            p[u] = zpp_param_at(s->param, s->param_out, no_master, i);
#pragma unroll
            for (int k = 0; k < states; ++k) x[u][k] = options >> k & 1 ? state[k][i] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const uint64_t i = row + (uint64_t)u * stride;
            if (i >= end) break;
            const float moved = update(consts, g[u], p[u], x[u], options);
            zpp_put_param(s->param, s->param_key, s->param_out, s->out_dtype, no_master, i, moved);
#pragma unroll
            for (int k = 0; k < states; ++k) if (options & written & 1u << k) state[k][i] = x[u][k];
        }
    }
}

#define WALK(NAME, name, no_master)                                                                                   \
    if (zpp_grad_scale_skips(&batch.head.scale)) return;                                                              \
    const unsigned int k = ZPP_SEGMENT_OF(batch.at, batch.head.count, blockIdx.x);                                    \
    walk(&batch.at[k], batch.states_of[k], ZPP_OPTIM_CUDA_##NAME##_STATES, NAME##_WRITTEN, update_##name,             \
         &batch.consts[k], batch.consts[k].options, no_master, zpp_grad_scale_factor(&batch.head.scale))

KERNEL zpp_adam_cuda(const __grid_constant__ struct zpp_adam_cuda_batch batch) { WALK(ADAM, adam, 0); }
KERNEL zpp_lion_cuda(const __grid_constant__ struct zpp_lion_cuda_batch batch) { WALK(LION, lion, 0); }
KERNEL zpp_adagrad_cuda(const __grid_constant__ struct zpp_adagrad_cuda_batch batch) { WALK(ADAGRAD, adagrad, 0); }
KERNEL zpp_sgd_cuda(const __grid_constant__ struct zpp_sgd_cuda_batch batch) { WALK(SGD, sgd, 0); }
KERNEL zpp_frozen_cuda(const __grid_constant__ struct zpp_frozen_cuda_batch batch) { WALK(FROZEN, frozen, 0); }
KERNEL zpp_zero_one_cuda(const __grid_constant__ struct zpp_zero_one_cuda_batch batch) { WALK(ZERO_ONE, zero_one, 0); }
KERNEL zpp_adam_no_master_cuda(const __grid_constant__ struct zpp_adam_cuda_batch batch) { WALK(ADAM, adam, 1); }

/* In float64 (adam_f64.h). Most GPUs have few units for it, so nothing is done to keep more elements in flight. */
KERNEL zpp_adam_f64_cuda(const __grid_constant__ struct zpp_adam_f64_cuda_batch batch) {
    if (batch.scale.skip && *batch.scale.skip) return;
    /* The constants have the factor of the host, which is 1 (or -1) where the device has one: the product is the
     * same. */
    const double factor = batch.scale.at ? *batch.scale.at : 1.0;
    const struct zpp_adam_f64_cuda_segment *s = &batch.at[ZPP_SEGMENT_OF(batch.at, batch.count, blockIdx.x)];
    const uint64_t begin = (uint64_t)(blockIdx.x - s->first_block) * ZPP_ADAM_F64_CUDA_CHUNK_ELEMS;
    const uint64_t most = begin + ZPP_ADAM_F64_CUDA_CHUNK_ELEMS, end = s->elems < most ? s->elems : most;
    for (uint64_t i = begin + threadIdx.x; i < end; i += ZPP_ADAM_F64_CUDA_THREADS) {
        double *top = s->max_exp_avg_sq ? &s->max_exp_avg_sq[i] : (double *)0;
        zpp_adam_f64_update(&s->consts, ZPP_MUL64(s->grad[i], factor), &s->param[i], &s->exp_avg[i],
                            &s->exp_avg_sq[i], top);
    }
}

#define LOW_WALK(name, no_master)                                                                                     \
    __shared__ struct zpp_low_tops tops;                                                                              \
    low_walk(&batch.list, batch.consts, sizeof batch.consts[0], low_##name, no_master, &tops)

#ifndef ZPP_ON_CPU
/* Three blocks a processor: left to itself, ptxas takes 64 registers and spills; for two it takes 91 on new GPUs. */
#undef KERNEL
#define KERNEL extern "C" __global__ void __launch_bounds__(256, 3)
#endif
KERNEL zpp_adam_low_cuda(const __grid_constant__ struct zpp_adam_low_cuda_batch batch) { LOW_WALK(adam, 0); }
KERNEL zpp_lion_low_cuda(const __grid_constant__ struct zpp_lion_low_cuda_batch batch) { LOW_WALK(lion, 0); }
KERNEL zpp_adagrad_low_cuda(const __grid_constant__ struct zpp_adagrad_low_cuda_batch batch) { LOW_WALK(adagrad, 0); }
KERNEL zpp_sgd_low_cuda(const __grid_constant__ struct zpp_sgd_low_cuda_batch batch) { LOW_WALK(sgd, 0); }
KERNEL zpp_adam_low_no_master_cuda(const __grid_constant__ struct zpp_adam_low_cuda_batch batch) { LOW_WALK(adam, 1); }
