/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/onebit_lamb: what a build of onebit_lamb_isa.c offers.
 */
#ifndef ZPP_OPS_ONEBIT_LAMB_KERNELS_H
#define ZPP_OPS_ONEBIT_LAMB_KERNELS_H

#include "../isa.h"
#include "onebit_lamb.h"
#include "onebit_lamb_body.h"

enum { ZPP_ONEBIT_LAMB_LANES = 16 };

struct zpp_onebit_lamb_lanes {
    float alone[ZPP_ONEBIT_LAMB_LANES], both[ZPP_ONEBIT_LAMB_LANES], largest[ZPP_ONEBIT_LAMB_LANES];
};

struct zpp_onebit_lamb_kernels {
    /* Elements [begin, end) of one segment, begin a multiple of the lanes: v', and what is added to `sums`.
     * Thread-free, no alignment asked for. */
    void (*fresh)(const struct zpp_onebit_lamb_segment *segment, const struct zpp_onebit_lamb_consts *consts,
                  size_t begin, size_t end, struct zpp_onebit_lamb_lanes *sums);
};
ZPP_ISA_DECLARE(struct zpp_onebit_lamb_kernels, zpp_onebit_lamb);

struct zpp_onebit_lamb_consts zpp_onebit_lamb_consts_of(const struct zpp_onebit_lamb_segment *segment);

/* CUDA's launches, for onebit_lamb_cuda.c and the test that runs its kernels on a CPU: as many segments as fit one;
 * returns how many it took. Then where its work and its results lie. */
struct zpp_onebit_lamb_cuda_batch;
size_t zpp_onebit_lamb_cuda_fill(const struct zpp_onebit_lamb_segment *segments, size_t segments_count,
                                 struct zpp_onebit_lamb_cuda_batch *batch);
void zpp_onebit_lamb_cuda_place(struct zpp_onebit_lamb_cuda_batch *batch, void *work, double *sums, float *largest);

#endif
