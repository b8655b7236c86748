/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies of an exchange of heads for tokens on CUDA: the arguments of their kernels, shared by heads_cuda.cu and the
 * launcher heads_cuda.c.
 */
#ifndef ZPP_COMM_HEADS_CUDA_H
#define ZPP_COMM_HEADS_CUDA_H

#include <stdint.h>

enum {
    ZPP_HEADS_CUDA_THREADS = 256,
    ZPP_HEADS_CUDA_BOXES = 36,   /* of a launch: its arguments have 4096 bytes */
    ZPP_HEADS_CUDA_SOURCES = 96, /* ranks that may have one head of keys */
    ZPP_HEADS_CUDA_F64 = 255,    /* beside the kinds of element_cuda.h */
};

/* Strides are in bytes. */
struct zpp_heads_cuda_place {
    char *data;
    uint64_t batch, token, head;
};

struct zpp_heads_cuda_box {
    struct zpp_heads_cuda_place dst, src;
    uint64_t items;  /* batch * tokens * heads * words */
    uint64_t tokens;
    uint32_t heads, words; /* words of a head */
    uint32_t first_block, word_bytes;
};

struct zpp_heads_cuda_copies {
    struct zpp_heads_cuda_box box[ZPP_HEADS_CUDA_BOXES];
    uint32_t boxes;
};

/* dst = the sum of the sources, in their order: `items` elements. */
struct zpp_heads_cuda_sum {
    struct zpp_heads_cuda_place dst;
    uint64_t items, tokens;
    uint32_t heads, elems, sources; /* elems of a head */
    uint32_t kind;
    struct zpp_heads_cuda_place src[ZPP_HEADS_CUDA_SOURCES];
};

#if !defined(__CUDACC__) && !defined(ZPP_ON_CPU)
#include "../base/device.h"
#include "heads_pieces.h"

/* For zpp_heads_plan.copy, whose ctx is the struct; copies are enqueued when the list is full, and by flush. */
struct zpp_heads_on_cuda {
    zpp_device *device;
    void *native;
    struct zpp_heads_cuda_copies copies;
    uint64_t blocks;
};
zpp_status zpp_heads_cuda_copy(void *ctx, const struct zpp_heads_copy *copy, struct zpp_err *err);
zpp_status zpp_heads_cuda_flush(struct zpp_heads_on_cuda *on, struct zpp_err *err);
#endif

#endif
