/* SPDX-License-Identifier: Apache-2.0
 *
 * One bit an element with error feedback: the compression of 1-bit Adam (Tang et al. 2021, section 4) and 1-bit LAMB,
 * worker and server side. Elements are cut in chunks of `chunk_elems` from the first on (the last may be shorter),
 * each with an fp32 scale:
 *
 *   c      = x + error                           what should be sent: the new values and what was lost before
 *   scale  = mean |c| over the chunk             of all scales the one with the least squared error
 *   bit    = 1 if c >= 0, else 0;                value = bit ? scale : -scale
 *   error  = c - value                           kept for the next time: nothing is lost, only late
 *
 *   server: x = (value of rank 0 + value of rank 1 + ...) * factor, then the same with the server's own error
 *
 * Every operation on elements rounds once to fp32. The order of the sum behind the mean belongs to the data: a chunk is
 * cut in blocks of ZPP_ONEBIT_BLOCK_ELEMS, in which lane l of 16 adds the elements i = l (mod 16) in fp32, the lanes
 * are added as a tree, and blocks one after the other in double. So CPU levels and threads do not show in the bits.
 *
 * Not finite: a chunk whose sum of |c| is not finite in fp32 gets scale NaN and bits 0, and its error stays as it was.
 * It decodes to NaN everywhere: an overflow is seen by every rank, and skipping that step leaves the feedback sound.
 *
 * Bits: element i is bit i % 8 of byte i / 8 (numpy.packbits(bitorder="little")); bits beyond the last are 0.
 *
 * Bytes touched per element: compress fp32 12 + 1/8 (x, error read and written), decode into fp32 4 + 1/8, accumulate 8
 * + 1/8. A chunk is read twice: those that fit the nearer caches (4096 elements) cost one pass over memory.
 */
#ifndef ZPP_OPS_ONEBIT_H
#define ZPP_OPS_ONEBIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"

enum { ZPP_ONEBIT_BLOCK_ELEMS = 4096 };

static inline size_t zpp_onebit_chunks(size_t chunk_elems, size_t elems) {
    return elems / chunk_elems + (elems % chunk_elems != 0);
}
static inline size_t zpp_onebit_bytes(size_t elems) { return elems / 8 + (elems % 8 != 0); }

struct zpp_onebit_source {
    const uint8_t *bits; /* [zpp_onebit_bytes(elems)] */
    const float *scales; /* [zpp_onebit_chunks(chunk_elems, elems)] */
};

/* All functions: chunk_elems is a multiple of 16, at least 16; arrays do not overlap and need element alignment only;
 * floats are F32, BF16 or F16; work is split over `pool` (NULL: this thread only) in whole chunks, so a
 * chunk is one thread's work; never fails. */

/* Worker side. error is read and written. */
void zpp_onebit_compress(size_t chunk_elems, const void *src, zpp_dtype src_dtype, float *error, size_t elems,
                         uint8_t *bits, float *scales, zpp_pool *pool);

/* Server side: the sources' sum times factor, compressed with the server's error. sources_count >= 1. */
void zpp_onebit_reduce(size_t chunk_elems, const struct zpp_onebit_source *sources, size_t sources_count, float factor,
                       float *error, size_t elems, uint8_t *bits, float *scales, zpp_pool *pool);

/* dst = value, or with `accumulate` dst = dst + value, in fp32 with one rounding to dst's dtype. */
void zpp_onebit_decode(size_t chunk_elems, const struct zpp_onebit_source *from, void *dst, zpp_dtype dst_dtype,
                       size_t elems, bool accumulate, zpp_pool *pool);

/* The same on CUDA, where all pointers but `sources` itself are device memory: enqueued on `native` (torch's current
 * stream). Same bits. `work`: device memory of zpp_onebit_cuda_work_elems fp32 numbers. NOT_BUILT without the kernels,
 * DEVICE if a launch fails, INVALID for more than 128 sources. */
size_t zpp_onebit_cuda_work_elems(size_t chunk_elems, size_t elems);
zpp_status zpp_onebit_compress_cuda(zpp_device *device, void *native, size_t chunk_elems, const void *src,
                                    zpp_dtype src_dtype, float *error, size_t elems, uint8_t *bits, float *scales,
                                    float *work, struct zpp_err *err);
zpp_status zpp_onebit_reduce_cuda(zpp_device *device, void *native, size_t chunk_elems,
                                  const struct zpp_onebit_source *sources, size_t sources_count, float factor,
                                  float *error, size_t elems, uint8_t *bits, float *scales, float *work,
                                  struct zpp_err *err);
zpp_status zpp_onebit_decode_cuda(zpp_device *device, void *native, size_t chunk_elems,
                                  const struct zpp_onebit_source *from, void *dst, zpp_dtype dst_dtype, size_t elems,
                                  bool accumulate, struct zpp_err *err);

/* The version of one level for calls in this thread, for tests and benchmarks: false, and nothing changed, where this
 * machine or build lacks it. ZPP_CPU_LEVELS returns to the machine's own. */
bool zpp_onebit_use_level(enum zpp_cpu_level level);

#endif
