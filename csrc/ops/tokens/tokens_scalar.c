/* SPDX-License-Identifier: Apache-2.0
 *
 * The token moves in plain C: their meaning on CPU.
 */
#include "kernels.h"

#include <string.h>

static void copy(void *to, const void *from, size_t bytes, bool stream) {
    (void)stream;
    memcpy(to, from, bytes);
}

static void zero(void *to, size_t bytes, bool stream) {
    (void)stream;
    memset(to, 0, bytes);
}

const struct zpp_tokens_kernels zpp_tokens_scalar = { copy, zero };
