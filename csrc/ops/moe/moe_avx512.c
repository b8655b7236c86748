/* SPDX-License-Identifier: Apache-2.0
 *
 * The MoE kernels with AVX-512: moe_vec16.h has the text.
 */
#include "kernels.h"

#include "moe_vec16.h"

static void copy(void *to, const void *from, size_t bytes, bool stream) { v16_copy(to, from, bytes, stream); }

const struct zpp_moe_kernels zpp_moe_avx512 = { scores_of, choose, add, combine, scale, dot, copy };
