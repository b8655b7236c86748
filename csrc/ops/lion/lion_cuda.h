/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion on CUDA: the arguments of the kernels, shared by lion_cuda.cu and the launcher lion_cuda.c.
 */
#ifndef ZPP_OPS_LION_CUDA_H
#define ZPP_OPS_LION_CUDA_H

#include "../list_cuda.h"
#include "../moments/low_cuda.h"
#include "lion_body.h"

struct zpp_lion_cuda_batch {
    struct zpp_list_cuda_segments list;
    struct zpp_lion_consts consts[ZPP_LIST_CUDA_SEGMENTS];
};

struct zpp_lion_low_cuda_batch {
    struct zpp_low_cuda_segments list;
    struct zpp_lion_consts consts[ZPP_LOW_CUDA_SEGMENTS];
};

#endif
