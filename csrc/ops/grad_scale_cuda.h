/* SPDX-License-Identifier: Apache-2.0
 *
 * The words of a step (grad_scale.h), read by kernels. C as well: tests/c/cuda_on_cpu.h.
 */
#ifndef ZPP_OPS_GRAD_SCALE_CUDA_H
#define ZPP_OPS_GRAD_SCALE_CUDA_H

#include "grad_scale.h"

/* The constants of a segment have `value`, which is 1 (or -1) where `at` has the number: the product is the same. */
static __device__ __forceinline__ float zpp_grad_scale_factor(const struct zpp_grad_scale *scale) {
    return scale->at ? *scale->at : 1.0f;
}

static __device__ __forceinline__ int zpp_grad_scale_skips(const struct zpp_grad_scale *scale) {
    return scale->skip && *scale->skip;
}

#endif
