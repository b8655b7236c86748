/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms with AVX2: onebit_lamb_vec16.h has the text.
 */
#include "kernels.h"

#include "onebit_lamb_vec16.h"

void zpp_onebit_lamb_avx2(const struct zpp_onebit_lamb_segment *segment, const struct zpp_onebit_lamb_consts *consts,
                          size_t begin, size_t end, struct zpp_onebit_lamb_lanes *lanes) {
    fresh(segment, consts, begin, end, lanes);
}
