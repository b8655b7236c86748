/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on moments in bf16 or 8 bits on CUDA: moments/low_walk_cuda.h has the walk.
 */
#ifndef ZPP_ON_CPU
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void __launch_bounds__(ZPP_LOW_CUDA_THREADS)
#endif

#include "adam_low_cuda.h"

#define LOW_CONSTS struct zpp_adam_consts

static __device__ __forceinline__ void low_element(const struct zpp_adam_consts *consts, float grad, float *p,
                                                   float moments[3], int count) {
    zpp_adam_element(consts, grad, p, &moments[0], &moments[1], count == 3 ? &moments[2] : NULL);
}

#include "../moments/low_walk_cuda.h"

KERNEL zpp_adam_low_cuda(const __grid_constant__ struct zpp_adam_low_cuda_batch batch) {
    __shared__ struct zpp_low_tops tops;
    low_walk(&batch.list, batch.consts, &tops);
}
