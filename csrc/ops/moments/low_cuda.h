/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizers on moments in bf16 or 8 bits on CUDA: what their kernels are given, and how lists become launches;
 * optim/optim_cuda.h has the same for fp32. A launch takes as many segments, each with its constants, as fit the 4096
 * bytes that kernel arguments may have. A block works on one chunk of one segment; low_walk_cuda.h is the walk.
 */
#ifndef ZPP_OPS_MOMENTS_LOW_CUDA_H
#define ZPP_OPS_MOMENTS_LOW_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "../grad_scale.h"

/* A thread has one element of a block of moments; a turn takes four blocks, so that its two barriers come once in 1024
 * elements. */
enum {
    ZPP_LOW_CUDA_SEGMENTS = 25,
    ZPP_LOW_CUDA_THREADS = 256, /* a block of moments */
    ZPP_LOW_CUDA_ROWS = 4,
    ZPP_LOW_CUDA_GROUP = 32,    /* magnitudes that one thread joins */
    ZPP_LOW_CUDA_CHUNK_ELEMS = 16 * 1024,
    ZPP_LOW_CUDA_CONSTS_BYTES = 48, /* capacity for the constants of a segment */
    ZPP_LOW_CUDA_BATCH_BYTES = 4096,
};

struct zpp_low_cuda_segment {
    union {
        float *param; /* device memory */
        uint64_t param_key; /* without an fp32 copy: of zpp_optim_segment */
    };
    const void *grad;
    void *param_out;
    void *codes[3]; /* `moments` of them */
    float *scales[3];
    uint64_t elems, key;
    uint32_t index;       /* the first element's place in its tensor: its low 32 bits */
    uint32_t first_block; /* the block of the grid that has this segment's first chunk */
    uint8_t grad_dtype, out_dtype; /* element_cuda.h */
    uint8_t moments, first;      /* how many, and which the first is (enum zpp_moments_which) */
    uint8_t int8;                /* 8 bits, or bf16 */
};

/* The kernel's argument begins with this; an array of one op's constants follows, one a segment. */
struct zpp_low_cuda_segments {
    uint32_t count, padding;
    struct zpp_grad_scale scale;
    struct zpp_low_cuda_segment at[ZPP_LOW_CUDA_SEGMENTS];
};

#ifndef __CUDACC__
#include "../../base/device.h"
#include "moments.h"

/* Where segments come from: describe fills all of *segment but first_block, and consts_bytes of constants. */
struct zpp_low_cuda_source {
    const char *kernel;
    size_t count, consts_bytes;
    void (*describe)(const void *arg, size_t index, struct zpp_low_cuda_segment *segment, void *consts);
    const void *arg;
    struct zpp_grad_scale scale;
};

/* For describe: everything of *segment that is about its moments, `count` of them from `first` on. */
void zpp_low_cuda_hold(struct zpp_low_cuda_segment *segment, const struct zpp_moments *how,
                       const struct zpp_moment *moments, size_t count, enum zpp_moments_which first);

/* Packs segments from `begin` on into `batch` (ZPP_LOW_CUDA_BATCH_BYTES, aligned to 8), empty ones left out; returns
 * how many it took. *blocks: of the grid, 0 for nothing to do. */
size_t zpp_low_cuda_fill(const struct zpp_low_cuda_source *source, size_t begin, void *batch, unsigned int *blocks);

/* All of them, launched on torch's or our stream `native`. NOT_BUILT without the kernel. */
zpp_status zpp_low_cuda_run(zpp_device *device, void *native, const struct zpp_low_cuda_source *source,
                            struct zpp_err *err);
#endif

#endif
