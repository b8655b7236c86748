/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of tokens: first in plain C, which is their meaning on CPU, then past the cache.
 */
#include "kernels.h"

#if ZPP_LANES == 1

#include <string.h>

static void copy(void *to, const void *from, size_t bytes, bool stream) {
    (void)stream;
    memcpy(to, from, bytes);
}

static void zero(void *to, size_t bytes, bool stream) {
    (void)stream;
    memset(to, 0, bytes);
}

#else

#include "../copy_vec16.h"

static void copy(void *to, const void *from, size_t bytes, bool stream) { v16_copy(to, from, bytes, stream); }

static void zero(void *to, size_t bytes, bool stream) { v16_zero(to, bytes, stream); }

#endif

const struct zpp_tokens_kernels ZPP_ISA_NAME(zpp_tokens) = { copy, zero };
