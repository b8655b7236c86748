/* SPDX-License-Identifier: Apache-2.0
 *
 * A step of any optimizer on moments that are not fp32: a tile of them is decoded beside the stack, stepped by the
 * kernel that fp32 moments have, and encoded again. Up to three tiles of 8 KiB stay in the first-level cache, so memory
 * sees the few bits only, and the arithmetic is that of fp32.
 */
#ifndef ZPP_OPS_MOMENTS_TILE_H
#define ZPP_OPS_MOMENTS_TILE_H

#include "../../base/dtype.h"
#include "moments.h"

/* One segment's moments: `count` of them, the first of which is `first`; the others follow in that order. */
struct zpp_moments_held {
    const struct zpp_moments_kernels *kernels;
    const struct zpp_moments *how; /* not fp32 */
    const struct zpp_moment *moments;
    size_t count;
    enum zpp_moments_which first;
    bool reads; /* what the step leaves is forgotten: they stay as they were */
};

/* The step on elements [begin, end) of the segment: values[k][0 ..) are its k-th moment there, read and written. */
typedef void (*zpp_moments_step_fn)(size_t begin, size_t end, float *const values[3], const void *arg);

/* Over elements [begin, end), which are where zpp_moments_cut may cut. */
void zpp_moments_each_tile(const struct zpp_moments_held *held, size_t begin, size_t end, zpp_moments_step_fn step,
                           const void *arg);

/* Makes a copy of any optimizer's segment its elements [begin, end), whose moments the caller places. */
#define ZPP_MOMENTS_CROP(segment, begin, end)                                                                 \
    do {                                                                                                      \
        (segment)->param += (begin);                                                                          \
        (segment)->grad = (const char *)(segment)->grad + (begin) * zpp_dtype_bytes((segment)->grad_dtype);   \
        if ((segment)->param_out) {                                                                           \
            (segment)->param_out = (char *)(segment)->param_out + (begin) * zpp_dtype_bytes((segment)->out_dtype); \
        }                                                                                                     \
        (segment)->elems = (end) - (begin);                                                                   \
        (segment)->how.kind = ZPP_MOMENTS_F32;                                                                \
    } while (0)

#endif
