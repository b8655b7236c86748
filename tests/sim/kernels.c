/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of the simulated GPU, one launch at a time, on the executor. Blocks go one after the other. Threads of a
 * block are a loop; where a kernel has barriers they are coroutines, each of which runs up to the next barrier in its
 * turn.
 */
#include "internal.h"

#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

enum { MOST_THREADS = 1024, STACK_BYTES = 1 << 17 };

static struct sim_kernel *kernels;

void sim_kernel_register(struct sim_kernel *kernel) {
    kernel->next = kernels;
    kernels = kernel;
}

const struct sim_kernel *sim_kernel_find(const char *name) {
    const struct sim_kernel *kernel = kernels;
    while (kernel && strcmp(kernel->name, name) != 0) kernel = kernel->next;
    return kernel;
}

/* --- coroutines --------------------------------------------------------------------------------------------------- */

static struct coroutine {
    ucontext_t context;
    bool ended;
} coroutines[MOST_THREADS];
static ucontext_t scheduler;
static char *stacks;
static struct {
    const struct sim_kernel *kernel;
    const void *arg;
    unsigned int block, thread;
} now;

void sim_barrier(void) { swapcontext(&coroutines[now.thread].context, &scheduler); }

static void coroutine_main(void) {
    const unsigned int thread = now.thread;
    now.kernel->run_thread(now.arg, now.block, thread);
    coroutines[thread].ended = true;
}

static void start(unsigned int thread) {
    struct coroutine *coroutine = &coroutines[thread];
    coroutine->ended = false;
    getcontext(&coroutine->context);
    coroutine->context.uc_stack.ss_sp = stacks + (size_t)thread * STACK_BYTES;
    coroutine->context.uc_stack.ss_size = STACK_BYTES;
    coroutine->context.uc_link = &scheduler;
    makecontext(&coroutine->context, coroutine_main, 0);
}

static void run_block(unsigned int threads) {
    for (unsigned int thread = 0; thread < threads; thread++) start(thread);
    for (unsigned int left = threads; left;) {
        for (now.thread = 0; now.thread < threads; now.thread++) {
            struct coroutine *coroutine = &coroutines[now.thread];
            if (coroutine->ended) continue;
            swapcontext(&scheduler, &coroutine->context);
            left -= coroutine->ended;
        }
    }
}

static void run_with_barriers(const struct sim_kernel *kernel, const void *arg, unsigned int blocks,
                              unsigned int threads) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!stacks) stacks = mmap(NULL, (size_t)MOST_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stacks == MAP_FAILED) sim_fatal("no memory for the stacks of a block");
    now.kernel = kernel;
    now.arg = arg;
    for (now.block = 0; now.block < blocks; now.block++) run_block(threads);
}

void sim_kernel_run(const struct sim_kernel *kernel, const void *arg, unsigned int blocks, unsigned int threads) {
    if (kernel->barriers) {
        run_with_barriers(kernel, arg, blocks, threads);
        return;
    }
    for (unsigned int block = 0; block < blocks; block++)
        for (unsigned int thread = 0; thread < threads; thread++) kernel->run_thread(arg, block, thread);
}
