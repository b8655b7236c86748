/* SPDX-License-Identifier: Apache-2.0
 *
 * Regions and descriptor rings between ranks that are threads.
 */
#include <unistd.h>

#include "ranks.h"

static const struct zpp_wait patient = {UINT64_C(30000000000), NULL, NULL};

static void per_rank_region(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_region *region = NULL;
    CHECK_OK(zpp_region_create(me->comm, ZPP_REGION_PER_RANK, 10000, &region, &err));
    CHECK_EQUAL(zpp_region_bytes(region), 12288);
    unsigned char *mine = zpp_region_base(region, me->rank);
    for (int i = 0; i < 12288; i++) CHECK_EQUAL(mine[i], 0);
    memset(mine, me->rank + 1, 10000);
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    for (int r = 0; r < me->ranks; r++)
        for (int i = 0; i < 10000; i += 997) CHECK_EQUAL(((unsigned char *)zpp_region_base(region, r))[i], r + 1);
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    zpp_region_trim(region, 4096, 4096);
    CHECK_EQUAL(mine[0], me->rank + 1);
    CHECK_EQUAL(mine[5000], 0);
    zpp_region_destroy(region);
}

static void one_region(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_region *region = NULL;
    CHECK_OK(zpp_region_create(me->comm, ZPP_REGION_ONE, 64 * 4096, &region, &err));
    for (int r = 0; r < me->ranks; r++) CHECK(zpp_region_base(region, r) == zpp_region_base(region, 0));
    ((unsigned char *)zpp_region_base(region, 0))[me->rank * 4096] = (unsigned char)(me->rank + 7);
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    for (int r = 0; r < me->ranks; r++) CHECK_EQUAL(((unsigned char *)zpp_region_base(region, 0))[r * 4096], r + 7);
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    zpp_region_destroy(region);
}

static void regions(void) {
    for (int ranks = 1; ranks <= 5; ranks++) {
        run_ranks(ranks, per_rank_region, NULL);
        run_ranks(ranks, one_region, NULL);
    }
}

static void region_survives(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_region *region = NULL;
    CHECK_OK(zpp_region_create(me->comm, ZPP_REGION_ONE, 4096, &region, &err));
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    ((zpp_region **)me->arg)[me->rank] = region;
}

static void regions_survive_the_communicator(void) {
    zpp_region *region[2];
    run_ranks(2, region_survives, region);
    *(int *)zpp_region_base(region[0], 0) = 42;
    CHECK_EQUAL(*(int *)zpp_region_base(region[1], 0), 42);
    zpp_region_destroy(region[0]);
    CHECK_EQUAL(*(int *)zpp_region_base(region[1], 0), 42);
    zpp_region_destroy(region[1]);
}

static void different_regions(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_region *region = NULL;
    CHECK_FAILS(zpp_region_create(me->comm, ZPP_REGION_ONE, me->rank == 1 ? 8192 : 4096, &region, &err), ZPP_PEER,
                "in region_create(one block, ");
    CHECK(region == NULL);
    CHECK(strstr(err.text, "4096 bytes") && strstr(err.text, "8192 bytes"));
    CHECK_FAILS(zpp_barrier(me->comm, NULL, &err), ZPP_PEER, "region_create");
}

static void regions_that_differ(void) { run_ranks(3, different_regions, NULL); }

/* Every rank posts `rounds` descriptors, whose payload lies in a region slot, and sums what all ranks posted. */
enum { ROUNDS = 500, SLOTS = 4 };
static void ring_rounds(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_region *region = NULL;
    zpp_desc_ring *ring = NULL;
    CHECK_OK(zpp_region_create(me->comm, ZPP_REGION_PER_RANK, SLOTS * 4096, &region, &err));
    CHECK_OK(zpp_desc_ring_create(me->comm, "grads", &ring, &err));
    CHECK_EQUAL(zpp_desc_ring_acked(ring), 0);
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        const size_t offset = round % SLOTS * 4096;
        struct zpp_desc desc = {.kind = 1, .object = round % 7, .step = round, .elems = 1, .offset_bytes = offset};
        uint64_t seq = 0, sum = 0, wanted = 0;
        if (round > SLOTS) CHECK_OK(zpp_desc_ring_wait_acked(ring, round - SLOTS, &patient, &err));
        *(uint64_t *)(void *)((char *)zpp_region_base(region, me->rank) + offset) = round * 10 + (uint64_t)me->rank;
        desc.mask[0] = (uint8_t)me->rank;
        CHECK_OK(zpp_desc_ring_post(ring, &desc, &patient, &seq, &err));
        CHECK_EQUAL(seq, round);
        for (int r = 0; r < me->ranks; r++) {
            struct zpp_desc theirs;
            CHECK_OK(zpp_desc_ring_read(ring, r, round, &desc, &patient, &theirs, &err));
            CHECK_EQUAL(theirs.mask[0], r);
            sum += *(uint64_t *)(void *)((char *)zpp_region_base(region, r) + theirs.offset_bytes);
            wanted += round * 10 + (uint64_t)r;
        }
        CHECK_EQUAL(sum, wanted);
        zpp_desc_ring_ack(ring, round);
        CHECK(zpp_desc_ring_acked(ring) <= round);
    }
    CHECK_OK(zpp_desc_ring_wait_acked(ring, ROUNDS, &patient, &err));
    CHECK_EQUAL(zpp_desc_ring_acked(ring), ROUNDS);
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    zpp_desc_ring_destroy(ring);
    zpp_region_destroy(region);
}

