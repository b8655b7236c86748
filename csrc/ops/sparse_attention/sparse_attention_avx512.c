/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of block-sparse attention with AVX-512: sparse_attention_vec16.h has the text.
 */
#include "kernels.h"

#include "sparse_attention_vec16.h"

const struct zpp_sparse_kernels zpp_sparse_avx512 = { matmul, softmax, scale_rows, weigh, dot };
