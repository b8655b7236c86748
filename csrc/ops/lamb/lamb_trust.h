/* SPDX-License-Identifier: Apache-2.0
 *
 * The trust ratio r of a tensor from its sums of squares (lamb.h), in double, for CPU and CUDA.
 */
#ifndef ZPP_OPS_LAMB_TRUST_H
#define ZPP_OPS_LAMB_TRUST_H

#include <math.h>

#include "../round.h"

ZPP_FN double zpp_lamb_trust(double params, double updates, double least, double most) {
    const double norm = sqrt(params), update = sqrt(updates);
    if (!(norm > 0.0 && update > 0.0 && norm < INFINITY && update < INFINITY)) return 1.0;
    return fmin(fmax(norm / update, least), most);
}

#endif
