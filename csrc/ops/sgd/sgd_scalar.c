/* SPDX-License-Identifier: Apache-2.0
 *
 * SGD in plain C: the meaning of the op on CPU. sgd_body.h has the arithmetic.
 */
#include "kernels.h"

#include "elements.h"

void zpp_sgd_scalar(const struct zpp_sgd_segment *segment, const struct zpp_sgd_consts *consts,
                    size_t begin, size_t end) {
    zpp_sgd_elements(segment, consts, begin, end);
}
