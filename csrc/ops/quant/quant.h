/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation to 8 and 4 bits, for the quantised collectives of ZeRO++ (Wang et al. 2023: qwZ, section 3.2;
 * qgZ, section 3.3) and for ZeroQuant's weights. Elements are cut in blocks of `block_elems` from the first on (the
 * last may be shorter); each block has an fp32 scale, and with `asymmetric` an fp32 middle:
 *
 *   symmetric    scale = max |x| / L               L = 127 (8 bits), 7 (4 bits);      mid = 0
 *   asymmetric   scale = (max x - min x) / 2L      L = 127.5, 7.5;                    mid = (max x + min x) / 2
 *   code  = round to nearest even((x - mid) * (1 / scale)), clamped to the signed range of the bits
 *   value = code * scale + mid
 *
 * scale is at least 2^-126, so that its reciprocal is finite and zeros come back as zeros. Every operation rounds once
 * to fp32, in the order of quant_body.h, so all CPU levels, cuts and thread counts give the same bits.
 *
 * Error, per finite element (u = 2^-24; derivation: tests/ops/test_quant.py):
 *   symmetric    |x - value| <= scale * (1/2 + 4 L u)
 *   asymmetric   |x - value| <= scale * (1/2 + 8 L u) + 6 u max|x|       (the last term: x - mid and + mid round)
 * and half an ulp of the output dtype where that is 16-bit.
 *
 * Not finite: a block with an infinity, a NaN or a magnitude of 2^127 and more gets scale NaN, mid 0 and codes 0. It
 * dequantises to NaN everywhere, so an overflow is never hidden by a quantised collective.
 *
 * Codes: 8 bits, one int8 an element; 4 bits, two's complement nibbles, element 2j in the low and 2j + 1 in the high
 * half of byte j; a last odd element leaves the high half 0.
 *
 * Bytes touched per element: quantise fp32 to int8 5, to int4 4.5 (+ 4 or 8 a block); accumulate into fp32 9 and 8.5.
 */
#ifndef ZPP_OPS_QUANT_H
#define ZPP_OPS_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"

struct zpp_quant_spec {
    size_t block_elems; /* a multiple of 16, at least 16; a block is one thread's work */
    int bits;           /* 8 or 4 */
    bool asymmetric;
};

static inline size_t zpp_quant_blocks(const struct zpp_quant_spec *spec, size_t elems) {
    return elems / spec->block_elems + (elems % spec->block_elems != 0);
}
static inline size_t zpp_quant_code_bytes(const struct zpp_quant_spec *spec, size_t elems) {
    return spec->bits == 8 ? elems : elems / 2 + elems % 2;
}

/* A quantised array: codes [zpp_quant_code_bytes], scales and mids [zpp_quant_blocks]. mids is NULL if symmetric. */
struct zpp_quant_source {
    const void *codes;
    const float *scales, *mids;
};
struct zpp_quant_target {
    void *codes;
    float *scales, *mids;
};

/* All functions: arrays do not overlap unless said otherwise and need element alignment only; floats are F32, BF16 or
 * F16; work is split over `pool` (NULL: this thread only) in whole blocks; never fails. */

void zpp_quantise(const struct zpp_quant_spec *spec, const void *src, zpp_dtype src_dtype, size_t elems,
                  const struct zpp_quant_target *to, zpp_pool *pool);

/* dst = value, or with `accumulate` dst = dst + value, in fp32 with one rounding to dst's dtype. */
void zpp_dequantise(const struct zpp_quant_spec *spec, const struct zpp_quant_source *from, void *dst,
                    zpp_dtype dst_dtype, size_t elems, bool accumulate, zpp_pool *pool);

/* dst = (value of source 0 + value of source 1 + ...) * factor: the sum in fp32 in the order given, one rounding to
 * dst's dtype. sources_count >= 1. */
void zpp_quant_sum(const struct zpp_quant_spec *spec, const struct zpp_quant_source *sources, size_t sources_count,
                   float factor, void *dst, zpp_dtype dst_dtype, size_t elems, zpp_pool *pool);

/* The same sum quantised again with to_spec, without touching memory between: the middle step of qgZ. */
void zpp_quant_reduce(const struct zpp_quant_spec *spec, const struct zpp_quant_source *sources, size_t sources_count,
                      float factor, size_t elems, const struct zpp_quant_spec *to_spec,
                      const struct zpp_quant_target *to, zpp_pool *pool);

/* The version of one level for calls in this thread, for tests and benchmarks: false, and nothing changed, where this
 * machine or build lacks it. ZPP_CPU_LEVELS returns to the machine's own. */
bool zpp_quant_use_level(enum zpp_cpu_level level);

/* Quantise and dequantise on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream).
 * Same bits, but for the payload of a NaN. NOT_BUILT without the kernels, DEVICE if a launch fails. */
zpp_status zpp_quantise_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec, const void *src,
                             zpp_dtype src_dtype, size_t elems, const struct zpp_quant_target *to,
                             struct zpp_err *err);
zpp_status zpp_dequantise_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec,
                               const struct zpp_quant_source *from, void *dst, zpp_dtype dst_dtype, size_t elems,
                               bool accumulate, struct zpp_err *err);

/* zpp_quant_sum and zpp_quant_reduce there; `sources` themselves are in host memory. INVALID for more than 128. */
zpp_status zpp_quant_sum_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec,
                              const struct zpp_quant_source *sources, size_t sources_count, float factor, void *dst,
                              zpp_dtype dst_dtype, size_t elems, struct zpp_err *err);
/* What zpp_quant_add_cuda makes of a sum: dst = sum * factor, or with `accumulate` dst = dst + that, in fp32 with one
 * rounding. Nothing is written if the word at `halt` (NULL: none; device or pinned memory) is not 0. */
struct zpp_quant_add {
    void *dst;
    zpp_dtype dtype;
    size_t elems;
    float factor;
    bool accumulate;
    const uint64_t *halt;
};
zpp_status zpp_quant_add_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec,
                              const struct zpp_quant_source *sources, size_t sources_count,
                              const struct zpp_quant_add *add, struct zpp_err *err);
zpp_status zpp_quant_reduce_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec,
                                 const struct zpp_quant_source *sources, size_t sources_count, float factor,
                                 size_t elems, const struct zpp_quant_spec *to_spec,
                                 const struct zpp_quant_target *to, struct zpp_err *err);

#endif
