/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/frozen: what a CPU version of the kernel looks like, and the table of them (variants.def).
 */
#ifndef ZPP_OPS_FROZEN_KERNELS_H
#define ZPP_OPS_FROZEN_KERNELS_H

#include "frozen.h"
#include "frozen_body.h"

/* Elements [begin, end) of one segment; thread-free, no alignment asked for. A caller may cut a segment anywhere. */
typedef void (*zpp_frozen_kernel)(const struct zpp_frozen_segment *segment, const struct zpp_frozen_consts *consts,
                                  size_t begin, size_t end);

#define ZPP_FROZEN_VARIANT(level, function)                                                                      \
    void function(const struct zpp_frozen_segment *segment, const struct zpp_frozen_consts *consts, size_t begin, \
                  size_t end);
#include "variants.def"
#undef ZPP_FROZEN_VARIANT

struct zpp_frozen_consts zpp_frozen_consts_of(const struct zpp_frozen_segment *segment);

struct zpp_frozen_cuda_batch;
/* Packs as many segments as one launch takes; returns how many. For frozen_cuda.c and its test. */
size_t zpp_frozen_cuda_fill(const struct zpp_frozen_segment *segments, size_t segments_count,
                            struct zpp_frozen_cuda_batch *batch, unsigned int *blocks);

#endif
