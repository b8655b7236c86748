/* SPDX-License-Identifier: Apache-2.0
 *
 * Threads for pools in C tests: made anew for each run, so that ThreadSanitizer sees what
 * orders them.
 */
#ifndef ZPP_TESTS_THREADS_H
#define ZPP_TESTS_THREADS_H

#include <pthread.h>

#include "harness.h"

struct test_lent {
    void (*each)(void *arg);
    void *arg;
};

static inline void *test_lent_main(void *arg) {
    const struct test_lent *lent = arg;
    lent->each(lent->arg);
    return NULL;
}

/* A zpp_spread_fn for up to 8 threads. */
static inline void in_new_threads(int threads, void (*each)(void *arg), void *arg) {
    pthread_t ids[8];
    struct test_lent lent = {each, arg};
    CHECK(threads <= 8);
    for (int i = 1; i < threads; ++i) CHECK(pthread_create(&ids[i], NULL, test_lent_main, &lent) == 0);
    each(arg);
    for (int i = 1; i < threads; ++i) pthread_join(ids[i], NULL);
}

#endif
