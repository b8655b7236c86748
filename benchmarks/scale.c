/* SPDX-License-Identifier: Apache-2.0
 *
 * What grows with the ranks of a group: scale RANKS HOSTS. The ranks are threads of this process over the product's own
 * rendezvous, sockets and control memory; the store is a table that counts. Several hosts talk over the loopback.
 * Prints one line: counts and bytes of the store, descriptors, kB of memory, microseconds of the start and a barrier,
 * bytes that a rank receives in an all-reduce of 8 bytes, and milliseconds until all have heard of a rank that left.
 */
#include <dirent.h>
#include <stdatomic.h>

#include "../tests/c/ranks.h"

enum { RANKS_MOST = 64, BARRIERS = 20 };

static atomic_ulong sets, gets, bytes_read;

static zpp_status counted_set(void *ctx, const char *key, const void *value, size_t bytes, struct zpp_err *err) {
    atomic_fetch_add(&sets, 1);
    return store_table_set(ctx, key, value, bytes, err);
}

static zpp_status counted_get(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns,
                              struct zpp_err *err) {
    const zpp_status status = store_table_get(ctx, key, value, bytes, timeout_ns, err);
    atomic_fetch_add(&gets, 1);
    atomic_fetch_add(&bytes_read, *bytes);
    return status;
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int descriptors(void) {
    DIR *const folder = opendir("/proc/self/fd");
    int found = 0;
    while (folder && readdir(folder)) found++;
    if (folder) closedir(folder);
    return found;
}

static long memory_kb(void) {
    FILE *const file = fopen("/proc/self/statm", "r");
    long whole = 0, resident = 0;
    if (file) {
        if (fscanf(file, "%ld %ld", &whole, &resident) != 2) resident = 0;
        fclose(file);
    }
    return resident * 4;
}

struct measured {
    double start_us, ready_us, barrier_us, left_us;
    int descriptors;
    long memory_kb;
    uint64_t bytes;
    _Atomic uint64_t heard_us; /* of the last rank to hear */
    double began_us;
};

static void measure(struct test_rank *me) {
    struct measured *found = me->arg;
    struct zpp_err err = ZPP_ERR_INIT;
    test_join(me);
    if (me->rank == 0) {
        found->ready_us = now_us() - found->start_us;
        found->descriptors = descriptors();
        found->memory_kb = memory_kb();
    }
    test_join(me);
    const double start_us = now_us();
    for (int i = 0; i < BARRIERS; i++) CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    if (me->rank == 0) found->barrier_us = (now_us() - start_us) / BARRIERS;
    struct zpp_traffic before, after;
    zpp_comm_traffic(me->comm, &before);
    double value = 1;
    CHECK_OK(zpp_all_reduce(me->comm, &value, 1, ZPP_F64, ZPP_SUM, NULL, &err));
    zpp_comm_traffic(me->comm, &after);
    if (me->rank == 0) found->bytes = after.bytes[ZPP_TRAFFIC_ALL_REDUCE] - before.bytes[ZPP_TRAFFIC_ALL_REDUCE];
    test_join(me);
    if (me->rank == me->ranks - 1) {
        found->left_us = now_us();
        zpp_comm_leave(me->comm);
        return;
    }
    while (zpp_barrier(me->comm, NULL, &err) == ZPP_OK) continue;
    const uint64_t heard = (uint64_t)now_us();
    uint64_t last = atomic_load(&found->heard_us);
    while (heard > last && !atomic_compare_exchange_weak(&found->heard_us, &last, heard)) continue;
}

int main(int argc, char **argv) {
    const int ranks = argc > 1 ? atoi(argv[1]) : 4, hosts = argc > 2 ? atoi(argv[2]) : 1;
    if (ranks < 2 || ranks > RANKS_MOST || hosts < 1 || ranks % hosts) {
        fprintf(stderr, "scale: %d ranks on %d hosts; wanted 2 to %d, as many on each\n", ranks, hosts, RANKS_MOST);
        return 2;
    }
    static struct test_rank rank[RANKS_MOST];
    static struct measured found;
    pthread_t thread[RANKS_MOST];
    pthread_barrier_t all;
    struct store_table table;
    store_table_init(&table);
    const struct zpp_store store = {&table, counted_set, counted_get};
    pthread_barrier_init(&all, NULL, (unsigned)ranks);
    const int files_before = descriptors();
    const long memory_before = memory_kb();
    found.start_us = now_us();
    for (int r = 0; r < ranks; r++) {
        rank[r] = (struct test_rank){.rank = r,
                                     .ranks = ranks,
                                     .arg = &found,
                                     .timeout_ns = 60 * TEST_SECOND_NS,
                                     .store = &store,
                                     .body = measure,
                                     .all = &all};
        if (hosts > 1) rank[r].host[0] = (char)('!' + r / (ranks / hosts));
        CHECK(pthread_create(&thread[r], NULL, test_rank_main, &rank[r]) == 0);
    }
    for (int r = 0; r < ranks; r++) pthread_join(thread[r], NULL);
    printf(
        "{\"ranks\": %d, \"hosts\": %d, \"store_sets\": %lu, \"store_gets\": %lu, \"store_bytes\": %lu, "
        "\"descriptors\": %d, \"memory_kb\": %ld, \"start_us\": %.0f, \"barrier_us\": %.1f, "
        "\"all_reduce_bytes\": %lu, \"heard_ms\": %.2f}\n",
        ranks, hosts, atomic_load(&sets), atomic_load(&gets), atomic_load(&bytes_read),
        found.descriptors - files_before, found.memory_kb - memory_before, found.ready_us, found.barrier_us,
        (unsigned long)found.bytes, ((double)atomic_load(&found.heard_us) - found.left_us) / 1e3);
    store_table_fini(&table);
    return 0;
}
