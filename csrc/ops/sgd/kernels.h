/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/sgd: what a CPU version of the kernel looks like, and the table of them (variants.def).
 */
#ifndef ZPP_OPS_SGD_KERNELS_H
#define ZPP_OPS_SGD_KERNELS_H

#include "sgd.h"
#include "sgd_body.h"

/* Elements [begin, end) of one segment; thread-free, no alignment asked for. A caller may cut a segment anywhere. */
typedef void (*zpp_sgd_kernel)(const struct zpp_sgd_segment *segment, const struct zpp_sgd_consts *consts,
                               size_t begin, size_t end);

#define ZPP_SGD_VARIANT(level, function)                                                                      \
    void function(const struct zpp_sgd_segment *segment, const struct zpp_sgd_consts *consts, size_t begin, \
                  size_t end);
#include "variants.def"
#undef ZPP_SGD_VARIANT

#endif
