/* SPDX-License-Identifier: Apache-2.0
 *
 * The way of tokens to other hosts (hosts.h).
 */
#include "hosts.h"

#include <assert.h>

struct places {
    size_t index_of[ZPP_MOE_MAX_RANKS]; /* of each rank on its host */
    size_t taker[ZPP_MOE_MAX_RANKS];    /* of each host: the rank that takes this rank's tokens */
    size_t mine, here;                  /* this host; experts of a rank */
};

static struct places places_of(const struct zpp_moe_hosts *hosts) {
    struct places places = {.mine = (size_t)hosts->host_of[hosts->rank], .here = hosts->experts / hosts->ranks};
    size_t count[ZPP_MOE_MAX_RANKS] = {0};
    for (size_t r = 0; r < hosts->ranks; r++) places.index_of[r] = count[hosts->host_of[r]]++;
    for (size_t r = 0; r < hosts->ranks; r++) {
        const size_t host = (size_t)hosts->host_of[r];
        if (places.index_of[r] == places.index_of[hosts->rank] % count[host]) places.taker[host] = r;
    }
    return places;
}

/* The hosts that have experts of a token, one bit each. */
static uint64_t wanted_by(const struct zpp_moe_hosts *hosts, const struct places *places, const int32_t *chosen) {
    uint64_t wanted = 0;
    for (size_t j = 0; j < hosts->k; j++)
        if (chosen[j] >= 0) wanted |= UINT64_C(1) << hosts->host_of[(size_t)chosen[j] / places->here];
    return wanted;
}

/* A token's choices in the numbers of one host. */
static void translate(const struct zpp_moe_hosts *hosts, const struct places *places, size_t host,
                      const int32_t *chosen, int32_t *there) {
    for (size_t j = 0; j < hosts->k; j++) {
        const size_t expert = (size_t)chosen[j], owner = chosen[j] < 0 ? 0 : expert / places->here;
        const bool on = chosen[j] >= 0 && (size_t)hosts->host_of[owner] == host;
        there[j] = on ? (int32_t)(places->index_of[owner] * places->here + expert % places->here) : -1;
    }
}

size_t zpp_moe_hosts_count(const struct zpp_moe_hosts *hosts, const struct zpp_moe_tokens *tokens, int64_t *counts) {
    assert(hosts->ranks <= ZPP_MOE_MAX_RANKS && hosts->experts % hosts->ranks == 0);
    const struct places places = places_of(hosts);
    const size_t choices = tokens->tokens * hosts->k;
    for (size_t r = 0; r < hosts->ranks; r++) counts[r] = 0;
    for (size_t a = 0; a < choices; a++)
        if (tokens->chosen[a] < -1 || tokens->chosen[a] >= (int64_t)hosts->experts) return a;
    for (size_t t = 0; t < tokens->tokens; t++) {
        const uint64_t wanted = wanted_by(hosts, &places, tokens->chosen + t * hosts->k);
        for (size_t h = 0; h < hosts->hosts; h++)
            if (h != places.mine && wanted >> h & 1) counts[places.taker[h]]++;
    }
    return choices;
}

void zpp_moe_hosts_route(const struct zpp_moe_hosts *hosts, const struct zpp_moe_tokens *tokens, const int64_t *counts,
                         const struct zpp_moe_pairs *pairs) {
    const struct places places = places_of(hosts);
    size_t next[ZPP_MOE_MAX_RANKS], at = 0;
    for (size_t r = 0; r < hosts->ranks; r++) {
        next[r] = at;
        at += (size_t)counts[r];
    }
    for (size_t t = 0; t < tokens->tokens; t++) {
        const int32_t *chosen = tokens->chosen + t * hosts->k;
        const uint64_t wanted = wanted_by(hosts, &places, chosen);
        translate(hosts, &places, places.mine, chosen, pairs->own + t * hosts->k);
        for (size_t h = 0; h < hosts->hosts; h++) {
            int64_t *slot = &pairs->slots[t * hosts->hosts + h];
            *slot = wanted >> h & 1 ? (int64_t)t : -1;
            if (h == places.mine || *slot < 0) continue;
            const size_t pair = next[places.taker[h]]++;
            pairs->tokens[pair] = (int32_t)t;
            translate(hosts, &places, h, chosen, pairs->chosen + pair * hosts->k);
            *slot = (int64_t)1 << 32 | (int64_t)pair;
        }
    }
}
