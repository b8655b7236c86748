/* SPDX-License-Identifier: Apache-2.0
 *
 * Whose gradient was not finite before it was added to those of the other ranks. The sum says only that somebody's was,
 * and the rank that finds it out is the one that owns the shard.
 *
 * On one host the sum of a shard reports whether it met an infinite value or NaN (zpp_reduce_sources); only then does
 * the shard's owner look at what the sum was made of. Over several hosts the owner never sees that, so each rank looks
 * at its own gradient before it goes out.
 */
#ifndef ZPP_ZERO_ORIGIN_H
#define ZPP_ZERO_ORIGIN_H

#include "reduce.h"

/* A set of ranks: one bit each; the last one stands for rank 63 and all above. */
enum { ZPP_ORIGIN_BITS = 64 };
static inline uint64_t zpp_origin_bit(int rank) {
    return (uint64_t)1 << (rank < ZPP_ORIGIN_BITS ? rank : ZPP_ORIGIN_BITS - 1);
}

/* Is any element infinite or NaN? Elements that are not floating point are finite. */
bool zpp_origin_nonfinite(const void *data, zpp_dtype dtype, size_t elems);

/* Of elements [begin, begin + elems) of the unit, which `data` has: those of parameters alone, since between them lies
 * anything. */
bool zpp_origin_nonfinite_params(const struct zpp_unit *unit, const void *data, zpp_dtype dtype, size_t begin,
                                 size_t elems);

/* What add_shards of reduce.c adds: `count` sources of ranks `from`, to `to`, which may be one of the sources. */
struct zpp_sources {
    const void *const *data;
    const int *from;
    int count;
    double factor;
    bool accumulate;
};
/* As zpp_reduce_sources, or zpp_wire_add where gradients travel as quantised copies. Returns the ranks whose elements
 * were not finite, of those elements whose sum is not. */
uint64_t zpp_origin_add(zpp_zero *zero, const struct zpp_unit *unit, const struct zpp_sources *sources, void *to);
/* Keep what was found, for zpp_zero_origins; before `has` is set. */
void zpp_origin_note(const zpp_zero *zero, struct zpp_unit_grad *grad, uint64_t origins);

#endif
