/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation with AVX-512: quant_vec16.h has the text.
 */
#include "kernels.h"

#include "quant_vec16.h"

const struct zpp_quant_kernels zpp_quant_avx512 = { blocks, span_of, encode, decode };
