/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of one-bit compression on one element, for the scalar version, the tails of the vector versions and
 * the CUDA kernels. Every operation rounds once, in the order written here.
 */
#ifndef ZPP_OPS_ONEBIT_BODY_H
#define ZPP_OPS_ONEBIT_BODY_H

#ifdef __CUDACC__
#define ZPP_ONEBIT_FN static __device__ __forceinline__
#define ONEBIT_ADD(a, b) __fadd_rn(a, b)
#define ONEBIT_SUB(a, b) __fsub_rn(a, b)
#else
#define ZPP_ONEBIT_FN static inline
#define ONEBIT_ADD(a, b) ((a) + (b))
#define ONEBIT_SUB(a, b) ((a) - (b))
#endif

ZPP_ONEBIT_FN float zpp_onebit_owed(float x, float error) { return ONEBIT_ADD(x, error); }
ZPP_ONEBIT_FN int zpp_onebit_bit(float owed) { return owed >= 0.0f; } /* NaN: 0; minus zero: 1 */
ZPP_ONEBIT_FN float zpp_onebit_value(int bit, float scale) { return bit ? scale : -scale; }
ZPP_ONEBIT_FN float zpp_onebit_lost(float owed, float value) { return ONEBIT_SUB(owed, value); }

#endif
