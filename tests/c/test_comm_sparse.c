/* SPDX-License-Identifier: Apache-2.0
 *
 * Sparse groups: everything that test_comm_hier.c shows of groups over several hosts, with as few links as a group of
 * more than ZPP_FULL_RANKS ranks has; the tree of the rendezvous; links that are made when they are needed; errors that
 * are passed on from host to host.
 */
#define TEST_SPARSE
#define TEST_FULL_RANKS 1
#define TEST_RANKS_MOST 40
#include "test_comm_hier.c"

#ifdef ZPP_UNDER_TSAN
static const char many[] = "aabbccddeeffgghhiijj";
#else
static const char many[] = "aabbccddeeffgghhiijjkkllmmnnooppqqrrsstt";
#endif

/* --- what a group of many ranks has ------------------------------------------------------------------------------- */

static int links_of(const struct test_rank *me, int first_slot, int end_slot) {
    int made = 0;
    for (int r = 0; r < me->ranks; r++)
        for (int slot = first_slot; slot < end_slot; slot++) made += me->comm->net->peer[r].link[slot] >= 0;
    return made;
}

static int log2_above(int hosts) {
    int rounds = 0;
    for (int reached = 1; reached < hosts; reached *= 2) rounds++;
    return rounds;
}

static void few_links(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    const int rounds = log2_above(me->ranks / 2);
    double sum = me->rank, all[TEST_RANKS_MAX], mine = me->rank;
    CHECK(me->comm->door != NULL);
    CHECK(links_of(me, ZPP_NET_CONTROL, ZPP_NET_P2P) <= 2 * rounds);
    CHECK_EQUAL(links_of(me, ZPP_NET_P2P, ZPP_NET_SLOTS_MAX), 0);
    test_join(me); /* from here on others make links to this rank */
    for (int i = 0; i < 3; i++) CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    CHECK_OK(zpp_all_reduce(me->comm, &sum, 1, ZPP_F64, ZPP_SUM, NULL, &err));
    CHECK_EQUAL((int)sum, me->ranks * (me->ranks - 1) / 2);
    CHECK_OK(zpp_all_gather(me->comm, all, &mine, sizeof mine, NULL, &err));
    for (int r = 0; r < me->ranks; r++) CHECK_EQUAL((int)all[r], r);
    CHECK(links_of(me, ZPP_NET_DATA, ZPP_NET_SLOTS_MAX) <= 2 * rounds); /* of short collectives */
    test_join(me);
}

static void links_grow_with_the_logarithm(void) { run_hosts(many, few_links, NULL); }

/* --- a link that is refused --------------------------------------------------------------------------------------- */

/* Rank 0 has left, and rank 3 had no link to it, nor a control link, which goes to hosts 1, 2 and 4 further. */
static void left_before_a_send(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_transfer *transfer = NULL;
    const int value = 7;
    if (me->rank == 0) zpp_comm_leave(me->comm);
    test_join(me);
    if (me->rank == 3) {
        CHECK(me->comm->net->peer[0].link[ZPP_NET_CONTROL] < 0);
        zpp_status status = zpp_comm_send(me->comm, &value, sizeof value, 0, 1, &transfer, &err);
        if (status == ZPP_OK) status = zpp_transfer_wait(transfer, NULL, &err);
        CHECK_EQUAL(status, ZPP_PEER);
        CHECK_EQUAL(err.rank, 0);
        CHECK(strstr(err.text, "comm: rank 0 left group \"test\", or died, before rank 3 had a link to it, which it "
                               "needs in a send to rank 0; every rank has to make the same calls before it leaves"));
        if (transfer) zpp_transfer_free(transfer);
    }
    test_join(me);
}

static void a_rank_that_left_takes_no_send(void) { run_hosts("abcdefgh", left_before_a_send, NULL); }

/* The error of the group comes after the refusal, and counts. */
static void error_after_a_refusal(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_transfer *transfer = NULL;
    if (me->rank == 0) zpp_comm_leave(me->comm);
    test_join(me);
    if (me->rank == 5) {
        pause_ms(300);
        zpp_comm_abort(me->comm, "calls diverged");
    }
    if (me->rank == 3) {
        const zpp_status status = zpp_comm_send(me->comm, &err, 1, 0, 1, &transfer, &err);
        CHECK_EQUAL(status, ZPP_ABORTED);
        CHECK_EQUAL(err.rank, 5);
        CHECK(strstr(err.text, "calls diverged"));
    }
    test_join(me);
}

static void an_error_after_a_refusal_counts(void) { run_hosts("abcdefgh", error_after_a_refusal, NULL); }

/* Every rank names the rank that left, and its own call; those far from it are refused, or hear of the error first. */
static void left_before_a_collective(struct test_rank *me) {
    enum { ELEMS = 1 << 20 };
    struct zpp_err err = ZPP_ERR_INIT;
    float *data = calloc(ELEMS, sizeof *data);
    if (me->rank == 0) zpp_comm_leave(me->comm);
    test_join(me);
    if (me->rank > 0) {
        CHECK_FAILS(zpp_all_reduce(me->comm, data, ELEMS, ZPP_F32, ZPP_SUM, NULL, &err), ZPP_PEER, "comm: rank 0 left");
        CHECK_EQUAL(err.rank, 0);
        CHECK(strstr(err.text, "all_reduce(float32, 1048576 elements, sum) #1"));
    }
    test_join(me);
    free(data);
}

static void a_rank_that_left_takes_part_in_nothing(void) { run_hosts("abcdefgh", left_before_a_collective, NULL); }

/* Ranks leave as soon as they know that calls diverge. Others, which have no link to them yet, are refused, and report
 * both calls all the same. */
