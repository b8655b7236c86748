/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on moments in bf16 or 8 bits on CUDA: the argument of the kernel, shared by adam_low_cuda.cu and the launcher
 * adam_low_cuda.c.
 */
#ifndef ZPP_OPS_ADAM_LOW_CUDA_H
#define ZPP_OPS_ADAM_LOW_CUDA_H

#include <stdint.h>

#include "../moments/moments_body.h"
#include "adam_body.h"

/* As many segments as fit the 4096 bytes of a kernel's arguments. A thread has one element of a block of moments; a
 * turn takes four blocks, so that its two barriers come once in 1024 elements. */
enum {
    ZPP_ADAM_LOW_CUDA_SEGMENTS = 25,
    ZPP_ADAM_LOW_CUDA_THREADS = 256, /* a block of moments */
    ZPP_ADAM_LOW_CUDA_ROWS = 4,
    ZPP_ADAM_LOW_CUDA_GROUP = 32,    /* magnitudes that one thread joins */
    ZPP_ADAM_LOW_CUDA_CHUNK_ELEMS = 16 * 1024,
};

struct zpp_adam_low_cuda_segment {
    float *param; /* device memory */
    const void *grad;
    void *param_out;
    void *codes[3]; /* by enum zpp_moments_which; the third NULL without amsgrad */
    float *scales[3];
    uint64_t elems, key;
    uint32_t index;       /* the first element's place in its tensor: its low 32 bits */
    uint32_t first_block; /* the block of the grid that has this segment's first chunk */
    uint8_t grad_kind, out_kind; /* element_cuda.h */
    uint8_t moments, int8;       /* how many; 8 bits, or bf16 */
    struct zpp_adam_consts consts;
};

struct zpp_adam_low_cuda_batch {
    uint32_t segments_count, padding;
    struct zpp_adam_low_cuda_segment segments[ZPP_ADAM_LOW_CUDA_SEGMENTS];
};

#ifndef __CUDACC__
#include "adam.h"

/* Packs the next segments for one launch: how many it took, and the blocks of the grid (0: all were empty). */
size_t zpp_adam_low_cuda_fill(const struct zpp_adam_segment *segments, size_t segments_count, float grad_scale,
                              struct zpp_adam_low_cuda_batch *batch, unsigned int *blocks);

/* zpp_adam_step_cuda for segments whose moments are not fp32. */
zpp_status zpp_adam_low_step_cuda(zpp_device *device, void *native, const struct zpp_adam_segment *segments,
                                  size_t segments_count, float grad_scale, struct zpp_err *err);
#endif

#endif
