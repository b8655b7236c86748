/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion on CUDA: the same arithmetic as on the CPU (lion_body.h, each operation rounded once), so the same bits; only
 * the payload of a NaN may differ. list_walk_cuda.h says how a launch is laid out.
 */
#include "lion_cuda.h"

#define WALK_CONSTS struct zpp_lion_consts
#define walk_element zpp_lion_element
#include "../list_walk_cuda.h"

KERNEL zpp_lion_cuda(const __grid_constant__ struct zpp_lion_cuda_batch batch) { walk(&batch.list, batch.consts); }

#define LOW_CONSTS struct zpp_lion_consts
#define low_one zpp_lion_element
#include "../moments/low_one_cuda.h"

KERNEL zpp_lion_low_cuda(const __grid_constant__ struct zpp_lion_low_cuda_batch batch) {
    __shared__ struct zpp_low_tops tops;
    low_walk(&batch.list, batch.consts, &tops);
}
