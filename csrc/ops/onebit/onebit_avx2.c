/* SPDX-License-Identifier: Apache-2.0
 *
 * One-bit compression with AVX2: onebit_vec16.h has the text.
 */
#include "kernels.h"

#include "onebit_vec16.h"

const struct zpp_onebit_kernels zpp_onebit_avx2 = { sum, emit, decode };
