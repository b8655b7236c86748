/* SPDX-License-Identifier: Apache-2.0
 *
 * What counters order, by seeds: plain bytes written before a counter is raised are there when another rank sees the
 * counter, and a rank that sleeps is woken. A seed decides who writes how much, and who is late, so that waits end
 * while they spin, while they yield and while they sleep. Under ThreadSanitizer a missing order is a report on any
 * CPU; on aarch64 it is also a wrong byte. Nothing here depends on time: a wake-up that gets lost ends in the
 * communicator's time-out.
 */
#include "ranks.h"

#include "../../csrc/comm/futex_counter.h"
#include "../../csrc/comm/internal.h"

enum { RANKS = 3, SEEDS = 6, ROUNDS = 60, PAYLOAD_BYTES = 512 };

/* One rank's part of a region: a message, its counter and the counter of what this rank has read of the others. */
struct part {
    struct zpp_counter written, taken;
    unsigned char payload[PAYLOAD_BYTES];
};

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Mostly nothing, sometimes long enough for the others to sleep. */
static void be_late(uint64_t *state) {
    const uint64_t how = next_random(state) % 16;
    if (how == 0) pause_ms(1);
    else for (volatile uint64_t i = 0; i < how * 200; i++) {}
}

static void describe(const void *ctx, char *text, size_t capacity) {
    snprintf(text, capacity, "round %u of the litmus test", *(const unsigned *)ctx);
}

static void await(struct test_rank *me, void *const *base, size_t offset_bytes, const unsigned *round) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait_ctx waiting = {.comm = me->comm, .own_timeout = true, .describe = describe, .ctx = round};
    const struct zpp_wait_target target = {base, offset_bytes, *round};
    CHECK_OK(zpp_await_all(&waiting, &target, &err));
}

/* Every rank writes its message, all read it, and no rank writes the next one before all have read. */
static void messages_body(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_region *region = NULL;
    CHECK_OK(zpp_region_create(me->comm, ZPP_REGION_PER_RANK, sizeof(struct part), &region, &err));
    void *base[RANKS];
    for (int r = 0; r < RANKS; r++) base[r] = zpp_region_base(region, r);
    struct part *mine = base[me->rank];
    uint64_t chance = *(const uint64_t *)me->arg * 0x9E3779B97F4A7C15u + (uint64_t)me->rank + 1;
    for (unsigned round = 1; round <= ROUNDS; round++) {
        be_late(&chance);
        memset(mine->payload, (int)(round + (unsigned)me->rank), 1 + next_random(&chance) % PAYLOAD_BYTES);
        mine->payload[0] = mine->payload[PAYLOAD_BYTES - 1] = (unsigned char)(round + (unsigned)me->rank);
        zpp_counter_raise(&mine->written, round);
        await(me, base, offsetof(struct part, written), &round);
        for (int r = 0; r < RANKS; r++) {
            const struct part *other = base[r];
            CHECK_EQUAL(other->payload[0], (unsigned char)(round + (unsigned)r));
            CHECK_EQUAL(other->payload[PAYLOAD_BYTES - 1], (unsigned char)(round + (unsigned)r));
        }
        be_late(&chance);
        zpp_counter_raise(&mine->taken, round);
        await(me, base, offsetof(struct part, taken), &round);
    }
    test_join(me);
    zpp_region_destroy(region);
}

static void messages_are_whole(void) {
    for (uint64_t seed = 1; seed <= SEEDS; seed++) run_ranks(RANKS, messages_body, &seed);
}

/* Several writers of one counter (a doorbell): no ring of it is lost, whoever sleeps. */
static void doorbell_body(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_region *region = NULL;
    CHECK_OK(zpp_region_create(me->comm, ZPP_REGION_PER_RANK, sizeof(struct part), &region, &err));
    struct part *bell = zpp_region_base(region, 0);
    struct zpp_wait_ctx waiting = {.comm = me->comm};
    uint64_t chance = *(const uint64_t *)me->arg + (uint64_t)me->rank + 1;
    const uint32_t all = ROUNDS * (RANKS - 1);
    for (unsigned round = 1; me->rank && round <= ROUNDS; round++) {
        be_late(&chance);
        zpp_counter_add(&bell->written);
    }
    for (uint32_t heard = 0; !me->rank && heard < all;) {
        const bool rang = zpp_counter_sleep(&waiting, &bell->written, heard + 1, UINT64_MAX);
        if (rang) heard = atomic_load(&bell->written.value);
        else CHECK_OK(zpp_comm_check(me->comm, &err));
    }
    test_join(me);
    if (!me->rank) CHECK_EQUAL(atomic_load(&bell->written.value), all);
    zpp_region_destroy(region);
}

static void no_ring_is_lost(void) {
    for (uint64_t seed = 1; seed <= SEEDS; seed++) run_ranks(RANKS, doorbell_body, &seed);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(messages_are_whole), TEST(no_ring_is_lost), {0}};
    return test_main(argc, argv, cases);
}
