/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan: a counting sort of assignments by expert, with or without a capacity (moe.h).
 */
#include "moe.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../random.h"

enum { KEPT = 0, DROPPED = -1 };

/* Which assignments stay: first choices first, among equals in the order given (NULL: of tokens). slots becomes KEPT or
 * DROPPED. */
static void drop(const struct zpp_moe_plan *plan, const uint32_t *order, int32_t *slots, int64_t *kept) {
    for (size_t j = 0; j < plan->k; ++j) {
        for (size_t i = 0; i < plan->tokens; ++i) {
            const size_t a = (order ? order[i] : i) * plan->k + j;
            int64_t *of_expert = &kept[plan->chosen[a]];
            const bool fits = plan->capacity == 0 || (size_t)*of_expert < plan->capacity;
            slots[a] = fits ? KEPT : DROPPED;
            *of_expert += fits;
        }
    }
}

/* Rows in order of tokens within each expert. */
static void place(const struct zpp_moe_plan *plan, int32_t *slots, const int64_t *kept, int32_t *next) {
    int32_t row = 0;
    for (size_t e = 0; e < plan->experts; ++e) {
        next[e] = plan->capacity ? (int32_t)(e * plan->capacity) : row;
        row += (int32_t)kept[e];
    }
    for (size_t a = 0; a < plan->tokens * plan->k; ++a) {
        if (slots[a] != DROPPED) slots[a] = next[plan->chosen[a]]++;
    }
}

static void shuffle(uint32_t *order, size_t count, int64_t seed) {
    uint64_t state = (uint64_t)seed;
    for (size_t i = 0; i < count; ++i) {
        const uint32_t j = zpp_random_below(&state, (uint32_t)(i + 1));
        order[i] = (uint32_t)i;
        order[i] = order[j];
        order[j] = (uint32_t)i;
    }
}

zpp_status zpp_moe_plan(const struct zpp_moe_plan *plan, int32_t *slots, int64_t *kept, struct zpp_err *err) {
    assert(plan->experts >= 1 && plan->experts <= ZPP_MOE_MAX_EXPERTS && plan->k >= 1);
    assert(plan->tokens * plan->k <= INT32_MAX && plan->experts * plan->capacity <= INT32_MAX);
    int32_t next[ZPP_MOE_MAX_EXPERTS];
    uint32_t *order = NULL;
    if (plan->seed >= 0 && plan->capacity > 0) {
        order = malloc((plan->tokens + 1) * sizeof *order);
        if (!order) return zpp_fail(err, ZPP_NOMEM, "moe plan: no memory for an order of %zu tokens", plan->tokens);
        shuffle(order, plan->tokens, plan->seed);
    }
    memset(kept, 0, plan->experts * sizeof *kept);
    drop(plan, order, slots, kept);
    place(plan, slots, kept, next);
    free(order);
    return ZPP_OK;
}
