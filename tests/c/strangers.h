/* SPDX-License-Identifier: Apache-2.0
 *
 * Two ranks and a thread of strangers, which connect to rank 0 while it listens. The store withholds rank 0's address
 * from rank 1 until the strangers have been refused: rank 0 listens until rank 1 has joined.
 */
#ifndef ZPP_TESTS_STRANGERS_H
#define ZPP_TESTS_STRANGERS_H

#include <stdatomic.h>

#include "ranks.h"

struct watched_store {
    struct store_table table;
    const char *key; /* of rank 0's address */
    int strangers;
    atomic_int refused;
};

static inline zpp_status get_after_strangers(void *ctx, const char *key, void *value, size_t *bytes,
                                             uint64_t timeout_ns, struct zpp_err *err) {
    struct watched_store *watched = ctx;
    while (strcmp(key, watched->key) == 0 && atomic_load(&watched->refused) < watched->strangers) pause_ms(5);
    return store_table_get(&watched->table, key, value, bytes, timeout_ns, err);
}

static inline zpp_status set_watched(void *ctx, const char *key, const void *value, size_t bytes,
                                     struct zpp_err *err) {
    struct watched_store *watched = ctx;
    return store_table_set(&watched->table, key, value, bytes, err);
}

static inline void test_barrier(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
}

/* `be_strangers`: a thread that gets the watched store, and adds one to `refused` for each of `strangers`. */
static inline void run_with_strangers(const char *key, int strangers, const char *hosts,
                                      void *(*be_strangers)(void *watched)) {
    struct watched_store watched = {.key = key, .strangers = strangers};
    pthread_t thread;
    store_table_init(&watched.table);
    atomic_init(&watched.refused, 0);
    const struct zpp_store store = {&watched, set_watched, get_after_strangers};
    const struct test_rank like = {
        .ranks = 2, .timeout_ns = 60 * TEST_SECOND_NS, .store = &store, .body = test_barrier};
    CHECK(pthread_create(&thread, NULL, be_strangers, &watched) == 0);
    run_ranks_like(&like, hosts);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQUAL(atomic_load(&watched.refused), strangers);
    store_table_fini(&watched.table);
}

#endif
