/* SPDX-License-Identifier: Apache-2.0
 *
 * On CUDA: which segment of a launch a block works for. C as well: tests/c/cuda_on_cpu.h.
 */
#ifndef ZPP_OPS_SEGMENT_CUDA_H
#define ZPP_OPS_SEGMENT_CUDA_H

#include <stdint.h>

/* The last of `count` segments whose first block is `block` or before it: one without elements, which begins where the
 * next does, is never found. `first_block`: of segment 0; those of the others are `stride_bytes` apart each. */
static __device__ __forceinline__ unsigned int zpp_segment_of(const uint32_t *first_block, uint64_t stride_bytes,
                                                              unsigned int count, unsigned int block) {
    unsigned int low = 0, high = count - 1;
    while (low < high) {
        const unsigned int middle = (low + high + 1) / 2;
        if (first_block[middle * (stride_bytes / sizeof *first_block)] <= block) low = middle;
        else high = middle - 1;
    }
    return low;
}

#define ZPP_SEGMENT_OF(segments, count, block) \
    zpp_segment_of(&(segments)[0].first_block, sizeof (segments)[0], count, block)

#endif
