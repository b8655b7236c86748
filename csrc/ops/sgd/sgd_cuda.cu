/* SPDX-License-Identifier: Apache-2.0
 *
 * SGD on CUDA: the same arithmetic as on the CPU (sgd_body.h, each operation rounded once), so the same bits; only
 * the payload of a NaN may differ. list_walk_cuda.h says how a launch is laid out.
 */
#include "sgd_cuda.h"

#define WALK_CONSTS struct zpp_sgd_consts
#define walk_element zpp_sgd_element
#include "../list_walk_cuda.h"

KERNEL zpp_sgd_cuda(const __grid_constant__ struct zpp_sgd_cuda_batch batch) { walk(&batch.list, batch.consts); }

#define LOW_CONSTS struct zpp_sgd_consts
#define low_one zpp_sgd_element
#include "../moments/low_one_cuda.h"

KERNEL zpp_sgd_low_cuda(const __grid_constant__ struct zpp_sgd_low_cuda_batch batch) {
    __shared__ struct zpp_low_tops tops;
    low_walk(&batch.list, batch.consts, &tops);
}
