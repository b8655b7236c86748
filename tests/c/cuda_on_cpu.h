/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA kernels on a CPU: their files are C as well, once their keywords are defined away; blocks and threads are loops
 * of the test, or, for kernels with barriers, threads (cuda_threads.h). Include this, then the .cu file.
 */
#ifndef ZPP_TESTS_CUDA_ON_CPU_H
#define ZPP_TESTS_CUDA_ON_CPU_H

#include <stdint.h>
#include <string.h>

#include "../../csrc/base/dtype.h"

static _Thread_local struct { unsigned int x; } blockIdx, threadIdx;

#define ZPP_ON_CPU 1
#define KERNEL static __attribute__((unused)) void
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#pragma GCC diagnostic ignored "-Wunknown-pragmas"

static inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
#define __ushort_as_half(bits) (bits)
#define __half_as_ushort(bits) (bits)
#define __half2float zpp_f16_to_f32
#define __float2half_rn zpp_f16_from_f32

#define __dadd_rn(a, b) ((a) + (b))
#define __dmul_rn(a, b) ((a) * (b))
static inline __attribute__((unused)) void atomicAdd(unsigned long long *at, unsigned long long more) {
    __atomic_fetch_add(at, more, __ATOMIC_RELAXED);
}

#endif
