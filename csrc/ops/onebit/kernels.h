/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/onebit: what a CPU version offers. Pieces begin at pointers
 * given by the caller, at a multiple of 16 elements of a chunk; all are thread-free.
 */
#ifndef ZPP_OPS_ONEBIT_KERNELS_H
#define ZPP_OPS_ONEBIT_KERNELS_H

#include "../isa.h"
#include "../element.h"
#include "onebit.h"
#include "onebit_body.h"

enum { ZPP_ONEBIT_LANES = 16 };

enum zpp_onebit_how {
    ZPP_ONEBIT_STORE,
    ZPP_ONEBIT_ADD,
    ZPP_ONEBIT_STREAM, /* store past the cache: dst is aligned to 64 (F32) or 32 bytes, the caller fences */
};

struct zpp_onebit_kernels {
    /* Sum of |src + error| over one block: elems <= ZPP_ONEBIT_BLOCK_ELEMS. */
    float (*sum)(const void *src, zpp_dtype dtype, const float *error, size_t elems);
    /* Bits and new errors of elements of one chunk with a finite scale. */
    void (*emit)(const void *src, zpp_dtype dtype, float *error, size_t elems, float scale, uint8_t *bits);
    /* Values of elements of one chunk. */
    void (*decode)(const uint8_t *bits, float scale, size_t elems, void *dst, zpp_dtype dtype, enum zpp_onebit_how how);
};

ZPP_ISA_DECLARE(struct zpp_onebit_kernels, zpp_onebit);

/* --- element by element: the scalar version, and the tails of the vector versions; begin is a multiple of 16 ------ */
static inline float zpp_onebit_sum_tail(float lanes[ZPP_ONEBIT_LANES], const void *src, zpp_dtype dtype,
                                        const float *error, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const float owed = zpp_onebit_owed(zpp_element_load(src, dtype, i), error[i]);
        lanes[i % ZPP_ONEBIT_LANES] += owed < 0.0f ? -owed : owed;
    }
    for (size_t width = ZPP_ONEBIT_LANES / 2; width > 0; width /= 2) {
        for (size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    }
    return lanes[0];
}

static inline void zpp_onebit_emit_tail(const void *src, zpp_dtype dtype, float *error, size_t begin, size_t end,
                                        float scale, uint8_t *bits) {
    for (size_t i = begin; i < end; ++i) {
        const float owed = zpp_onebit_owed(zpp_element_load(src, dtype, i), error[i]);
        const int bit = zpp_onebit_bit(owed);
        if (i % 8 == 0) bits[i / 8] = 0;
        bits[i / 8] = (uint8_t)(bits[i / 8] | bit << i % 8);
        error[i] = zpp_onebit_lost(owed, zpp_onebit_value(bit, scale));
    }
}

static inline void zpp_onebit_decode_tail(const uint8_t *bits, float scale, size_t begin, size_t end, void *dst,
                                          zpp_dtype dtype, bool add) {
    for (size_t i = begin; i < end; ++i) {
        const float value = zpp_onebit_value(bits[i / 8] >> i % 8 & 1, scale);
        zpp_element_store(dst, dtype, i, add ? zpp_element_load(dst, dtype, i) + value : value);
    }
}

#endif
