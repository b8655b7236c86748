/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on CUDA: the same arithmetic as on the CPU (adam_body.h, each operation rounded once), so the same bits; only
 * the payload of a NaN may differ.
 *
 * One launch for up to 32 segments of any lengths: each block finds its segment by its number, then walks one chunk
 * with neighbouring threads on neighbouring elements, four elements a thread in flight. Scalar loads keep any
 * alignment legal and are coalesced all the same: the pass is bound by memory. It is C as well, and
 * tests/c/test_ops_adam_cuda.c runs it on a CPU.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_ADAM_CUDA_THREADS)
#endif

#include "adam_cuda.h"

static __device__ __forceinline__ float load_grad(const void *grad, int kind, uint64_t i) {
    if (kind == ZPP_ADAM_CUDA_F32) return ((const float *)grad)[i];
    const unsigned short bits = ((const unsigned short *)grad)[i];
    if (kind == ZPP_ADAM_CUDA_BF16) return __uint_as_float((unsigned int)bits << 16);
    return __half2float(__ushort_as_half(bits));
}

static __device__ __forceinline__ unsigned short bf16_of(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x0040u);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static __device__ __forceinline__ void store_out(void *out, int kind, uint64_t i, float value) {
    if (kind == ZPP_ADAM_CUDA_F32) ((float *)out)[i] = value;
    if (kind == ZPP_ADAM_CUDA_BF16) ((unsigned short *)out)[i] = bf16_of(value);
    if (kind == ZPP_ADAM_CUDA_F16) ((unsigned short *)out)[i] = __half_as_ushort(__float2half_rn(value));
}

/* The segment of this block: the last one that begins at or before it. */
static __device__ __forceinline__ const struct zpp_adam_cuda_segment *find_segment(
    const struct zpp_adam_cuda_batch *batch, unsigned int block) {
    unsigned int k = batch->segments_count - 1;
    while (batch->segments[k].first_block > block) --k;
    return &batch->segments[k];
}

KERNEL zpp_adam_cuda(const __grid_constant__ struct zpp_adam_cuda_batch batch) {
    const struct zpp_adam_cuda_segment *s = find_segment(&batch, blockIdx.x);
    const uint64_t begin = (uint64_t)(blockIdx.x - s->first_block) * ZPP_ADAM_CUDA_CHUNK_ELEMS;
    const uint64_t left = s->elems - begin;
    const uint64_t end = begin + (left < ZPP_ADAM_CUDA_CHUNK_ELEMS ? left : ZPP_ADAM_CUDA_CHUNK_ELEMS);
    const uint64_t stride = ZPP_ADAM_CUDA_THREADS;
    for (uint64_t row = begin + threadIdx.x; row < end; row += stride * ZPP_ADAM_CUDA_UNROLL) {
        float g[ZPP_ADAM_CUDA_UNROLL], p[ZPP_ADAM_CUDA_UNROLL], m[ZPP_ADAM_CUDA_UNROLL], v[ZPP_ADAM_CUDA_UNROLL];
#pragma unroll
        for (int k = 0; k < ZPP_ADAM_CUDA_UNROLL; ++k) {
            const uint64_t i = row + (uint64_t)k * stride;
            if (i >= end) break;
            g[k] = load_grad(s->grad, s->grad_kind, i);
            p[k] = s->param[i], m[k] = s->exp_avg[i], v[k] = s->exp_avg_sq[i];
        }
#pragma unroll
        for (int k = 0; k < ZPP_ADAM_CUDA_UNROLL; ++k) {
            const uint64_t i = row + (uint64_t)k * stride;
            if (i >= end) break;
            zpp_adam_element(&s->consts, g[k], &p[k], &m[k], &v[k], s->max_exp_avg_sq ? s->max_exp_avg_sq + i : NULL);
            s->param[i] = p[k], s->exp_avg[i] = m[k], s->exp_avg_sq[i] = v[k];
            store_out(s->param_out, s->out_kind, i, p[k]);
        }
    }
}
