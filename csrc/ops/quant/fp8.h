/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation to 8-bit floats (Micikevicius et al. 2022, "FP8 formats for deep learning", section 3; as torch's
 * float8_e4m3fn and float8_e5m2): where int8 (quant.h) has the same error for all elements of a block, fp8 has one
 * that is relative to each. Elements are cut in blocks of `block_elems` from the first on (the last may be shorter);
 * each has an fp32 scale.
 *
 *   e4m3   4 bits of exponent, 3 of mantissa, greatest F = 448,    no infinity, NaN is 0x7f and 0xff
 *   e5m2   5 and 2,                           greatest F = 57344,  infinities and NaN as IEEE has them
 *
 *   scale = max |x| / F, at least 2^-126, so that its reciprocal is finite and zeros come back as zeros
 *   code  = x * (1 / scale), held within F, to the nearest of the format, ties to even, subnormals kept
 *   value = code * scale
 *
 * Error, per finite element (u = 2^-24; derivation: tests/ops/test_fp8.py):
 *   e4m3   |x - value| <= max(|x| 2^-4,  scale 2^-10) + 4 u |x|
 *   e5m2   |x - value| <= max(|x| 2^-3,  scale 2^-17) + 4 u |x|
 * and 2^-149, and half an ulp of the output dtype where that is 16-bit.
 *
 * Not finite: a block with an infinity or a NaN gets scale NaN and codes 0: it dequantises to NaN everywhere, as
 * quant.h's do. Every operation rounds once to fp32, in the order of fp8_body.h, so all CPU levels, cuts and thread
 * counts give the same bits.
 *
 * Bytes touched per element: quantise fp32 5 (+ 4 a block); dequantise 5; accumulate into fp32 9.
 */
#ifndef ZPP_OPS_QUANT_FP8_H
#define ZPP_OPS_QUANT_FP8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"
#include "fp8_body.h" /* enum zpp_fp8_format */

struct zpp_fp8_spec {
    size_t block_elems; /* a multiple of 16, at least 16; a block is one thread's work */
    enum zpp_fp8_format format;
};

static inline size_t zpp_fp8_blocks(const struct zpp_fp8_spec *spec, size_t elems) {
    return elems / spec->block_elems + (elems % spec->block_elems != 0);
}

/* Both: arrays do not overlap and need element alignment only; floats are F32, BF16 or F16; codes
 * [elems], scales [zpp_fp8_blocks]; work is split over `pool` (NULL: this thread only) in whole blocks; never fails. */
void zpp_fp8_quantise(const struct zpp_fp8_spec *spec, const void *src, zpp_dtype src_dtype, size_t elems,
                      uint8_t *codes, float *scales, zpp_pool *pool);

/* dst = value, or with `accumulate` dst = dst + value, in fp32 with one rounding to dst's dtype. */
void zpp_fp8_dequantise(const struct zpp_fp8_spec *spec, const uint8_t *codes, const float *scales, void *dst,
                        zpp_dtype dst_dtype, size_t elems, bool accumulate, zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream). Same bits.
 * NOT_BUILT without the kernels, DEVICE if a launch fails. */
zpp_status zpp_fp8_quantise_cuda(zpp_device *device, void *native, const struct zpp_fp8_spec *spec, const void *src,
                                 zpp_dtype src_dtype, size_t elems, uint8_t *codes, float *scales,
                                 struct zpp_err *err);
zpp_status zpp_fp8_dequantise_cuda(zpp_device *device, void *native, const struct zpp_fp8_spec *spec,
                                   const uint8_t *codes, const float *scales, void *dst, zpp_dtype dst_dtype,
                                   size_t elems, bool accumulate, struct zpp_err *err);

#endif
