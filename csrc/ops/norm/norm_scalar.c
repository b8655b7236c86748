/* SPDX-License-Identifier: Apache-2.0
 *
 * Sum of squares in plain C: the order of additions that norm.h states, written out.
 */
#include "kernels.h"

double zpp_norm_scalar(const void *data, zpp_dtype dtype, size_t elems) {
    double lanes[ZPP_NORM_LANES] = { 0 };
    return zpp_norm_finish(lanes, data, dtype, 0, elems);
}
