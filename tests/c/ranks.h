/* SPDX-License-Identifier: Apache-2.0
 *
 * N ranks of one group as threads of this process, for C tests: under ThreadSanitizer they share each mapping
 * (memfd.c), so what the protocol does not order is a report.
 */
#ifndef ZPP_TESTS_RANKS_H
#define ZPP_TESTS_RANKS_H

#include <time.h>

#include "harness.h"
#include "store_table.h"

#ifndef TEST_FULL_RANKS
#define TEST_FULL_RANKS 0 /* the product's default */
#endif
#ifndef TEST_RANKS_MOST
#define TEST_RANKS_MOST 9
#endif
enum { TEST_RANKS_MAX = TEST_RANKS_MOST };
static const uint64_t TEST_SECOND_NS = UINT64_C(1000000000);

static inline void pause_ms(long ms) {
    const struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

struct test_rank {
    int rank, ranks;
    zpp_comm *comm;
    void *arg;
    uint64_t timeout_ns;
    const struct zpp_store *store;
    void (*body)(struct test_rank *me);
    pthread_barrier_t *all; /* see test_join */
    char host[8];           /* "": every rank is on this host; else the name of this rank's, over the loopback */
    int full_ranks;         /* as in zpp_network_options */
};

/* Wait for all ranks. Unlike a barrier of the group this returns on all of them even if one fails right after it: a
 * rank may end the group while others are still inside a collective that it has finished. */
static inline void test_join(struct test_rank *me) { (void)pthread_barrier_wait(me->all); }

static inline void *test_rank_main(void *arg) {
    struct test_rank *me = arg;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_comm_options options = {.rank = me->rank,
                                             .ranks = me->ranks,
                                             .timeout_ns = me->timeout_ns,
                                             .name = "test",
                                             .network = {.host_id = me->host,
                                                         .interface = me->host[0] ? "lo" : "",
                                                         .full_ranks = me->full_ranks}};
    CHECK_OK(zpp_comm_create(&options, me->store, &me->comm, &err));
    me->body(me);
    zpp_comm_destroy(me->comm);
    return NULL;
}

/* Run the body of `like` on every rank, with the rest of its fields. `hosts`: one letter for the host of each rank, or
 * NULL. The communicator is destroyed when a body returns, early or late. */
static inline void run_ranks_like(const struct test_rank *like, const char *hosts) {
    struct test_rank rank[TEST_RANKS_MAX];
    pthread_t thread[TEST_RANKS_MAX];
    pthread_barrier_t all;
    CHECK(pthread_barrier_init(&all, NULL, (unsigned)like->ranks) == 0);
    for (int r = 0; r < like->ranks; r++) {
        rank[r] = *like;
        rank[r].rank = r;
        rank[r].all = &all;
        if (hosts) rank[r].host[0] = hosts[r];
        CHECK(pthread_create(&thread[r], NULL, test_rank_main, &rank[r]) == 0);
    }
    for (int r = 0; r < like->ranks; r++) CHECK(pthread_join(thread[r], NULL) == 0);
    pthread_barrier_destroy(&all);
}

static inline void run_ranks_timeout(int ranks, const char *hosts, uint64_t timeout_ns,
                                     void (*body)(struct test_rank *), void *arg) {
    struct store_table table;
    store_table_init(&table);
    const struct zpp_store store = store_table_of(&table);
    const struct test_rank like = {.ranks = ranks,
                                   .arg = arg,
                                   .timeout_ns = timeout_ns,
                                   .store = &store,
                                   .body = body,
                                   .full_ranks = TEST_FULL_RANKS};
    run_ranks_like(&like, hosts);
    store_table_fini(&table);
}

static inline void run_ranks(int ranks, void (*body)(struct test_rank *), void *arg) {
    run_ranks_timeout(ranks, NULL, 60 * TEST_SECOND_NS, body, arg);
}

/* Ranks on several hosts, which are this one under several names: "aabb" is two hosts with two ranks each. The
 * rendezvous has a minute even where the test is about a short timeout: a busy machine needs it. */
static inline void run_hosts(const char *hosts, void (*body)(struct test_rank *), void *arg) {
    run_ranks_timeout((int)strlen(hosts), hosts, 60 * TEST_SECOND_NS, body, arg);
}

/* --- groups of some ranks ----------------------------------------------------------------------------------------- */

struct part_store {
    const struct zpp_store *whole;
    const char *prefix;
};

static inline zpp_status part_set(void *ctx, const char *key, const void *value, size_t bytes, struct zpp_err *err) {
    const struct part_store *store = ctx;
    char name[64];
    snprintf(name, sizeof name, "%s/%s", store->prefix, key);
    return store->whole->set(store->whole->ctx, name, value, bytes, err);
}

static inline zpp_status part_get(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns,
                           struct zpp_err *err) {
    const struct part_store *store = ctx;
    char name[64];
    snprintf(name, sizeof name, "%s/%s", store->prefix, key);
    return store->whole->get(store->whole->ctx, name, value, bytes, timeout_ns, err);
}

/* A communicator of some ranks, of this name: collective over them. */
static inline zpp_comm *test_part(const struct test_rank *me, const char *name, int rank, int ranks) {
    struct part_store part = {me->store, name};
    const struct zpp_store store = {&part, part_set, part_get};
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *comm = NULL;
    const struct zpp_comm_options options = {.rank = rank,
                                             .ranks = ranks,
                                             .timeout_ns = me->timeout_ns,
                                             .name = name,
                                             .network = {.host_id = me->host, .interface = me->host[0] ? "lo" : ""}};
    CHECK_OK(zpp_comm_create(&options, &store, &comm, &err));
    return comm;
}

#endif
