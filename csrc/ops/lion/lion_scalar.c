/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion in plain C: the meaning of the op on CPU. lion_body.h has the arithmetic.
 */
#include "kernels.h"

#include "elements.h"

void zpp_lion_scalar(const struct zpp_lion_segment *segment, const struct zpp_lion_consts *consts,
                     size_t begin, size_t end) {
    zpp_lion_elements(segment, consts, begin, end);
}
