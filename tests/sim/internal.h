/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the simulated driver share. Each function of the driver is declared by its row in cuda_api.def,
 * under its own name and with the symbol that the library exports, such as cuMemAlloc_v2 for cuMemAlloc.
 */
#ifndef ZPP_TESTS_SIM_INTERNAL_H
#define ZPP_TESTS_SIM_INTERNAL_H

#include "sim.h"

#include "../../csrc/base/cuda_api.h"

#define CU(name, symbol, arguments) CUresult name arguments __asm__(symbol);
#include "../../csrc/base/cuda_api.def"
#undef CU

/* Further numbers of cuda.h. */
enum {
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_ADDRESS = 700,
    NOT_REGISTERED = 713,
};

/* CUdevice is not the ordinal, so that a caller that mixes them up fails. */
enum { FIRST_DEVICE = 40 };

/* --- driver.c ----------------------------------------------------------------------------------------------------- */
int sim_devices(void);
/* The device of the calling thread's current context; INVALID_CONTEXT where there is none. */
CUresult sim_current_device(int *device);
uint64_t sim_setting(const char *variable, uint64_t otherwise); /* an environment variable */
/* A mistake of the test or of the product that a GPU would not report in time: print it and abort. */
__attribute__((noreturn, format(printf, 1, 2))) void sim_fatal(const char *format, ...);

/* --- streams.c ---------------------------------------------------------------------------------------------------- */
uint64_t sim_now_ns(void);
/* Like sim_enqueue, and count it as what lies at that offset of struct sim_counts. */
int sim_enqueue_counted(sim_stream stream, void (*run)(void *arg), void *arg, const char *name, size_t counted);
void sim_count(size_t offset, int64_t change); /* of a member of struct sim_counts */
#define SIM_COUNT(member, change) sim_count(offsetof(struct sim_counts, member), (change))

/* --- kernels.c ---------------------------------------------------------------------------------------------------- */
const struct sim_kernel *sim_kernel_find(const char *name); /* NULL: there is none */
void sim_kernel_run(const struct sim_kernel *kernel, const void *arg, unsigned int blocks, unsigned int threads);

#endif
