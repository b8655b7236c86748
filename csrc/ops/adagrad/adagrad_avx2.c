/* SPDX-License-Identifier: Apache-2.0
 *
 * Adagrad with AVX2: adagrad_vec16.h has the text.
 */
#include "kernels.h"

#include "adagrad_vec16.h"

void zpp_adagrad_avx2(const struct zpp_adagrad_segment *segment, const struct zpp_adagrad_consts *consts,
                      size_t begin, size_t end) {
    step_walk(segment, consts, begin, end);
}
