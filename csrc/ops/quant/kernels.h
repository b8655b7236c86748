/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/quant: what a CPU version offers. Pieces begin at pointers
 * given by the caller, so a version knows nothing of where a piece lies; all are thread-free.
 */
#ifndef ZPP_OPS_QUANT_KERNELS_H
#define ZPP_OPS_QUANT_KERNELS_H

#include "../isa.h"
#include "quant.h"
#include "quant_body.h"

enum zpp_quant_how {
    ZPP_QUANT_STORE,
    ZPP_QUANT_ADD,
    ZPP_QUANT_STREAM, /* store past the cache: dst is aligned to 64 (F32) or 32 bytes, the caller fences */
};

struct zpp_quant_kernels {
    /* Quantise whole blocks from a block's first element on. */
    void (*blocks)(const struct zpp_quant_spec *spec, const void *src, zpp_dtype dtype, size_t elems, uint8_t *codes,
                   float *scales, float *mids);
    /* The two halves of it, for blocks that do not lie in memory as a whole; a piece begins at a multiple of 16. */
    void (*span)(const void *src, zpp_dtype dtype, size_t elems, struct zpp_quant_span *span);
    void (*encode)(int bits, const struct zpp_quant_consts *consts, const void *src, zpp_dtype dtype, size_t elems,
                   uint8_t *codes);
    /* Elements of one block, from a multiple of 16 on. */
    void (*decode)(int bits, float scale, float mid, const uint8_t *codes, size_t elems, void *dst, zpp_dtype dtype,
                   enum zpp_quant_how how);
};

ZPP_ISA_DECLARE(struct zpp_quant_kernels, zpp_quant);

#endif
