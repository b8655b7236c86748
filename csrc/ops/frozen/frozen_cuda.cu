/* SPDX-License-Identifier: Apache-2.0
 *
 * The step with a frozen variance on CUDA: the same arithmetic as on the CPU (frozen_body.h, each operation rounded
 * once), so the same bits; only the payload of a NaN may differ. Laid out as list_walk_cuda.h says, but v is not
 * written.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_LIST_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "../segment_cuda.h"
#include "frozen_cuda.h"

KERNEL zpp_frozen_cuda(const __grid_constant__ struct zpp_frozen_cuda_batch batch) {
    const unsigned int k = ZPP_SEGMENT_OF(batch.list.at, batch.list.count, blockIdx.x);
    const struct zpp_list_cuda_segment *s = &batch.list.at[k];
    const float *exp_avg = (const float *)s->grad, *exp_avg_sq = s->state;
    const uint64_t begin = (uint64_t)(blockIdx.x - s->first_block) * ZPP_LIST_CUDA_CHUNK_ELEMS;
    const uint64_t left = s->elems - begin;
    const uint64_t end = begin + (left < ZPP_LIST_CUDA_CHUNK_ELEMS ? left : ZPP_LIST_CUDA_CHUNK_ELEMS);
    /* Four elements a thread in flight: their loads are independent of each other's stores. */
    for (uint64_t row = begin + threadIdx.x; row < end; row += ZPP_LIST_CUDA_THREADS * ZPP_LIST_CUDA_UNROLL) {
        float p[ZPP_LIST_CUDA_UNROLL], m[ZPP_LIST_CUDA_UNROLL], v[ZPP_LIST_CUDA_UNROLL];
#pragma unroll
        for (int u = 0; u < ZPP_LIST_CUDA_UNROLL; ++u) {
            const uint64_t i = row + (uint64_t)u * ZPP_LIST_CUDA_THREADS;
            if (i >= end) break;
            p[u] = s->param[i], m[u] = exp_avg[i], v[u] = exp_avg_sq[i];
        }
#pragma unroll
        for (int u = 0; u < ZPP_LIST_CUDA_UNROLL; ++u) {
            const uint64_t i = row + (uint64_t)u * ZPP_LIST_CUDA_THREADS;
            if (i >= end) break;
            const float moved = zpp_frozen_moved(&batch.consts[k], p[u], m[u], v[u]);
            s->param[i] = moved;
            zpp_cuda_store(s->param_out, s->out_kind, i, moved);
        }
    }
}
