/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of one-bit compression on one element, for the scalar version, the tails of the vector versions and
 * the CUDA kernels. Every operation rounds once, in the order written here.
 */
#ifndef ZPP_OPS_ONEBIT_BODY_H
#define ZPP_OPS_ONEBIT_BODY_H

#include "../round.h"

ZPP_FN float zpp_onebit_owed(float x, float error) { return ZPP_ADD(x, error); }
ZPP_FN int zpp_onebit_bit(float owed) { return owed >= 0.0f; } /* NaN: 0; minus zero: 1 */
ZPP_FN float zpp_onebit_value(int bit, float scale) { return bit ? scale : -scale; }
ZPP_FN float zpp_onebit_lost(float owed, float value) { return ZPP_SUB(owed, value); }

#endif
