/* SPDX-License-Identifier: Apache-2.0
 *
 * 0/1 Adam's step on CUDA: the same arithmetic as on the CPU (zero_one_body.h, each operation rounded once), so the
 * same bits; only the payload of a NaN may differ. Each block finds its segment by its number, then walks one chunk
 * with neighbouring threads on neighbouring elements: any alignment is legal and loads are coalesced all the same.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_ZERO_ONE_CUDA_THREADS)
#endif

#include "../element_cuda.h"
#include "../segment_cuda.h"
#include "zero_one_cuda.h"

KERNEL zpp_zero_one_cuda(const __grid_constant__ struct zpp_zero_one_cuda_batch batch) {
    const struct zpp_zero_one_cuda_segment *s =
        &batch.segments[ZPP_SEGMENT_OF(batch.segments, batch.count, blockIdx.x)];
    const uint64_t begin = (uint64_t)(blockIdx.x - s->first_block) * ZPP_ZERO_ONE_CUDA_CHUNK_ELEMS;
    const uint64_t most = begin + ZPP_ZERO_ONE_CUDA_CHUNK_ELEMS, end = s->elems < most ? s->elems : most;
#pragma unroll 4
    for (uint64_t i = begin + threadIdx.x; i < end; i += ZPP_ZERO_ONE_CUDA_THREADS) {
        const float m = zpp_zero_one_momentum(&s->consts, zpp_cuda_load(s->grad, s->grad_kind, i), s->exp_avg[i]);
        const float p = zpp_frozen_moved(&s->consts.walk, s->param[i], m, s->exp_avg_sq[i]);
        s->exp_avg[i] = m;
        if (s->moved) s->moved[i] = zpp_zero_one_moved(&s->consts, s->moved[i], m);
        if (s->anchor) s->anchor[i] = zpp_zero_one_anchor(&s->consts, s->anchor[i]);
        s->param[i] = p;
        zpp_cuda_store(s->param_out, s->out_kind, i, p);
    }
}
