/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/norm: what a build of norm_isa.c offers, and the order in which lanes are added.
 */
#ifndef ZPP_OPS_NORM_KERNELS_H
#define ZPP_OPS_NORM_KERNELS_H

#include "../isa.h"
#include "norm.h"

struct zpp_norm_kernels {
    /* Sum of squares of one block: `elems` <= ZPP_NORM_BLOCK_ELEMS elements of F32, BF16 or F16 from `data` on. */
    double (*block)(const void *data, zpp_dtype dtype, size_t elems);
};
ZPP_ISA_DECLARE(struct zpp_norm_kernels, zpp_norm);

static inline double zpp_norm_add_lanes(double lanes[ZPP_NORM_LANES]) {
    for (size_t width = ZPP_NORM_LANES / 2; width > 0; width /= 2) {
        for (size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    }
    return lanes[0];
}

struct zpp_norm_cuda_batch;
/* Packs as many segments as one launch takes; returns how many. For norm_cuda.c and its test. */
size_t zpp_norm_cuda_fill(const struct zpp_norm_segment *segments, size_t segments_count,
                          struct zpp_norm_cuda_batch *batch);

#endif
