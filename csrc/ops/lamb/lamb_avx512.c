/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB with AVX-512: lamb_vec16.h has the text.
 */
#include "kernels.h"

#include "lamb_vec16.h"

const struct zpp_lamb_kernels zpp_lamb_avx512 = { moments, move };
