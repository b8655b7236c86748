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

#include "../element_cuda.h"
#include "../segment_cuda.h"
#include "adam_cuda.h"

KERNEL zpp_adam_cuda(const __grid_constant__ struct zpp_adam_cuda_batch batch) {
    const struct zpp_adam_cuda_segment *s =
        &batch.segments[ZPP_SEGMENT_OF(batch.segments, batch.segments_count, blockIdx.x)];
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
            g[k] = zpp_cuda_load(s->grad, s->grad_kind, i);
            p[k] = s->param[i], m[k] = s->exp_avg[i], v[k] = s->exp_avg_sq[i];
        }
#pragma unroll
        for (int k = 0; k < ZPP_ADAM_CUDA_UNROLL; ++k) {
            const uint64_t i = row + (uint64_t)k * stride;
            if (i >= end) break;
            zpp_adam_element(&s->consts, g[k], &p[k], &m[k], &v[k], s->max_exp_avg_sq ? s->max_exp_avg_sq + i : NULL);
            s->param[i] = p[k], s->exp_avg[i] = m[k], s->exp_avg_sq[i] = v[k];
            zpp_cuda_store(s->param_out, s->out_kind, i, p[k]);
        }
    }
}
