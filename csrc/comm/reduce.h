/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of collectives: combine N arrays in the order of their ranks.
 *
 *   dst[i] = (((src[0][i] op src[1][i]) op src[2][i]) ...) * scale
 *
 * 16-bit elements are combined in fp32 and rounded once, at the end. Sums of floating point elements have a version per
 * instruction set; all give the same bits (no fused multiply-add, same order). dst may be one of the sources, else no
 * overlap.
 */
#ifndef ZPP_COMM_REDUCE_H
#define ZPP_COMM_REDUCE_H

#include <stdbool.h>
#include "comm.h"

/* The sum kernels of one instruction set. `wide`: dst is fp32 although the elements are 16-bit. `stream`: dst is large
 * and not read again soon, write around the cache (no load of the line that is overwritten). */
struct zpp_sum_kernels {
    void (*f32)(float *dst, bool accumulate, const void *const *src, int sources, size_t elems, float scale,
                bool stream);
    void (*bf16)(void *dst, bool wide, bool accumulate, const void *const *src, int sources, size_t elems, float scale);
    void (*f16)(void *dst, bool wide, bool accumulate, const void *const *src, int sources, size_t elems, float scale);
    void (*copy)(void *dst, const void *src, size_t bytes); /* around the cache */
};
extern const struct zpp_sum_kernels zpp_sum_scalar;
#if defined(__x86_64__)
extern const struct zpp_sum_kernels zpp_sum_avx2, zpp_sum_avx512;
#endif
const struct zpp_sum_kernels *zpp_sum_kernels(void); /* the best of this CPU */

/* INVALID, with a sentence, for what makes no sense: bit operations on floating point, avg of integers. */
zpp_status zpp_reduce_check(zpp_reduce_op op, zpp_dtype dtype, struct zpp_err *err);
/* The reduction above for any operation; AVG multiplies by 1 / sources, rounded to fp32 (fp64 for doubles). `stream`:
 * see above. */
void zpp_reduce_op_sources(void *dst, zpp_reduce_op op, const void *const *src, int sources, zpp_dtype dtype,
                           size_t elems, bool stream);
const char *zpp_reduce_op_name(zpp_reduce_op op);

/* memcpy; `stream` as above, from some tens of KB on. */
void zpp_copy(void *dst, const void *src, size_t bytes, bool stream);

#endif
