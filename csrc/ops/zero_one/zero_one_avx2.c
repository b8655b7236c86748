/* SPDX-License-Identifier: Apache-2.0
 *
 * 0/1 Adam's step with AVX2: zero_one_vec16.h has the text.
 */
#include "kernels.h"

#include "zero_one_vec16.h"

void zpp_zero_one_avx2(const struct zpp_zero_one_segment *segment, const struct zpp_zero_one_consts *consts,
                       size_t begin, size_t end) {
    step_walk(segment, consts, begin, end);
}
