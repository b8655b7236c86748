/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam in plain C: the meaning of the op on CPU. adam_body.h has the arithmetic, element_io.h the kinds of elements.
 */
#include "kernels.h"

#include "element_io.h"

void zpp_adam_scalar(const struct zpp_optim_segment *segment, const struct zpp_adam_consts *consts, size_t begin,
                     size_t end) {
    zpp_adam_elements(segment, consts, begin, end);
}
