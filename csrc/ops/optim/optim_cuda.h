/* SPDX-License-Identifier: Apache-2.0
 *
 * The element-wise optimizers on CUDA: the arguments of the kernels, shared by optim_cuda.cu and the launcher
 * optim_cuda.c. States in fewer bits are moments/low_cuda.h's.
 *
 * A launch takes as many segments, each with its constants, as fit the 4096 bytes that kernel arguments may have on
 * every GPU and driver, so nothing is copied to the device beforehand. A block works on one chunk of one segment.
 */
#ifndef ZPP_OPS_OPTIM_CUDA_H
#define ZPP_OPS_OPTIM_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "../grad_scale.h"
#include "../moments/low_cuda.h"
#include "adagrad.h"
#include "adam.h"
#include "frozen.h"
#include "lion.h"
#include "sgd.h"
#include "zero_one.h"

enum {
    ZPP_OPTIM_CUDA_THREADS = 256,
    ZPP_OPTIM_CUDA_UNROLL = 4, /* elements in flight a thread: 12 loads or more cover memory's latency */
    ZPP_OPTIM_CUDA_CHUNK_ELEMS = 32 * 1024,
    ZPP_OPTIM_CUDA_BATCH_BYTES = 4096,
};

struct zpp_optim_cuda_segment {
    union {
        float *param; /* device memory */
        uint64_t param_key; /* without an fp32 copy: of zpp_optim_segment */
    };
    const void *grad;
    void *param_out;
    uint64_t elems;
    uint32_t first_block; /* the block of the grid that has this segment's first chunk */
    uint8_t grad_dtype, out_dtype; /* element_cuda.h */
};

/* What every batch begins with. */
struct zpp_optim_cuda_head {
    uint32_t count, padding;
    struct zpp_grad_scale scale;
};

/* Segments of a launch: what fits, with the pointers to their states (NULL: not there) and their constants. */
#define ZPP_OPTIM_CUDA_SEGMENTS(states, consts_bytes)                                                                 \
    ((ZPP_OPTIM_CUDA_BATCH_BYTES - sizeof(struct zpp_optim_cuda_head)) /                                              \
     (sizeof(struct zpp_optim_cuda_segment) + 8 * (states) + (consts_bytes)))

#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) \
    enum {                                                                                                            \
        ZPP_OPTIM_CUDA_##NAME##_STATES = states,                                                                      \
        ZPP_OPTIM_CUDA_##NAME##_SEGMENTS = ZPP_OPTIM_CUDA_SEGMENTS(states, sizeof(struct zpp_##name##_consts)),       \
    };                                                                                                                \
    struct zpp_##name##_cuda_batch {                                                                                  \
        struct zpp_optim_cuda_head head;                                                                              \
        struct zpp_optim_cuda_segment at[ZPP_OPTIM_CUDA_##NAME##_SEGMENTS];                                           \
        float *states_of[ZPP_OPTIM_CUDA_##NAME##_SEGMENTS][states];                                                   \
        struct zpp_##name##_consts consts[ZPP_OPTIM_CUDA_##NAME##_SEGMENTS];                                          \
    };                                                                                                                \
    struct zpp_##name##_low_cuda_batch {                                                                              \
        struct zpp_low_cuda_segments list;                                                                            \
        struct zpp_##name##_consts consts[ZPP_LOW_CUDA_SEGMENTS];                                                     \
    };
#include "optimizers.def"
#undef ZPP_OPTIMIZER

#ifndef __CUDACC__
#include "optim.h"

/* Packs the next segments, all of one optimizer, for one launch: how many it took, and the blocks of the grid (0: all
 * were empty). `batch` is the zpp_NAME_cuda_batch of that optimizer, or with states in fewer bits its low one. */
size_t zpp_optim_cuda_fill(const struct zpp_optim_segment *segments, size_t segments_count,
                           struct zpp_grad_scale scale, void *batch, unsigned int *blocks);
#endif

#endif
