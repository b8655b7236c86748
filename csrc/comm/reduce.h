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

/* One sum of fp32, bf16 or fp16 arrays. */
struct zpp_sum {
    void *dst;
    const void *const *src;
    int sources;
    float scale;
    bool accumulate; /* add to what dst has */
    bool wide;       /* dst is fp32 although the elements are 16-bit */
    bool stream;     /* dst is large and not read again soon: write around the cache (fp32 alone) */
    bool report;     /* return what the sum saw; takes time where the data is in the cache */
    bool replaces;   /* dst is one of the sources: report on its old elements, too */
};

/* The sum kernels of one instruction set. With `report` each returns what it saw, without a second pass over memory;
 * else zeros. */
struct zpp_sum_kernels {
    struct zpp_sum_seen (*f32)(const struct zpp_sum *sum, size_t elems);
    struct zpp_sum_seen (*bf16)(const struct zpp_sum *sum, size_t elems);
    struct zpp_sum_seen (*f16)(const struct zpp_sum *sum, size_t elems);
    void (*copy)(void *dst, const void *src, size_t bytes); /* around the cache */
};

/* Kernels keep the largest bits of an fp32 value without its sign. Bits from ZPP_SUM_INFINITE on mean an infinite
 * value or NaN. */
enum { ZPP_SUM_MAGNITUDE = 0x7fffffff, ZPP_SUM_INFINITE = 0x7f800000 };
static inline struct zpp_sum_seen zpp_sum_seen(uint32_t largest_result, uint32_t largest_replaced) {
    return (struct zpp_sum_seen){ .nonfinite = largest_result >= ZPP_SUM_INFINITE,
                                  .replaced_nonfinite = largest_replaced >= ZPP_SUM_INFINITE };
}
extern const struct zpp_sum_kernels zpp_sum_scalar;
extern const struct zpp_sum_kernels zpp_sum_avx2, zpp_sum_avx512, zpp_sum_neon; /* where cpu.h has the level */
const struct zpp_sum_kernels *zpp_sum_kernels(void); /* the best of this CPU */

/* Return INVALID, with a message, for bit operations on floating point and for avg of integers. */
zpp_status zpp_reduce_check(zpp_reduce_op op, zpp_dtype dtype, struct zpp_err *err);
/* Reduce as above, with any operation; AVG multiplies by 1 / sources, rounded to fp32 (fp64 for doubles). `stream`:
 * see above. */
void zpp_reduce_op_sources(void *dst, zpp_reduce_op op, const void *const *src, int sources, zpp_dtype dtype,
                           size_t elems, bool stream);
const char *zpp_reduce_op_name(zpp_reduce_op op);

/* memcpy; `stream` as above, from some tens of KB on. */
void zpp_copy(void *dst, const void *src, size_t bytes, bool stream);

#endif
