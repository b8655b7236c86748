/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/lamb: what a CPU version offers, and the table of them (variants.def).
 */
#ifndef ZPP_OPS_LAMB_KERNELS_H
#define ZPP_OPS_LAMB_KERNELS_H

#include "lamb.h"
#include "lamb_body.h"

enum { ZPP_LAMB_LANES = 16 };

struct zpp_lamb_sums {
    float params[ZPP_LAMB_LANES], updates[ZPP_LAMB_LANES]; /* sums of squares */
};

struct zpp_lamb_kernels {
    /* First pass over elements [begin, end), begin a multiple of the lanes: moments, and squares added to `sums`. */
    void (*moments)(const struct zpp_lamb_segment *segment, const struct zpp_lamb_consts *consts, size_t begin,
                    size_t end, struct zpp_lamb_sums *sums);
    /* Second pass; a caller may cut anywhere. */
    void (*move)(const struct zpp_lamb_segment *segment, const struct zpp_lamb_consts *consts, size_t begin,
                 size_t end);
};

#define ZPP_LAMB_VARIANT(level, name) extern const struct zpp_lamb_kernels name;
#include "variants.def"
#undef ZPP_LAMB_VARIANT

#endif
