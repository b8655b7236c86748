/* SPDX-License-Identifier: Apache-2.0
 *
 * Send and receive between ranks that are threads: tags, sizes larger than a channel, any source, both sides sending
 * first.
 */
#include "ranks.h"

static unsigned char *pattern(size_t bytes, int seed) {
    unsigned char *data = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) data[i] = (unsigned char)(i * 31u + (size_t)seed);
    return data;
}

static void check_pattern(const unsigned char *data, size_t bytes, int seed) {
    for (size_t i = 0; i < bytes; i++) CHECK_EQUAL(data[i], (unsigned char)(i * 31u + (size_t)seed));
}

static void wait_free(zpp_transfer *transfer) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_transfer_wait(transfer, NULL, &err));
    zpp_transfer_free(transfer);
}

/* Every rank sends to every other before it receives anything. */
static void everybody_sends_first(struct test_rank *me) {
    static const size_t sizes[] = {0, 1, 16, 1000, 1048576, 3000001};
    struct zpp_err err = ZPP_ERR_INIT;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        zpp_transfer *out[TEST_RANKS_MAX], *in;
        unsigned char *data = pattern(sizes[s], me->rank), *room = malloc(sizes[s] + 1);
        for (int r = 0; r < me->ranks; r++)
            if (r != me->rank) CHECK_OK(zpp_comm_send(me->comm, data, sizes[s], r, s, &out[r], &err));
        for (int r = 0; r < me->ranks; r++) {
            if (r == me->rank) continue;
            CHECK_OK(zpp_comm_recv(me->comm, room, sizes[s], r, s, &in, &err));
            CHECK_OK(zpp_transfer_wait(in, NULL, &err));
            CHECK_EQUAL(zpp_transfer_peer(in), r);
            zpp_transfer_free(in);
            check_pattern(room, sizes[s], r);
        }
        for (int r = 0; r < me->ranks; r++)
            if (r != me->rank) wait_free(out[r]);
        free(data);
        free(room);
    }
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
}

static void all_pairs(void) {
    for (int ranks = 2; ranks <= 4; ranks++) run_ranks(ranks, everybody_sends_first, NULL);
}

/* Tags are received in another order than they were sent in, some while their message is still coming. */
static void backwards(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    enum { MESSAGES = 12, STEP = 250001 };
    zpp_transfer *transfer[MESSAGES];
    unsigned char *data[MESSAGES];
    for (int k = 0; k < MESSAGES; k++) {
        const size_t bytes = (size_t)k * STEP;
        data[k] = me->rank == 0 ? pattern(bytes, k) : malloc(bytes + 1);
        if (me->rank == 0) CHECK_OK(zpp_comm_send(me->comm, data[k], bytes, 1, (uint64_t)k, &transfer[k], &err));
    }
    if (me->rank == 1)
        for (int k = MESSAGES - 1; k >= 0; k--) {
            CHECK_OK(zpp_comm_recv(me->comm, data[k], (size_t)k * STEP, 0, (uint64_t)k, &transfer[k], &err));
            if (k % 3 == 0) CHECK_OK(zpp_transfer_wait(transfer[k], NULL, &err));
        }
    for (int k = 0; k < MESSAGES; k++) {
        wait_free(transfer[k]);
        if (me->rank == 1) check_pattern(data[k], (size_t)k * STEP, k);
        free(data[k]);
    }
}

static void tags(void) { run_ranks(2, backwards, NULL); }

static void from_anyone(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_transfer *transfer;
    bool seen[TEST_RANKS_MAX] = {false};
    int value = me->rank * 11;
    if (me->rank) {
        CHECK_OK(zpp_comm_send(me->comm, &value, sizeof value, 0, 5, &transfer, &err));
        wait_free(transfer);
        return;
    }
    for (int k = 1; k < me->ranks; k++) {
        CHECK_OK(zpp_comm_recv(me->comm, &value, sizeof value, ZPP_NO_RANK, 5, &transfer, &err));
        CHECK_OK(zpp_transfer_wait(transfer, NULL, &err));
        const int source = zpp_transfer_peer(transfer);
        zpp_transfer_free(transfer);
        CHECK_EQUAL(value, source * 11);
        CHECK(source > 0 && source < me->ranks && !seen[source]);
        seen[source] = true;
    }
}

static void any_source(void) { run_ranks(4, from_anyone, NULL); }

