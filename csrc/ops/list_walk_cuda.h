/* SPDX-License-Identifier: Apache-2.0
 *
 * The walk of an optimizer's CUDA kernel. Included once a file, after
 *
 *     WALK_CONSTS                                        its struct of constants
 *     walk_element(const WALK_CONSTS *, float grad, float *p, float *state)
 *                                                        one element; state NULL: none
 *
 * It gives walk(segments, consts). Each block finds its segment by its number, then walks one chunk with neighbouring
 * threads on neighbouring elements, four elements a thread in flight. Scalar loads keep any alignment legal and are
 * coalesced all the same: the pass is bound by memory. It is C as well: tests/c/cuda_on_cpu.h.
 */
#ifndef ZPP_OPS_LIST_WALK_CUDA_H
#define ZPP_OPS_LIST_WALK_CUDA_H

#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_LIST_CUDA_THREADS)
#endif

#include "element_cuda.h"
#include "list_cuda.h"
#include "segment_cuda.h"

/* Elements of one chunk in [begin, end), those of this thread. */
static __device__ __forceinline__ void walk_chunk(const struct zpp_list_cuda_segment *s, const WALK_CONSTS *consts,
                                                  uint64_t begin, uint64_t end) {
    const uint64_t stride = ZPP_LIST_CUDA_THREADS;
    for (uint64_t row = begin + threadIdx.x; row < end; row += stride * ZPP_LIST_CUDA_UNROLL) {
        float g[ZPP_LIST_CUDA_UNROLL], p[ZPP_LIST_CUDA_UNROLL], m[ZPP_LIST_CUDA_UNROLL];
#pragma unroll
        for (int k = 0; k < ZPP_LIST_CUDA_UNROLL; ++k) {
            const uint64_t i = row + (uint64_t)k * stride;
            if (i >= end) break;
            g[k] = zpp_cuda_load(s->grad, s->grad_kind, i);
            p[k] = s->param[i];
            m[k] = s->state ? s->state[i] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < ZPP_LIST_CUDA_UNROLL; ++k) {
            const uint64_t i = row + (uint64_t)k * stride;
            if (i >= end) break;
            walk_element(consts, g[k], &p[k], s->state ? &m[k] : NULL);
            s->param[i] = p[k];
            if (s->state) s->state[i] = m[k];
            zpp_cuda_store(s->param_out, s->out_kind, i, p[k]);
        }
    }
}

static __device__ __forceinline__ void walk(const struct zpp_list_cuda_segments *list, const WALK_CONSTS *consts) {
    const unsigned int k = ZPP_SEGMENT_OF(list->at, list->count, blockIdx.x);
    const struct zpp_list_cuda_segment *s = &list->at[k];
    const uint64_t begin = (uint64_t)(blockIdx.x - s->first_block) * ZPP_LIST_CUDA_CHUNK_ELEMS;
    const uint64_t left = s->elems - begin;
    walk_chunk(s, &consts[k], begin, begin + (left < ZPP_LIST_CUDA_CHUNK_ELEMS ? left : ZPP_LIST_CUDA_CHUNK_ELEMS));
}

#endif
