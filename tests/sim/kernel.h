/* SPDX-License-Identifier: Apache-2.0
 *
 * A file of kernels as C: sim_build.py writes a file that includes this, then the .cu file, then has a SIM_KERNEL for
 * each of its kernels. Each such file has its own blockIdx, threadIdx and shared memory.
 */
#ifndef ZPP_TESTS_SIM_KERNEL_H
#define ZPP_TESTS_SIM_KERNEL_H

#include "../c/cuda_on_cpu.h"
#include "sim.h"

#define __shared__ static
#define __syncthreads()                                                \
    do {                                                               \
        const unsigned int thread_ = threadIdx.x, block_ = blockIdx.x; \
        sim_barrier();                                                 \
        threadIdx.x = thread_;                                         \
        blockIdx.x = block_;                                           \
    } while (0)

#define SIM_KERNEL(kernel, type, has_barriers)                                                    \
    static void kernel##_thread(const void *arg, unsigned int block, unsigned int thread) {       \
        blockIdx.x = block;                                                                       \
        threadIdx.x = thread;                                                                     \
        kernel(*(const type *)arg);                                                               \
    }                                                                                             \
    static __attribute__((constructor)) void kernel##_register(void) {                            \
        static struct sim_kernel row = {#kernel, sizeof(type), kernel##_thread, has_barriers, 0}; \
        sim_kernel_register(&row);                                                                \
    }

#endif
