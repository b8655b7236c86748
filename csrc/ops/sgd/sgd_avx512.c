/* SPDX-License-Identifier: Apache-2.0
 *
 * SGD with AVX-512: sgd_vec16.h has the text.
 */
#include "kernels.h"

#include "sgd_vec16.h"

void zpp_sgd_avx512(const struct zpp_sgd_segment *segment, const struct zpp_sgd_consts *consts,
                    size_t begin, size_t end) {
    step_walk(segment, consts, begin, end);
}
