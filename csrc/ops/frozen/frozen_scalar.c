/* SPDX-License-Identifier: Apache-2.0
 *
 * The step with a frozen variance in plain C: the meaning of the op on CPU. frozen_body.h has the arithmetic.
 */
#include "kernels.h"

#include "elements.h"

void zpp_frozen_scalar(const struct zpp_frozen_segment *segment, const struct zpp_frozen_consts *consts, size_t begin,
                       size_t end) {
    zpp_frozen_elements(segment, consts, begin, end);
}
