/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms in plain C: the meaning of the op on CPU. onebit_lamb_body.h has the
 * arithmetic.
 */
#include "kernels.h"

#include "elements.h"

void zpp_onebit_lamb_scalar(const struct zpp_onebit_lamb_segment *segment, const struct zpp_onebit_lamb_consts *consts,
                            size_t begin, size_t end, struct zpp_onebit_lamb_lanes *lanes) {
    zpp_onebit_lamb_elements(segment, consts, begin, end, lanes);
}
