/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum of several ranks' arrays on CUDA: the argument of its kernel, shared by reduce_cuda.cu and the launcher in
 * stream_sum.c.
 */
#ifndef ZPP_COMM_REDUCE_CUDA_H
#define ZPP_COMM_REDUCE_CUDA_H

#include <stdint.h>

enum {
    ZPP_SUM_CUDA_SOURCES = 64, /* ZPP_STREAM_SUM_SOURCES; stream_sum.c compares */
    ZPP_SUM_CUDA_THREADS = 256,
    ZPP_SUM_CUDA_WIDTH = 8,    /* elements that a thread adds at once: one or two loads of 16 bytes */
    ZPP_SUM_CUDA_BLOCKS = 2048, /* fill any GPU; each takes more than one piece of large arrays */
};

struct zpp_sum_cuda_args {
    void *dst;
    const uint64_t *halt;
    uint32_t *nonfinite;
    uint64_t elems;
    double scale_f64;
    float scale;
    uint32_t sources, blocks;
    uint8_t kind, dst_kind; /* element_cuda.h */
    uint8_t accumulate;
    uint8_t aligned; /* all arrays begin at a multiple of 16 bytes */
    const void *src[ZPP_SUM_CUDA_SOURCES];
};

#if !defined(__CUDACC__) && !defined(ZPP_ON_CPU)
#include "stream_sum.h"

/* Fill `args` for a launch of args->blocks blocks; for the launcher and the tests. */
void zpp_sum_cuda_fill(const struct zpp_sum_op *sum, struct zpp_sum_cuda_args *args);
#endif

#endif
