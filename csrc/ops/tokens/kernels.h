/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/tokens: what a CPU version offers. Thread-free, any
 * alignment, no overlap. `stream`: past the cache, for results that leave it before anybody reads them; the caller ends
 * with zpp_streamed().
 */
#ifndef ZPP_OPS_TOKENS_KERNELS_H
#define ZPP_OPS_TOKENS_KERNELS_H

#include <stdbool.h>
#include "../isa.h"
#include "tokens.h"

struct zpp_tokens_kernels {
    void (*copy)(void *to, const void *from, size_t bytes, bool stream);
    void (*zero)(void *to, size_t bytes, bool stream);
};

ZPP_ISA_DECLARE(struct zpp_tokens_kernels, zpp_tokens);

/* The version for this CPU; the one of a level, NULL where there is none. */
const struct zpp_tokens_kernels *zpp_tokens_kernels(void);
const struct zpp_tokens_kernels *zpp_tokens_kernels_at(enum zpp_cpu_level level);

#endif
