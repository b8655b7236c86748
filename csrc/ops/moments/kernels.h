/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/moments: what a CPU version offers. All are thread-free.
 */
#ifndef ZPP_OPS_MOMENTS_KERNELS_H
#define ZPP_OPS_MOMENTS_KERNELS_H

#include "../isa.h"
#include "moments.h"
#include "moments_body.h"

/* Where the sixteen random bits of an element come from: `index` is the first element's place in its tensor. */
struct zpp_moments_dice {
    uint64_t key;
    uint32_t index;
    bool nearest; /* none */
};

struct zpp_moments_kernels {
    void (*decode_bf16)(const uint16_t *codes, float *values, size_t elems);
    void (*encode_bf16)(const float *values, uint16_t *codes, size_t elems, struct zpp_moments_dice dice);
    /* Elements of one block; k: 7 or 8. */
    void (*decode_int8)(const uint8_t *codes, float scale, uint32_t k, float *values, size_t elems);
    void (*encode_int8)(const float *values, uint8_t *codes, float *scale, uint32_t k, size_t elems,
                        struct zpp_moments_dice dice);
};

ZPP_ISA_DECLARE(struct zpp_moments_kernels, zpp_moments);

#endif
