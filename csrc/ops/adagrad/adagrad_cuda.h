/* SPDX-License-Identifier: Apache-2.0
 *
 * Adagrad on CUDA: the arguments of the kernels, shared by adagrad_cuda.cu and the launcher adagrad_cuda.c.
 */
#ifndef ZPP_OPS_ADAGRAD_CUDA_H
#define ZPP_OPS_ADAGRAD_CUDA_H

#include "../list_cuda.h"
#include "../moments/low_cuda.h"
#include "adagrad_body.h"

struct zpp_adagrad_cuda_batch {
    struct zpp_list_cuda_segments list;
    struct zpp_adagrad_consts consts[ZPP_LIST_CUDA_SEGMENTS];
};

struct zpp_adagrad_low_cuda_batch {
    struct zpp_low_cuda_segments list;
    struct zpp_adagrad_consts consts[ZPP_LOW_CUDA_SEGMENTS];
};

#endif