static void diverges_and_leaves(struct test_rank *me) {
    enum { ELEMS = 1 << 19 };
    struct zpp_err err = ZPP_ERR_INIT;
    float *data = calloc(ELEMS, sizeof *data);
    const zpp_status status = me->rank == 5 ? zpp_all_gather(me->comm, data, data + 32, 4, NULL, &err)
                                            : zpp_all_reduce(me->comm, data, ELEMS, ZPP_F32, ZPP_SUM, NULL, &err);
    CHECK_EQUAL(status, ZPP_PEER);
    CHECK(strstr(err.text, "all_reduce(float32, 524288 elements, sum) #1"));
    CHECK(strstr(err.text, "all_gather(uint8, 4 elements) #1"));
    free(data);
}

static void a_refused_rank_reports_both_calls(void) {
    for (int turn = 0; turn < 5; turn++) run_hosts("abcdefghijkl", diverges_and_leaves, NULL);
}

/* --- errors are passed on ----------------------------------------------------------------------------------------- */

static void aborts(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    test_join(me); /* all have left the barrier */
    if (me->rank == 3) zpp_comm_abort(me->comm, "enough");
    while (zpp_barrier(me->comm, NULL, &err) == ZPP_OK) continue;
    CHECK_EQUAL(err.rank, 3);
    CHECK(strstr(err.text, "comm: rank 3 aborted group \"test\": enough"));
    test_join(me); /* so that nobody hears of a farewell instead */
}

static void an_error_reaches_all_hosts(void) { run_hosts(many, aborts, NULL); }

/* --- the tree ----------------------------------------------------------------------------------------------------- */

struct absence {
    const struct zpp_store *store;
    zpp_status status[TEST_RANKS_MAX];
    struct zpp_err err[TEST_RANKS_MAX];
    int ranks[TEST_RANKS_MAX]; /* of the group, as each rank has it */
};
struct arrival {
    struct absence *absence;
    int rank;
};

static void *arrives(void *arg) {
    const struct arrival *arrival = arg;
    struct absence *absence = arrival->absence;
    const int rank = arrival->rank;
    const char host[] = {(char)('a' + rank / 2), 0};
    const struct zpp_comm_options options = {
        .rank = rank,
        .ranks = absence->ranks[rank],
        .timeout_ns = TEST_SECOND_NS,
        .name = "test",
        .network = {.host_id = host, .interface = "lo", .full_ranks = TEST_FULL_RANKS}};
    zpp_comm *comm = NULL;
    absence->err[rank] = (struct zpp_err)ZPP_ERR_INIT;
    absence->status[rank] = zpp_comm_create(&options, absence->store, &comm, &absence->err[rank]);
    CHECK(absence->status[rank] != ZPP_OK);
    return NULL;
}

/* Let all ranks but `absent` (or all: -1) of 20 arrive, of which `other` has another idea of their number. */
static void arrive(struct absence *absence, int absent, int other) {
    enum { RANKS = 20 };
    struct store_table table;
    struct arrival arrival[RANKS];
    pthread_t thread[RANKS];
    store_table_init(&table);
    const struct zpp_store store = store_table_of(&table);
    absence->store = &store;
    for (int r = 0; r < RANKS; r++) {
        arrival[r] = (struct arrival){absence, r};
        absence->ranks[r] = r == other ? RANKS + 1 : RANKS;
        if (r != absent) CHECK(pthread_create(&thread[r], NULL, arrives, &arrival[r]) == 0);
    }
    for (int r = 0; r < RANKS; r++)
        if (r != absent) CHECK(pthread_join(thread[r], NULL) == 0);
    store_table_fini(&table);
}

/* Rank 18 reports to rank 1, and rank 1 to rank 0, which tells everybody. */
static void a_missing_rank_is_named_by_all(void) {
    static struct absence absence;
    arrive(&absence, 18, -1);
    for (int r = 0; r < 18; r++) {
        CHECK_EQUAL(absence.err[r].rank, 18);
        CHECK(strstr(absence.err[r].text, "zpp/below/18"));
    }
}

static void a_rank_of_another_group_is_named_by_all(void) {
    static struct absence absence;
    arrive(&absence, -1, 19);
    for (int r = 0; r < 18; r++) {
        CHECK_EQUAL(absence.err[r].rank, 19);
        CHECK(strstr(absence.err[r].text, "comm: rank 19 says that group \"test\" has 21 ranks, but rank 0 says 20"));
    }
}

/* Hosts are numbered by their lowest ranks, whatever their names. */
static void numbers(struct test_rank *me) {
    static const int wanted[] = {0, 1, 0, 2, 1, 3};
    CHECK_EQUAL(zpp_comm_hosts(me->comm), 4);
    for (int r = 0; r < me->ranks; r++) CHECK_EQUAL(zpp_comm_host(me->comm, r), wanted[r]);
    test_join(me);
}

static void hosts_are_numbered_by_their_lowest_ranks(void) { run_hosts("zazcab", numbers, NULL); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(hosts_are_numbered_by_their_lowest_ranks),
                                             TEST(links_grow_with_the_logarithm),
                                             TEST(a_rank_that_left_takes_no_send),
                                             TEST(an_error_after_a_refusal_counts),
                                             TEST(a_rank_that_left_takes_part_in_nothing),
                                             TEST(a_refused_rank_reports_both_calls),
                                             TEST(an_error_reaches_all_hosts),
                                             TEST(a_missing_rank_is_named_by_all),
                                             TEST(a_rank_of_another_group_is_named_by_all),
                                             CASES_OF_BOTH,
                                             {0}};
    return run_cases(argc, argv, cases);
}
