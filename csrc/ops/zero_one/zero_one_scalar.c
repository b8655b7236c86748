/* SPDX-License-Identifier: Apache-2.0
 *
 * 0/1 Adam's step in plain C: the meaning of the op on CPU. zero_one_body.h has the arithmetic.
 */
#include "kernels.h"

#include "elements.h"

void zpp_zero_one_scalar(const struct zpp_zero_one_segment *segment, const struct zpp_zero_one_consts *consts,
                         size_t begin, size_t end) {
    zpp_zero_one_elements(segment, consts, begin, end);
}
