/* SPDX-License-Identifier: Apache-2.0
 *
 * Plan and moves of rows on CUDA: the argument of their kernels, shared by rows_cuda.cu and the launcher rows_cuda.c.
 */
#ifndef ZPP_OPS_MOE_ROWS_CUDA_H
#define ZPP_OPS_MOE_ROWS_CUDA_H

#include <stdint.h>

enum { ZPP_ROWS_CUDA_THREADS = 128, ZPP_ROWS_CUDA_LANES = 16 }; /* lanes as kernels.h has it; rows_cuda.c compares */

struct zpp_rows_cuda_args {
    const int32_t *chosen;
    int32_t *slots; /* written by the plan, read by moves; so is the next */
    int64_t *kept;
    uint32_t *order; /* of tokens, for the plan; NULL: as they are */
    const void *tokens_in, *buffer_in;
    void *out;
    const float *weights; /* NULL: all 1 */
    float *grad_weights;
    uint64_t tokens, k, experts, capacity, buffer_rows, width_elems, row_words, seed;
    uint32_t word_bytes; /* copy_words_cuda.h */
    uint8_t dtype;       /* element_cuda.h */
};

#endif
