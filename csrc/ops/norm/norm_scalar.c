/* SPDX-License-Identifier: Apache-2.0
 *
 * Sum of squares in plain C: the order of additions that norm.h states, written out.
 */
#include "kernels.h"

double zpp_norm_scalar(const void *data, zpp_dtype dtype, size_t elems) {
    double lanes[ZPP_NORM_LANES] = { 0 };
    return zpp_norm_finish(lanes, data, dtype, 0, elems);
}

double zpp_norm_f64(const void *data, size_t elems) {
    const double *x = data;
    double lanes[ZPP_NORM_LANES] = { 0 };
    size_t i = 0;
    for (; i + ZPP_NORM_LANES <= elems; i += ZPP_NORM_LANES) {
        for (size_t l = 0; l < ZPP_NORM_LANES; ++l) lanes[l] += x[i + l] * x[i + l];
    }
    for (; i < elems; ++i) lanes[i % ZPP_NORM_LANES] += x[i] * x[i];
    return zpp_norm_add_lanes(lanes);
}
