/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB in plain C: the meaning of the op on CPU. lamb_body.h has the arithmetic.
 */
#include "kernels.h"

#include "elements.h"

const struct zpp_lamb_kernels zpp_lamb_scalar = { zpp_lamb_moments_elements, zpp_lamb_move_elements };
