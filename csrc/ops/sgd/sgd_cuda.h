/* SPDX-License-Identifier: Apache-2.0
 *
 * SGD on CUDA: the arguments of the kernels, shared by sgd_cuda.cu and the launcher sgd_cuda.c.
 */
#ifndef ZPP_OPS_SGD_CUDA_H
#define ZPP_OPS_SGD_CUDA_H

#include "../list_cuda.h"
#include "../moments/low_cuda.h"
#include "sgd_body.h"

struct zpp_sgd_cuda_batch {
    struct zpp_list_cuda_segments list;
    struct zpp_sgd_consts consts[ZPP_LIST_CUDA_SEGMENTS];
};

struct zpp_sgd_low_cuda_batch {
    struct zpp_low_cuda_segments list;
    struct zpp_sgd_consts consts[ZPP_LOW_CUDA_SEGMENTS];
};

#endif
