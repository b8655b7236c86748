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
                                             TEST(an_error_reaches_all_hosts),
                                             TEST(a_missing_rank_is_named_by_all),
                                             TEST(a_rank_of_another_group_is_named_by_all),
                                             CASES_OF_BOTH,
                                             {0}};
    return run_cases(argc, argv, cases);
}
