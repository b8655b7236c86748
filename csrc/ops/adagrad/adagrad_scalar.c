/* SPDX-License-Identifier: Apache-2.0
 *
 * Adagrad in plain C: the meaning of the op on CPU. adagrad_body.h has the arithmetic.
 */
#include "kernels.h"

#include "elements.h"

void zpp_adagrad_scalar(const struct zpp_adagrad_segment *segment, const struct zpp_adagrad_consts *consts,
                        size_t begin, size_t end) {
    zpp_adagrad_elements(segment, consts, begin, end);
}
