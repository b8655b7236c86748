/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/norm: what a CPU version looks like, the table of them, and the order in which lanes are added.
 */
#ifndef ZPP_OPS_NORM_KERNELS_H
#define ZPP_OPS_NORM_KERNELS_H

#include "norm.h"

/* Sum of squares of one block: `elems` <= ZPP_NORM_BLOCK_ELEMS elements from `data` on. */
typedef double (*zpp_norm_kernel)(const void *data, zpp_dtype dtype, size_t elems);

#define ZPP_NORM_VARIANT(level, function) double function(const void *data, zpp_dtype dtype, size_t elems);
#include "variants.def"
#undef ZPP_NORM_VARIANT

/* F64 has one version for every CPU: the compiler's own, of a plain loop (norm_scalar.c). */
double zpp_norm_f64(const void *data, size_t elems);

static inline float zpp_norm_at(const void *data, zpp_dtype dtype, size_t i) {
    switch (dtype) {
    case ZPP_BF16: return zpp_bf16_to_f32(((const uint16_t *)data)[i]);
    case ZPP_F16: return zpp_f16_to_f32(((const uint16_t *)data)[i]);
    default: return ((const float *)data)[i];
    }
}

static inline double zpp_norm_add_lanes(double lanes[ZPP_NORM_LANES]) {
    for (size_t width = ZPP_NORM_LANES / 2; width > 0; width /= 2) {
        for (size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    }
    return lanes[0];
}

/* Adds elements [begin, elems), begin being a multiple of the lanes, then the lanes. */
static inline double zpp_norm_finish(double lanes[ZPP_NORM_LANES], const void *data, zpp_dtype dtype, size_t begin,
                                     size_t elems) {
    for (size_t i = begin; i < elems; ++i) {
        const double x = zpp_norm_at(data, dtype, i);
        lanes[i % ZPP_NORM_LANES] += x * x;
    }
    return zpp_norm_add_lanes(lanes);
}

struct zpp_norm_cuda_batch;
/* Packs as many segments as one launch takes; returns how many. For norm_cuda.c and its test. */
size_t zpp_norm_cuda_fill(const struct zpp_norm_segment *segments, size_t segments_count,
                          struct zpp_norm_cuda_batch *batch);

#endif
