/* SPDX-License-Identifier: Apache-2.0
 *
 * What the CPU's and CUDA's token moves share: the draw of one sample, and the search in it.
 */
#ifndef ZPP_OPS_TOKENS_BODY_H
#define ZPP_OPS_TOKENS_BODY_H

#include "../random.h"

/* kept [keep] of sample b: selection sampling (tokens.h). */
ZPP_FN void zpp_tokens_draw(int32_t *kept, uint64_t seq, uint64_t keep, uint64_t seed, uint64_t layer, uint64_t b) {
    uint64_t state = seed; /* each goes through the generator, so that no two sums are alike */
    state = zpp_random_next(&state) ^ layer;
    state = zpp_random_next(&state) ^ b;
    uint64_t missing = keep;
    for (uint64_t s = 0; missing > 0; ++s) {
        if (zpp_random_below(&state, (uint32_t)(seq - s)) >= missing) continue;
        kept[keep - missing--] = (int32_t)s;
    }
}

/* The first of kept [keep], which rise, that is not before s; keep where there is none. */
ZPP_FN uint64_t zpp_tokens_first(const int32_t *kept, uint64_t keep, uint64_t s) {
    uint64_t low = 0, high = keep;
    while (low < high) {
        const uint64_t middle = (low + high) / 2;
        if ((uint64_t)kept[middle] < s) low = middle + 1;
        else high = middle;
    }
    return low;
}

#endif
