/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated GPU (tests/sim) for C tests: run.py puts its library beside each program.
 */
#ifndef ZPP_TESTS_SIM_GPU_H
#define ZPP_TESTS_SIM_GPU_H

#include "../sim/sim.h"
#include "beside.h"
#include "harness.h"

static void *sim_library;

static inline void *sim_gpu_symbol(const char *name) {
    void *found = dlsym(sim_library, name);
    if (!found) {
        fprintf(stderr,
                "libsim.so beside this program has no %s, so it is not of this checkout: remove it, and run "
                "tests/c/run.py\n",
                name);
        abort();
    }
    return found;
}

/* A function or variable of sim.h, such as SIM(sim_finish)(). */
#define SIM(name) ((__typeof__(&name))sim_gpu_symbol(#name))

static void sim_gpu_load(void) {
    sim_library = load_beside("libsim.so", "ZEROPP_CUDA_DRIVER", "ZEROPP_NCCL");
    CHECK(sim_library != NULL);
}

/* For ranks that are threads, each on a GPU of its own. Variables of the environment that say more come before. */
static inline void sim_gpu_load_for_threads(const char *devices) {
    setenv("SIM_DEVICES", devices, 1);
    setenv("SIM_IDLE_MS", "200", 1);
    sim_gpu_load();
#ifdef ZPP_UNDER_TSAN
    SIM(sim_share_registrations)(true);
#endif
}

static inline struct sim_counts sim_gpu_counts(void) {
    struct sim_counts counts;
    SIM(sim_get_counts)(&counts);
    return counts;
}

#endif
