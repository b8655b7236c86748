/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether staged bytes go around the cache or through it; docs/design/0012.
 *
 * Ranks whose cores share a last-level cache pass bytes through it at twice the speed of going around it; ranks whose
 * cores do not, take dirty lines out of each other's caches at less than half of it. A virtual machine does not say
 * which it is, and it changes whenever the host moves a virtual CPU. So rank 0 times both ways, prefers the faster one
 * and tries the other one now and then; its choice travels with the place of its tensor, so that all ranks go the same
 * way, whatever they would measure. The bits of the result are the same either way.
 */
#include "internal.h"

enum { FIRST_TRIALS = 8, TRIAL_EVERY = 64, MEDIUM_ROUNDS = 8, LARGE_ROUNDS = 64 };

/* How fast a figure forgets: 20 calls without a better one raise it to 1.8 times. */
static const double FORGET = 1.03;

static bool choose(const struct zpp_route *route) {
    if (route->calls < FIRST_TRIALS) return route->calls % 2;
    const bool faster = route->ns_per_round[true] < route->ns_per_round[false];
    return route->calls % TRIAL_EVERY ? faster : !faster;
}

bool zpp_route_choose(struct zpp_comm *comm, size_t bytes) {
    const size_t rounds = bytes / ZPP_STAGE_BYTES;
    comm->route_now = &comm->route[comm->now.what & 0xff][rounds < MEDIUM_ROUNDS ? 0 : rounds < LARGE_ROUNDS ? 1 : 2];
    return choose(comm->route_now);
}

void zpp_route_learn(struct zpp_comm *comm, size_t rounds, uint64_t took_ns) {
    struct zpp_route *route = comm->route_now;
    if (!route || !rounds) return;
    double *cost = &route->ns_per_round[comm->through_cache];
    const double now = (double)took_ns / (double)rounds, before = *cost * FORGET;
    *cost = before > 0 && before < now ? before : now;
    route->calls++;
}
