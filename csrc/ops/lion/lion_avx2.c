/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion with AVX2: lion_vec16.h has the text.
 */
#include "kernels.h"

#include "lion_vec16.h"

void zpp_lion_avx2(const struct zpp_lion_segment *segment, const struct zpp_lion_consts *consts,
                   size_t begin, size_t end) {
    step_walk(segment, consts, begin, end);
}
