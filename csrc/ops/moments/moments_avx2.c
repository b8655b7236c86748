/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments in fewer bits with AVX2: moments_vec16.h has the text.
 */
#include "kernels.h"

#include "moments_vec16.h"

const struct zpp_moments_kernels zpp_moments_avx2 = { decode_bf16, encode_bf16, decode_int8, encode_int8 };
