/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/adam: what a CPU version of the kernel looks like, and the table of them (variants.def).
 */
#ifndef ZPP_OPS_ADAM_KERNELS_H
#define ZPP_OPS_ADAM_KERNELS_H

#include "../../base/cpu.h"
#include "adam.h"
#include "adam_body.h"

/* Elements [begin, end) of one segment; thread-free, no alignment asked for. A caller may cut a segment anywhere. */
typedef void (*zpp_adam_kernel)(const struct zpp_adam_segment *segment, const struct zpp_adam_consts *consts,
                                size_t begin, size_t end);

#define ZPP_ADAM_VARIANT(level, function)                                                                     \
    void function(const struct zpp_adam_segment *segment, const struct zpp_adam_consts *consts, size_t begin, \
                  size_t end);
#include "variants.def"
#undef ZPP_ADAM_VARIANT

/* The version of a level; NULL where this build has none. */
zpp_adam_kernel zpp_adam_kernel_of(enum zpp_cpu_level level);

struct zpp_adam_consts zpp_adam_consts_of(const struct zpp_adam_segment *segment, float grad_scale);

#endif
