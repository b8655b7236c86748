/* SPDX-License-Identifier: Apache-2.0
 *
 * The step with a frozen variance with AVX2: frozen_vec16.h has the text.
 */
#include "kernels.h"

#include "frozen_vec16.h"

void zpp_frozen_avx2(const struct zpp_frozen_segment *segment, const struct zpp_frozen_consts *consts, size_t begin,
                     size_t end) {
    step_walk(segment, consts, begin, end);
}
