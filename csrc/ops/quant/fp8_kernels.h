/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/quant: what a CPU version of 8-bit floats offers.
 * Pieces are one block or a part of one, from its first element on; all are thread-free.
 */
#ifndef ZPP_OPS_QUANT_FP8_KERNELS_H
#define ZPP_OPS_QUANT_FP8_KERNELS_H

#include "../isa.h"
#include "fp8.h"

struct zpp_fp8_kernels {
    /* One block: its codes; returns its scale. */
    float (*encode)(enum zpp_fp8_format format, const void *src, zpp_dtype dtype, size_t elems, uint8_t *codes);
    /* dst = or += value. */
    void (*decode)(enum zpp_fp8_format format, float scale, const uint8_t *codes, size_t elems, void *dst,
                   zpp_dtype dtype, bool accumulate);
};

ZPP_ISA_DECLARE(struct zpp_fp8_kernels, zpp_fp8);

/* The version for this CPU; the one of a level, NULL where there is none. */
const struct zpp_fp8_kernels *zpp_fp8_kernels(void);
const struct zpp_fp8_kernels *zpp_fp8_kernels_at(enum zpp_cpu_level level);

#endif
