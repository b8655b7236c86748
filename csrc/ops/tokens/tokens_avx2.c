/* SPDX-License-Identifier: Apache-2.0
 *
 * The token moves with AVX2: copy_vec16.h has the text.
 */
#include "kernels.h"

#include "../copy_vec16.h"

static void copy(void *to, const void *from, size_t bytes, bool stream) { v16_copy(to, from, bytes, stream); }

static void zero(void *to, size_t bytes, bool stream) { v16_zero(to, bytes, stream); }

const struct zpp_tokens_kernels zpp_tokens_avx2 = { copy, zero };
