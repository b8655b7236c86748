/* SPDX-License-Identifier: Apache-2.0
 *
 * The step with a frozen variance on CUDA: the arguments of the kernel, shared by frozen_cuda.cu and the launcher
 * frozen_cuda.c.
 */
#ifndef ZPP_OPS_FROZEN_CUDA_H
#define ZPP_OPS_FROZEN_CUDA_H

#include "../list_cuda.h"
#include "frozen_body.h"

struct zpp_frozen_cuda_batch {
    struct zpp_list_cuda_segments list; /* its `grad` is m, in fp32, its `state` v: both are read only */
    struct zpp_frozen_consts consts[ZPP_LIST_CUDA_SEGMENTS];
};

#endif
