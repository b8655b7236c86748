/* SPDX-License-Identifier: Apache-2.0
 *
 * 8-bit floats with AVX2: fp8_vec16.h has the text.
 */
#include "fp8_kernels.h"

#include "fp8_vec16.h"

const struct zpp_fp8_kernels zpp_fp8_avx2 = { encode, decode };
