/* SPDX-License-Identifier: Apache-2.0
 *
 * How a call may wait, and for how long. Passing NULL for a `const struct zpp_wait *` means: try once, and return
 * ZPP_AGAIN when it cannot be done now. Otherwise the call spins for a bounded time, yields, then sleeps in the kernel,
 * and about every 100 ms calls `tick`; a tick that returns an error ends the wait with that error. The binding uses the
 * ticks for Ctrl-C; nothing in csrc/ below bind knows of signals or of Python's lock.
 */
#ifndef ZPP_BASE_WAIT_H
#define ZPP_BASE_WAIT_H

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#include "status.h"

struct zpp_wait {
    uint64_t timeout_ns; /* from the start of this call; 0 = no limit (a dead peer still ends it) */
    zpp_status (*tick)(void *ctx, struct zpp_err *err); /* may be NULL */
    void *ctx;           /* borrowed */
};

/* Work that this thread does in small steps while it waits for messages of others (comm/p2p.c). `step` never waits, and
 * returns true if some is left. `ctx` is borrowed until zpp_idle_set(NULL, NULL). */
void zpp_idle_set(bool (*step)(void *ctx), void *ctx);
bool zpp_idle_step(void); /* false where nothing is set */

/* Monotonic clock. */
uint64_t zpp_now_ns(void);
/* Return the time `ns` (below 1e9) from now on that clock, for timed waits on conditions of zpp_cond_init. */
struct timespec zpp_moment_in(long ns);
/* Initialise a condition whose timed waits follow that clock. */
void zpp_cond_init(pthread_cond_t *cond);

#endif
