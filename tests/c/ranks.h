/* SPDX-License-Identifier: Apache-2.0
 *
 * N ranks of one group as threads of this process, for C tests: under ThreadSanitizer they share each mapping
 * (memfd.c), so what the protocol does not order is a report.
 */
#ifndef ZPP_TESTS_RANKS_H
#define ZPP_TESTS_RANKS_H

#include "harness.h"
#include "store_table.h"

enum { TEST_RANKS_MAX = 9 };

struct test_rank {
    int rank, ranks;
    zpp_comm *comm;
    void *arg;
    uint64_t timeout_ns;
    const struct zpp_store *store;
    void (*body)(struct test_rank *me);
    pthread_barrier_t *all; /* see test_join */
};

/* All ranks are here. Unlike a barrier of the group's it ends for all of them even if one goes on to fail at once: who
 * is ahead may end the group while others are still inside a collective that it has finished. */
static inline void test_join(struct test_rank *me) { (void)pthread_barrier_wait(me->all); }

static inline void *test_rank_main(void *arg) {
    struct test_rank *me = arg;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_comm_options options = {
        .rank = me->rank, .ranks = me->ranks, .timeout_ns = me->timeout_ns, .name = "test"};
    CHECK_OK(zpp_comm_create(&options, me->store, &me->comm, &err));
    me->body(me);
    zpp_comm_destroy(me->comm);
    return NULL;
}

/* Run `body` on every rank. The communicator is destroyed when a body returns, early or late. */
static inline void run_ranks_timeout(int ranks, uint64_t timeout_ns, void (*body)(struct test_rank *), void *arg) {
    struct store_table table;
    struct test_rank rank[TEST_RANKS_MAX];
    pthread_t thread[TEST_RANKS_MAX];
    pthread_barrier_t all;
    store_table_init(&table);
    CHECK(pthread_barrier_init(&all, NULL, (unsigned)ranks) == 0);
    const struct zpp_store store = store_table_of(&table);
    for (int r = 0; r < ranks; r++) {
        rank[r] = (struct test_rank){r, ranks, NULL, arg, timeout_ns, &store, body, &all};
        CHECK(pthread_create(&thread[r], NULL, test_rank_main, &rank[r]) == 0);
    }
    for (int r = 0; r < ranks; r++) CHECK(pthread_join(thread[r], NULL) == 0);
    pthread_barrier_destroy(&all);
    store_table_fini(&table);
}

static inline void run_ranks(int ranks, void (*body)(struct test_rank *), void *arg) {
    run_ranks_timeout(ranks, UINT64_C(60000000000), body, arg);
}

#endif