static void other_size(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_transfer *transfer;
    char data[32] = {0};
    if (me->rank == 0) {
        CHECK_OK(zpp_comm_send(me->comm, data, 8, 1, 3, &transfer, &err));
        wait_free(transfer);
    } else {
        CHECK_OK(zpp_comm_recv(me->comm, data, 32, 0, 3, &transfer, &err));
        CHECK_FAILS(zpp_transfer_wait(transfer, NULL, &err), ZPP_PEER, "rank 0 sent 8 bytes with tag 3 to rank 1");
        CHECK_EQUAL(err.rank, 0);
        zpp_transfer_free(transfer);
        CHECK_FAILS(zpp_comm_send(me->comm, data, 8, 1, 3, &transfer, &err), ZPP_INVALID, "wanted another rank");
    }
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
}

static void sizes_must_agree(void) { run_ranks(2, other_size, NULL); }

static void sender_leaves(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_transfer *transfer;
    char data[8] = "abcdefg";
    if (me->rank == 0) {
        CHECK_OK(zpp_comm_send(me->comm, data, 8, 1, 0, &transfer, &err));
        wait_free(transfer);
        return; /* leaves; what it sent is still there */
    }
    char room[8];
    CHECK_OK(zpp_comm_recv(me->comm, room, 8, 0, 0, &transfer, &err));
    wait_free(transfer);
    CHECK(memcmp(room, data, 8) == 0);
    CHECK_OK(zpp_comm_recv(me->comm, room, 8, 0, 0, &transfer, &err));
    CHECK_FAILS(zpp_transfer_wait(transfer, NULL, &err), ZPP_PEER, "rank 0 left the group");
    zpp_transfer_free(transfer);
}

static void who_leaves_is_named(void) { run_ranks(2, sender_leaves, NULL); }

/* Rank 1 waits for rank 2, which leaves, while messages of rank 0 keep it from sleeping. */
static void busy_waiter(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_transfer *transfer = NULL, *sent = NULL;
    char data[8] = "abcdefg";
    zpp_comm_set_timeout(me->comm, 10 * TEST_SECOND_NS);
    test_join(me);
    if (me->rank == 2) return;
    if (me->rank == 1) {
        CHECK_OK(zpp_comm_recv(me->comm, data, 8, 2, 0, &transfer, &err));
        CHECK_FAILS(zpp_transfer_wait(transfer, NULL, &err), ZPP_PEER, "rank 2 left the group");
        zpp_transfer_free(transfer);
    }
    while (me->rank == 0 && zpp_comm_health(me->comm, &err) == ZPP_OK) {
        if (zpp_comm_send(me->comm, data, 8, 1, 1, &sent, &err) == ZPP_OK) zpp_transfer_free(sent);
        pause_ms(5);
    }
}

static void traffic_does_not_hide_a_loss(void) { run_ranks(3, busy_waiter, NULL); }

static void nobody_waits(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_transfer *transfer;
    enum { BYTES = 5000000 }; /* several times the channel: it goes on only if a thread moves it */
    unsigned char *data = me->rank == 0 ? pattern(BYTES, 1) : malloc(BYTES);
    if (me->rank == 0) {
        CHECK_OK(zpp_comm_send(me->comm, data, BYTES, 1, 0, &transfer, &err));
    } else {
        CHECK_OK(zpp_comm_recv(me->comm, data, BYTES, 0, 0, &transfer, &err));
        CHECK_OK(zpp_transfer_wait(transfer, NULL, &err));
        check_pattern(data, BYTES, 1);
    }
    CHECK_OK(zpp_barrier(me->comm, NULL, &err)); /* rank 0 is here all the time */
    CHECK(zpp_transfer_finished(transfer));
    zpp_transfer_free(transfer);
    free(data);
}

static void transfers_go_on_alone(void) { run_ranks(2, nobody_waits, NULL); }

static void unfinished(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    static char room[TEST_RANKS_MAX][8];
    zpp_transfer **kept = me->arg;
    CHECK_OK(zpp_comm_recv(me->comm, room[me->rank], 8, 1 - me->rank, 0, &kept[me->rank], &err));
    CHECK(!zpp_transfer_finished(kept[me->rank]));
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
}

static void destroy_ends_what_is_pending(void) {
    zpp_transfer *kept[2];
    run_ranks(2, unfinished, kept);
    for (int r = 0; r < 2; r++) {
        CHECK(zpp_transfer_finished(kept[r]));
        zpp_transfer_free(kept[r]);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(all_pairs),
                                             TEST(tags),
                                             TEST(any_source),
                                             TEST(sizes_must_agree),
                                             TEST(who_leaves_is_named),
                                             TEST(traffic_does_not_hide_a_loss),
                                             TEST(transfers_go_on_alone),
                                             TEST(destroy_ends_what_is_pending),
                                             {0}};
    return test_main(argc, argv, cases);
}