static void rings_carry_descs(void) {
    for (int ranks = 1; ranks <= 5; ranks++) run_ranks(ranks, ring_rounds, NULL);
}

static void describe(void *ctx, const struct zpp_desc *desc, char *text, size_t room) {
    snprintf(text, room, "%s unit %d", (const char *)ctx, (int)desc->object);
}

static void ring_tries(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_desc_ring *ring = NULL;
    uint64_t seq = 0;
    const struct zpp_desc desc = {.kind = 3};
    CHECK_OK(zpp_desc_ring_create(me->comm, "tries", &ring, &err));
    const int peer = 1 - me->rank;
    CHECK_EQUAL(zpp_desc_ring_read(ring, peer, 1, NULL, NULL, NULL, &err), ZPP_AGAIN);
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    for (int i = 0; i < ZPP_DESC_RING_ENTRIES; i++) CHECK_OK(zpp_desc_ring_post(ring, &desc, NULL, &seq, &err));
    CHECK_EQUAL(zpp_desc_ring_post(ring, &desc, NULL, &seq, &err), ZPP_AGAIN); /* the ring is full */
    CHECK_EQUAL(seq, ZPP_DESC_RING_ENTRIES);
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    zpp_desc_ring_ack(ring, 1);
    CHECK_OK(zpp_desc_ring_post(ring, &desc, &patient, &seq, &err));
    const struct zpp_wait hasty = {UINT64_C(150000000), NULL, NULL};
    CHECK_FAILS(zpp_desc_ring_read(ring, peer, 1000, NULL, &hasty, NULL, &err), ZPP_TIMEOUT,
                "descriptor #1000 of descriptor ring \"tries\"");
    CHECK_EQUAL(err.rank, peer);
    /* the user of the descriptor ring describes what it is for, and no number is in the message */
    char counter[] = "reduce";
    const struct zpp_desc expect = {.kind = 1, .object = 7};
    zpp_desc_ring_set_describe(ring, describe, counter);
    CHECK_FAILS(zpp_desc_ring_read(ring, peer, 1000, &expect, &hasty, NULL, &err), ZPP_TIMEOUT,
                "did not come to reduce unit 7 within 0.1");
    CHECK_FAILS(zpp_desc_ring_wait_acked(ring, seq, &hasty, &err), ZPP_TIMEOUT,
                "did not come to the end of reduce unit 0 within 0.1");
    CHECK_OK(zpp_barrier(me->comm, NULL, &err)); /* a wait on a descriptor ring that ends does not end the group */
    zpp_desc_ring_destroy(ring);
}

static void rings_try_and_time_out(void) { run_ranks(2, ring_tries, NULL); }

static void ring_divergence(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_desc_ring *ring = NULL;
    uint64_t seq = 0;
    char counter[] = "reduce";
    const struct zpp_desc desc = {.kind = 1, .object = me->rank == 2 ? 9 : 4, .elems = 8};
    CHECK_OK(zpp_desc_ring_create(me->comm, "grads", &ring, &err));
    zpp_desc_ring_set_describe(ring, describe, counter);
    CHECK_OK(zpp_barrier(me->comm, NULL, &err)); /* all have the descriptor ring */
    /* The others may have found out before this rank posts. */
    zpp_status status = zpp_desc_ring_post(ring, &desc, &patient, &seq, &err);
    for (int r = 0; r < me->ranks && status == ZPP_OK; r++)
        status = zpp_desc_ring_read(ring, r, 1, &desc, &patient, NULL, &err);
    CHECK_EQUAL(status, ZPP_PEER);
    CHECK(strstr(err.text, "at reduce unit 4") && strstr(err.text, "at reduce unit 9") && !strstr(err.text, "notice"));
    CHECK_FAILS(zpp_desc_ring_post(ring, &desc, &patient, &seq, &err), ZPP_PEER, "reduce unit 9");
    zpp_desc_ring_destroy(ring);
}

static void rings_compare_identities(void) { run_ranks(3, ring_divergence, NULL); }

static void ring_of_the_departed(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_desc_ring *ring = NULL;
    uint64_t seq = 0;
    const struct zpp_desc desc = {.kind = 1};
    CHECK_OK(zpp_desc_ring_create(me->comm, "grads", &ring, &err));
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    CHECK_OK(zpp_desc_ring_post(ring, &desc, &patient, &seq, &err));
    if (me->rank != 1) {
        /* what it posted before it left counts */
        CHECK_OK(zpp_desc_ring_read(ring, 1, 1, &desc, &patient, NULL, &err));
        /* Rank 2 has posted #2, too, but rank 0 waits for a rank that waits for the one that left. */
        CHECK_FAILS(zpp_desc_ring_read(ring, 2 - me->rank, 2, NULL, &patient, NULL, &err), ZPP_PEER,
                    "rank 1 left the group");
        CHECK_EQUAL(err.rank, 1);
    }
    zpp_desc_ring_destroy(ring);
}

static void rings_name_who_left(void) { run_ranks(3, ring_of_the_departed, NULL); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(regions),
                                             TEST(regions_survive_the_communicator),
                                             TEST(regions_that_differ),
                                             TEST(rings_carry_descs),
                                             TEST(rings_try_and_time_out),
                                             TEST(rings_compare_identities),
                                             TEST(rings_name_who_left),
                                             {0}};
    return test_main(argc, argv, cases);
}
