/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizers with at most one state over lists of tensors on CUDA: what their kernels are given, and how lists become
 * launches. lists.h is the CPU's counterpart.
 *
 * A launch takes as many segments, each with its constants, as fit the 4096 bytes that kernel arguments may have on
 * every GPU and driver, so nothing is copied to the device beforehand. A block works on one chunk of one segment.
 */
#ifndef ZPP_OPS_LIST_CUDA_H
#define ZPP_OPS_LIST_CUDA_H

#include <stddef.h>
#include <stdint.h>

enum {
    ZPP_LIST_CUDA_SEGMENTS = 48,
    ZPP_LIST_CUDA_THREADS = 256,
    ZPP_LIST_CUDA_UNROLL = 4, /* elements in flight a thread: 12 loads cover memory's latency */
    ZPP_LIST_CUDA_CHUNK_ELEMS = 32 * 1024,
    ZPP_LIST_CUDA_CONSTS_BYTES = 32, /* room for one segment's constants */
    ZPP_LIST_CUDA_BATCH_BYTES = 4096,
};

struct zpp_list_cuda_segment {
    float *param, *state; /* device memory; state NULL: none */
    const void *grad;
    void *param_out;
    uint64_t elems;
    uint32_t first_block; /* the block of the grid that has this segment's first chunk */
    uint8_t grad_kind, out_kind; /* element_cuda.h */
};

/* The kernel's argument begins with this; an array of one op's constants follows, one a segment. */
struct zpp_list_cuda_segments {
    uint32_t count, padding;
    struct zpp_list_cuda_segment at[ZPP_LIST_CUDA_SEGMENTS];
};

#ifndef __CUDACC__
#include "../base/device.h"

/* Where segments come from: describe fills all of *segment but first_block, and consts_bytes of constants. */
struct zpp_list_cuda_source {
    const char *kernel;
    size_t count, consts_bytes;
    void (*describe)(const void *arg, size_t index, struct zpp_list_cuda_segment *segment, void *consts);
    const void *arg;
};

/* Packs segments from `begin` on into `batch` (ZPP_LIST_CUDA_BATCH_BYTES, aligned to 8), empty ones left out; returns
 * how many it took. *blocks: of the grid, 0 for nothing to do. */
size_t zpp_list_cuda_fill(const struct zpp_list_cuda_source *source, size_t begin, void *batch, unsigned int *blocks);

/* All of them, launched on torch's or our stream `native`. NOT_BUILT without the kernel. */
zpp_status zpp_list_cuda_run(zpp_device *device, void *native, const struct zpp_list_cuda_source *source,
                             struct zpp_err *err);
#endif

#endif
