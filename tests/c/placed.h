/* SPDX-License-Identifier: Apache-2.0
 *
 * N ranks of one group as threads of this process, on several hosts: this one under several names, over the loopback
 * interface.
 */
#ifndef ZPP_TESTS_PLACED_H
#define ZPP_TESTS_PLACED_H

#include "ranks.h"

/* Hosts of the ranks, one control message each: "aabb" is two hosts with two ranks each. */
struct placed_rank {
    struct test_rank rank;
    char host[2];
    const char *hosts;
};

static inline void *placed_main(void *arg) {
    struct placed_rank *placed = arg;
    struct test_rank *me = &placed->rank;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_comm_options options = {.rank = me->rank,
                                             .ranks = me->ranks,
                                             .timeout_ns = me->timeout_ns,
                                             .name = "test",
                                             .network = {.host_id = placed->host, .interface = "lo"}};
    CHECK_OK(zpp_comm_create(&options, me->store, &me->comm, &err));
    me->body(me);
    zpp_comm_destroy(me->comm);
    return NULL;
}

static const uint64_t PLACED_SECOND_NS = UINT64_C(1000000000);

/* Joining has a minute even where the test is about a short time-out: a busy machine needs it. */
static inline void run_hosts(const char *hosts, void (*body)(struct test_rank *), void *arg) {
    struct store_table table;
    struct placed_rank rank[TEST_RANKS_MAX];
    pthread_t thread[TEST_RANKS_MAX];
    pthread_barrier_t all;
    const int ranks = (int)strlen(hosts);
    store_table_init(&table);
    CHECK(pthread_barrier_init(&all, NULL, (unsigned)ranks) == 0);
    const struct zpp_store store = store_table_of(&table);
    for (int r = 0; r < ranks; r++) {
        rank[r].rank = (struct test_rank){r, ranks, NULL, arg, 60 * PLACED_SECOND_NS, &store, body, &all};
        rank[r].host[0] = hosts[r], rank[r].host[1] = 0;
        rank[r].hosts = hosts;
        CHECK(pthread_create(&thread[r], NULL, placed_main, &rank[r]) == 0);
    }
    for (int r = 0; r < ranks; r++) CHECK(pthread_join(thread[r], NULL) == 0);
    pthread_barrier_destroy(&all);
    store_table_fini(&table);
}

#endif
