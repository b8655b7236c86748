/* SPDX-License-Identifier: Apache-2.0
 *
 * The reduction of comm.h as an operation of a stream, on any device:
 *
 *   dst[i] = (((src[0][i] + src[1][i]) + src[2][i]) ...) * scale     in fp32, rounded once; accumulate: dst[i] += that
 *
 * Float64 is added in float64. The bits are the same on the CPU and on CUDA; a NaN may have other ones. On CUDA it is
 * one kernel (reduce_cuda.cu), which reads each source once, peers' memory too.
 */
#ifndef ZPP_COMM_STREAM_SUM_H
#define ZPP_COMM_STREAM_SUM_H

#include <stdbool.h>

#include "../base/device.h"
#include "../base/dtype.h"

enum { ZPP_STREAM_SUM_SOURCES = 64 };

struct zpp_sum_op {
    void *dst;
    const void *const *src; /* `sources` arrays in rank order; the list is borrowed until the operation has run */
    size_t elems;           /* dst may be one of the sources, where it has their dtype; otherwise no overlap */
    const uint64_t *halt;   /* NULL, or a word that is not 0 once the group has failed: then dst is not written */
    uint32_t *nonfinite;    /* NULL, or a word that becomes 1 if a result is infinite or NaN before it is rounded */
    double scale;           /* rounded to fp32, but for F64 */
    int sources;
    /* F32, BF16, F16 or F64. dst_dtype: F32 or `dtype`; of one source in F32 that is not added to dst, any of F32, BF16
     * and F16; of F64, F64. */
    zpp_dtype dtype, dst_dtype;
    bool accumulate;
};

/* Launch the sum. Memory, `halt` and `nonfinite` are the device's, or pinned on it. INVALID for dtypes and numbers of
 * sources that are not supported, before anything is launched; NOT_BUILT on CUDA in a build without kernels. */
zpp_status zpp_stream_sum(zpp_stream *stream, const struct zpp_sum_op *sum, struct zpp_err *err);

#endif
