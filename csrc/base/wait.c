/* SPDX-License-Identifier: Apache-2.0
 *
 * The clock of every wait, and what a thread does meanwhile: wait.h.
 */
#include "wait.h"

static _Thread_local struct {
    bool (*step)(void *ctx);
    void *ctx;
} idle;

void zpp_idle_set(bool (*step)(void *ctx), void *ctx) {
    idle.step = step;
    idle.ctx = ctx;
}

bool zpp_idle_step(void) { return idle.step && idle.step(idle.ctx); }

uint64_t zpp_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct timespec zpp_moment_in(long ns) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_nsec += ns;
    if (at.tv_nsec >= 1000000000) {
        at.tv_nsec -= 1000000000;
        at.tv_sec++;
    }
    return at;
}

void zpp_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}
