/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups that end together. Four ranks meet as pairs, in rows {0, 1} and {2, 3} and in columns {0, 2} and {1, 3}. All
 * meet in one group as well. Each waits in a pair, and rank 3 ends one in which nobody waits.
 */
#include "ranks.h"

enum { ROW, COLUMN, PAIRS };

static zpp_comm *make_pair(const struct test_rank *me, int which) {
    static const int members[PAIRS][2][2] = {{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}};
    static const char *const names[PAIRS][2] = {{"first row", "second row"}, {"first column", "second column"}};
    const int at = which == ROW ? me->rank / 2 : me->rank % 2, place = which == ROW ? me->rank % 2 : me->rank / 2;
    zpp_comm *comm = test_part(me, names[which][at], place, 2);
    zpp_comm_set_job_ranks(comm, members[which][at]);
    return comm;
}

/* Rank 3 ends its row; rank 2 waits for rank 0, which waits for rank 1, which waits for rank 3. */
static void one_ends_a_pair(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *pair[PAIRS] = {make_pair(me, ROW), make_pair(me, COLUMN)};
    for (int which = 0; which < PAIRS; which++) CHECK_OK(zpp_comm_link(pair[which], me->comm, &err));
    test_join(me);
    if (me->rank == 3) {
        pause_ms(50);
        zpp_comm_abort(pair[ROW], "it lost its disk");
    } else {
        const uint64_t start_ns = zpp_now_ns();
        CHECK_FAILS(zpp_barrier(pair[me->rank ? COLUMN : ROW], NULL, &err), ZPP_ABORTED,
                    "rank 3 aborted group \"second row\": it lost its disk");
        CHECK_EQUAL(err.rank, 3);
        CHECK(zpp_now_ns() - start_ns < 5 * TEST_SECOND_NS);
    }
    for (int which = 0; which < PAIRS; which++) zpp_comm_destroy(pair[which]);
    CHECK_FAILS(zpp_comm_health(me->comm, &err), ZPP_ABORTED, "it lost its disk");
    CHECK_EQUAL(err.rank, 3);
}

static void an_error_reaches_linked_groups(void) { run_ranks(4, one_ends_a_pair, NULL); }

static void an_error_reaches_linked_groups_over_hosts(void) {
    run_hosts("aabb", one_ends_a_pair, NULL);
    run_hosts("abab", one_ends_a_pair, NULL);
}

/* A group that was not linked does not end with the others. */
static void one_is_apart(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *pair[PAIRS] = {make_pair(me, ROW), make_pair(me, COLUMN)};
    CHECK_OK(zpp_comm_link(pair[ROW], me->comm, &err));
    test_join(me);
    if (me->rank == 3) zpp_comm_abort(pair[ROW], "it lost its disk");
    CHECK_FAILS(zpp_barrier(me->comm, NULL, &err), ZPP_ABORTED, "it lost its disk");
    CHECK_OK(zpp_barrier(pair[COLUMN], NULL, &err));
    for (int which = 0; which < PAIRS; which++) zpp_comm_destroy(pair[which]);
}

static void other_groups_go_on(void) { run_ranks(4, one_is_apart, NULL); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(an_error_reaches_linked_groups),
                                             TEST(an_error_reaches_linked_groups_over_hosts),
                                             TEST(other_groups_go_on),
                                             {0}};
    return test_main(argc, argv, cases);
}
