/* SPDX-License-Identifier: Apache-2.0
 *
 * fp32 lanes in which the optimizers are written: `lanes` is one float where ZPP_LANES is 1 (scalar C, and CUDA), and
 * sixteen in the vector builds. Every operation rounds once, so a text gives the same bits on all of them.
 */
#ifndef ZPP_OPS_OPTIM_LANES_H
#define ZPP_OPS_OPTIM_LANES_H

#include "../round.h"
#ifdef __CUDACC__
#define ZPP_LANES 1
#define LANES_FN static __device__ __forceinline__
#else
#include "../isa.h"
#ifndef LANES_FN /* a test that emulates an instruction set compiles in reasonable time only without inlining */
#define LANES_FN static inline __attribute__((always_inline, unused))
#endif
#endif

#if ZPP_LANES == 1
typedef float lanes;
LANES_FN lanes lanes_set(float value) { return value; }
LANES_FN lanes lanes_add(lanes a, lanes b) { return ZPP_ADD(a, b); }
LANES_FN lanes lanes_sub(lanes a, lanes b) { return ZPP_SUB(a, b); }
LANES_FN lanes lanes_mul(lanes a, lanes b) { return ZPP_MUL(a, b); }
LANES_FN lanes lanes_div(lanes a, lanes b) { return ZPP_DIV(a, b); }
LANES_FN lanes lanes_sqrt(lanes a) { return ZPP_SQRT(a); }
/* `a` with the sign of b where b is a number other than zero; b itself elsewhere. a >= 0. */
LANES_FN lanes lanes_step(lanes a, lanes b) { return b > 0.0f ? a : b < 0.0f ? -a : b; }
/* The greater; a NaN on either side stays. */
LANES_FN lanes lanes_maximum(lanes a, lanes b) { return a > b || a != a ? a : b; }
/* `a`, and 0 where x is 0 (a NaN is not). */
LANES_FN lanes lanes_zero_at_zero(lanes a, lanes x) { return x == 0.0f ? 0.0f : a; }
LANES_FN lanes lanes_abs(lanes a) { return ZPP_FLOAT(ZPP_BITS(a) & 0x7fffffffu); }
/* The greater of two magnitudes, by bits: a NaN beats all. */
LANES_FN lanes lanes_max_bits(lanes a, lanes b) { return ZPP_BITS(a) > ZPP_BITS(b) ? a : b; }
#else
#include "../vec16.h"
typedef v16 lanes;
LANES_FN lanes lanes_set(float value) { return v16_set1(value); }
LANES_FN lanes lanes_add(lanes a, lanes b) { return v16_add(a, b); }
LANES_FN lanes lanes_sub(lanes a, lanes b) { return v16_sub(a, b); }
LANES_FN lanes lanes_mul(lanes a, lanes b) { return v16_mul(a, b); }
LANES_FN lanes lanes_div(lanes a, lanes b) { return v16_div(a, b); }
LANES_FN lanes lanes_sqrt(lanes a) { return v16_sqrt(a); }
LANES_FN lanes lanes_step(lanes a, lanes b) { return v16_step(a, b); }
LANES_FN lanes lanes_maximum(lanes a, lanes b) { return v16_maximum(a, b); }
LANES_FN lanes lanes_zero_at_zero(lanes a, lanes x) { return v16_zero_at_zero(a, x); }
LANES_FN lanes lanes_abs(lanes a) { return v16_abs(a); }
LANES_FN lanes lanes_max_bits(lanes a, lanes b) { return v16_max_bits(a, b); }
#endif

#endif
