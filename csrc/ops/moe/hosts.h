/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts over several hosts: which tokens go to which of them, and the sum of what comes back. A token goes
 * once to each host that has at least one of its experts, whatever their number there, and returns as one row, the sum
 * over the experts of that host (the hierarchical all-to-all of DeepSpeed-MoE, Rajbhandari et al. 2022, section 5.3).
 *
 * A *pair* is a token and another host that it goes to. The rank that takes it there is the one with the same place on
 * that host, counted round where hosts have different numbers of ranks. Pairs are in order of the ranks that take them,
 * then of tokens. Expert e is on rank e ranks / experts; on a host with L ranks its experts are numbered from 0 on, in
 * order of those ranks.
 */
#ifndef ZPP_OPS_MOE_HOSTS_H
#define ZPP_OPS_MOE_HOSTS_H

#include "moe.h"

enum { ZPP_MOE_MAX_RANKS = 64 };

struct zpp_moe_hosts {
    const int32_t *host_of; /* [ranks]: 0..hosts-1 */
    size_t ranks, rank, hosts;
    size_t experts, k; /* experts: of all ranks, a multiple of their number */
};
struct zpp_moe_tokens {
    const int32_t *chosen; /* [tokens][k]: -1 (dropped) or an expert */
    size_t tokens;
};
/* Count this rank's pairs by the rank that takes them: counts [ranks]. Return the first choice that is neither -1 nor
 * an expert, or tokens * k. */
size_t zpp_moe_hosts_count(const struct zpp_moe_hosts *hosts, const struct zpp_moe_tokens *tokens, int64_t *counts);

struct zpp_moe_pairs {
    int32_t *tokens; /* [pairs]: the token of each */
    int32_t *chosen; /* [pairs][k]: its experts on that host, in that host's numbers, -1 for the others */
    int32_t *own;    /* [tokens][k]: the same of every token for this host */
    /* [tokens * hosts]: where zpp_moe_peer_sum finds the row of each host: 0 * 2^32 + token for this host, 1 * 2^32 +
     * pair for others, -1 for hosts that have none of its experts */
    int64_t *slots;
};
/* counts: of zpp_moe_hosts_count. */
void zpp_moe_hosts_route(const struct zpp_moe_hosts *hosts, const struct zpp_moe_tokens *tokens, const int64_t *counts,
                         const struct zpp_moe_pairs *pairs);

#endif
