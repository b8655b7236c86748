/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether stores are nontemporal (around the cache) or cached; docs/design/0012.
 *
 * Cached stores are twice as fast as nontemporal ones where the ranks' cores share a last-level cache, and less than
 * half as fast where dirty lines have to leave another cache. A virtual machine does not report which case holds, and
 * it changes whenever the host moves a virtual CPU. So rank 0 times the policies there are, prefers the fastest one
 * and tries the others now and then; its choice is posted with the place of its tensor, so that all ranks use the same
 * policy. The bits of the result do not depend on it.
 *
 * Rank 0 does not know before the exchange whether the peers' tensors lie in arenas, so it posts a policy for either
 * case.
 */
#include "../internal.h"

enum { FIRST_TRIALS = 8, TRIAL_EVERY = 64 };

/* How fast a measured cost decays: 20 calls without a better one raise it to 1.8 times. */
static const double FORGET = 1.03;

static unsigned coll_of(const struct zpp_comm *comm) { return comm->now.what & 0x7f; }

/* The bits of a policy that are always set and not tried: the collective ignores them, or the better choice is
 * known. */
static unsigned settled(unsigned coll, size_t bytes, bool in_place) {
    const unsigned own = bytes < ZPP_STREAM_BYTES ? ZPP_OWN_CACHED : 0;
    if (coll == ZPP_COLL_ALL_REDUCE) return in_place ? 0 : ZPP_OWN_CACHED; /* staged, its output was read just now */
    if (in_place) return own | ZPP_SHARED_CACHED;                          /* peers read what was there before */
    /* A root finishes before its peers where the data fits into its slots, so its time would mean nothing. */
    return coll == ZPP_COLL_BROADCAST && own ? own | ZPP_SHARED_CACHED : own;
}

/* Return policy number `index` of those that have the settled bits. */
static unsigned nth(unsigned settled_bits, unsigned index) {
    unsigned policy = 0;
    while (policy < ZPP_STORE_POLICIES - 1 && ((policy & settled_bits) != settled_bits || index--)) policy++;
    return policy;
}

static unsigned choose(const struct zpp_store_costs *costs, unsigned settled_bits) {
    unsigned count = 0, best = settled_bits;
    for (unsigned policy = 0; policy < ZPP_STORE_POLICIES; policy++) {
        if ((policy & settled_bits) != settled_bits) continue;
        count++;
        if (costs->ns_per_byte[policy] > 0 && costs->ns_per_byte[policy] < costs->ns_per_byte[best]) best = policy;
    }
    if (costs->calls < FIRST_TRIALS) return nth(settled_bits, costs->calls % count);
    return costs->calls % TRIAL_EVERY ? best : nth(settled_bits, costs->calls / TRIAL_EVERY % count);
}

/* Return the size class of a whole tensor: below 2, 8 and 32 MB, and above. */
static unsigned size_class(size_t bytes) {
    unsigned at = 0;
    for (size_t end = (size_t)2 << 20; at < ZPP_STORE_POLICY_SIZES - 1 && bytes >= end; end *= 4) at++;
    return at;
}

static size_t whole_bytes(const struct zpp_comm *comm, size_t bytes) {
    return coll_of(comm) == ZPP_COLL_ALL_GATHER ? bytes * (size_t)comm->ranks : bytes;
}

void zpp_store_policy_post(struct zpp_comm *comm, size_t bytes, struct zpp_place *place) {
    const size_t whole = whole_bytes(comm, bytes);
    if (comm->rank != 0) return;
    comm->policy_bytes = whole;
    for (int in_place = 0; in_place < 2; in_place++)
        place->policy[in_place] = (uint8_t)choose(&comm->costs[coll_of(comm)][in_place][size_class(whole)],
                                                  settled(coll_of(comm), whole, in_place));
}

void zpp_store_policy_adopt(struct zpp_comm *comm, bool in_place) {
    comm->policy = zpp_post_of(comm, 0)->place.policy[in_place] % ZPP_STORE_POLICIES;
    if (comm->rank == 0) comm->costs_now = &comm->costs[coll_of(comm)][in_place][size_class(comm->policy_bytes)];
}

void zpp_store_policy_learn(struct zpp_comm *comm, uint64_t took_ns) {
    struct zpp_store_costs *costs = comm->costs_now;
    if (!costs || !comm->policy_bytes) return;
    double *cost = &costs->ns_per_byte[comm->policy];
    const double now = (double)took_ns / (double)comm->policy_bytes, before = *cost * FORGET;
    *cost = before > 0 && before < now ? before : now;
    costs->calls++;
}
