/* SPDX-License-Identifier: Apache-2.0
 *
 * One-bit compression on CUDA: the argument of its kernels, shared by onebit_cuda.cu and the launcher onebit_cuda.c.
 */
#ifndef ZPP_OPS_ONEBIT_CUDA_H
#define ZPP_OPS_ONEBIT_CUDA_H

#include <stdint.h>

enum {
    ZPP_ONEBIT_CUDA_THREADS = 256,
    ZPP_ONEBIT_CUDA_LANES = 16,         /* as kernels.h and onebit.h have it; onebit_cuda.c compares */
    ZPP_ONEBIT_CUDA_BLOCK_ELEMS = 4096,
    ZPP_ONEBIT_CUDA_SOURCES = 128,      /* what fits the 4096 bytes that kernel arguments may have */
    ZPP_ONEBIT_CUDA_DECODE_ELEMS = 2048, /* of a block of threads */
};

struct zpp_onebit_cuda_source {
    const uint8_t *bits;
    const float *scales;
};

struct zpp_onebit_cuda_args {
    void *floats; /* compress: read, NULL: the sources' sum; decode: written */
    float *error;
    uint8_t *bits;   /* written by compress */
    float *scales;
    float *lanes;    /* [chunks * chunk_blocks * 16]: what each lane of a block of 4096 elements adds up */
    uint64_t elems, chunk_elems, chunks, chunk_blocks; /* chunk_blocks: blocks of a whole chunk */
    float factor;
    uint32_t sources_count;
    uint8_t dtype, accumulate; /* dtype of floats: element_cuda.h */
    struct zpp_onebit_cuda_source sources[ZPP_ONEBIT_CUDA_SOURCES]; /* decode: the first */
};

#endif
