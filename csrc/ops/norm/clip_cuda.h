/* SPDX-License-Identifier: Apache-2.0
 *
 * The record of clip.h on CUDA: the arguments of its kernels, shared by clip_cuda.cu and the launcher clip.c.
 */
#ifndef ZPP_OPS_NORM_CLIP_CUDA_H
#define ZPP_OPS_NORM_CLIP_CUDA_H

#include "clip_body.h"

enum {
    ZPP_CLIP_CUDA_THREADS = 256,
    ZPP_CLIP_CUDA_RANKS = 256,
    ZPP_NORM_GROUPS_CUDA = 900, /* a launch: what fits the 4096 bytes that kernel arguments may have */
};

struct zpp_clip_cuda_args {
    struct zpp_clip_record *record;
    const uint64_t *halt;
    struct zpp_clip_rule rule;
    uint64_t ranks, units;
    const double *sums[ZPP_CLIP_CUDA_RANKS];
};

struct zpp_norm_groups_cuda_args {
    const double *of_segments;
    double *sums;
    uint32_t count;
    uint32_t firsts[ZPP_NORM_GROUPS_CUDA + 1];
};

#endif
