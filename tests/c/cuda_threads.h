/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA kernels with barriers on a CPU: the threads of a block are threads, __syncthreads is a barrier, shared memory is
 * static, and blocks go one after the other. So ThreadSanitizer sees a missing barrier as the race that it is. Include
 * this, then the .cu file; then, for a kernel that takes one struct:
 *
 *     CUDA_THUNK(zpp_thing_cuda, struct zpp_thing_args)
 *     cuda_run(zpp_thing_cuda_thunk, &args, blocks, threads);
 */
#ifndef ZPP_TESTS_CUDA_THREADS_H
#define ZPP_TESTS_CUDA_THREADS_H

#include <pthread.h>

#include "cuda_on_cpu.h"

enum { CUDA_MOST_THREADS = 256 };

static pthread_barrier_t cuda_barrier;
#define __shared__ static
#define __syncthreads() ((void)pthread_barrier_wait(&cuda_barrier))

#define CUDA_THUNK(kernel, type)                                                                          \
    static void kernel##_thunk(const void *args) { kernel(*(const type *)args); }

struct cuda_run {
    void (*thunk)(const void *args);
    const void *args;
    unsigned int blocks;
};
struct cuda_thread {
    const struct cuda_run *run;
    unsigned int index;
};

static void *cuda_thread_main(void *arg) {
    const struct cuda_thread *thread = arg;
    threadIdx.x = thread->index;
    for (blockIdx.x = 0; blockIdx.x < thread->run->blocks; ++blockIdx.x) {
        thread->run->thunk(thread->run->args);
        __syncthreads();
    }
    return NULL;
}

static inline __attribute__((unused)) void cuda_run(void (*thunk)(const void *args), const void *args,
                                                    uint64_t blocks, unsigned int threads) {
    const struct cuda_run run = { thunk, args, (unsigned int)blocks };
    struct cuda_thread each[CUDA_MOST_THREADS];
    pthread_t ids[CUDA_MOST_THREADS];
    if (blocks == 0) return;
    CHECK(threads <= CUDA_MOST_THREADS);
    CHECK(pthread_barrier_init(&cuda_barrier, NULL, threads) == 0);
    for (unsigned int t = 0; t < threads; ++t) {
        each[t] = (struct cuda_thread){ &run, t };
        CHECK(pthread_create(&ids[t], NULL, cuda_thread_main, &each[t]) == 0);
    }
    for (unsigned int t = 0; t < threads; ++t) pthread_join(ids[t], NULL);
    pthread_barrier_destroy(&cuda_barrier);
}

/* Kernels without barriers: one thread runs all, which is faster. */
static inline __attribute__((unused)) void cuda_loop(void (*thunk)(const void *args), const void *args,
                                                     uint64_t blocks, unsigned int threads) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) thunk(args);
    }
}

#endif
