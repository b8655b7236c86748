/* SPDX-License-Identifier: Apache-2.0
 *
 * low_walk_cuda.h for an optimizer with one state: included once a file, after LOW_CONSTS and
 *
 *     low_one(const LOW_CONSTS *, float grad, float *p, float *state)
 */
#ifndef ZPP_OPS_MOMENTS_LOW_ONE_CUDA_H
#define ZPP_OPS_MOMENTS_LOW_ONE_CUDA_H

#include "../round.h"

static __device__ __forceinline__ void low_element(const LOW_CONSTS *consts, float grad, float *p, float moments[3],
                                                   int count) {
    (void)count;
    low_one(consts, grad, p, &moments[0]);
}

#include "low_walk_cuda.h"

#endif
