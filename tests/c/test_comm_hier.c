/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups over several hosts, which are this one under several names: every collective, reductions, send and receive,
 * for equal and unequal hosts, against plain loops; what must fail, with its sentence; strangers at the door.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../csrc/comm/tcp/net.h"
#include "group_faults.h"
#include "strangers.h"

#if TEST_FULL_RANKS == 1 && !defined(ZPP_UNDER_TSAN)
static const char *const placements[] = {"ab", "aabb", "aab", "abcab", "abcde", "aabbccdd"};
#elif defined(ZPP_UNDER_TSAN) /* 20 times slower; the order of events is its subject, not the arithmetic of places */
static const char *const placements[] = {"ab", "aabb", "aab"};
#else
static const char *const placements[] = {"ab", "aabb", "abab", "aab", "abcab", "abc"};
#endif
enum { PLACEMENTS = sizeof placements / sizeof *placements };

/* Small numbers: sums are exact in any order, so hosts change nothing. */
static float value_of(int rank, size_t i) { return (float)((rank * 7 + (int)(i % 97) * 3) % 31 - 11); }

static const size_t lengths[] = {1, 3, 1000, 9001, 200007};

/* Long tensors are compared here and there, and at both ends: a prime step meets every chunk and every descriptor
 * ring. */
static size_t next_of(size_t i, size_t elems) {
    const size_t step = elems > 20000 ? 13 : 1;
    return i + 1 < elems && i + step >= elems ? elems - 1 : i + step;
}

/* --- collectives ------------------------------------------------------------------------------------------------- */

static void fill(float *data, int rank, size_t elems) {
    const size_t period = 97;
    for (size_t i = 0; i < elems && i < period; i++) data[i] = value_of(rank, i);
    for (size_t at = period; at < elems; at += period) /* the same again: a remainder an element would take longest */
        memcpy(data + at, data, (elems - at < period ? elems - at : period) * sizeof *data);
}

static float combined(const struct test_rank *me, zpp_reduce_op op, size_t i) {
    float result = value_of(0, i);
    for (int r = 1; r < me->ranks; r++) {
        const float x = value_of(r, i);
        if (op == ZPP_MAX)
            result = x > result ? x : result;
        else
            result += x;
    }
    return op == ZPP_AVG ? result / (float)me->ranks : result;
}

static bool close_to(float a, float b) {
    const float difference = a > b ? a - b : b - a;
    return difference <= 1e-5f * (1.0f + (b > 0 ? b : -b)); /* AVG of unequal hosts: one rounding more */
}

static void reductions(struct test_rank *me) {
    static const zpp_reduce_op ops[] = {ZPP_SUM, ZPP_AVG, ZPP_MAX};
    struct zpp_err err = ZPP_ERR_INIT;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (size_t o = 0; o < 3; o++) {
            const size_t elems = lengths[l];
            float *data = malloc(elems * sizeof *data), *whole = malloc(elems * (size_t)me->ranks * sizeof *data);
            fill(data, me->rank, elems);
            CHECK_OK(zpp_all_reduce(me->comm, data, elems, ZPP_F32, ops[o], NULL, &err));
            for (size_t i = 0; i < elems; i = next_of(i, elems)) CHECK(close_to(data[i], combined(me, ops[o], i)));
            fill(data, me->rank, elems);
            const int root = (int)(l + o) % me->ranks;
            const struct zpp_call reduce = {.coll = ZPP_COLL_REDUCE, .dtype = ZPP_F32, .op = ops[o], .root = root,
                                            .dst = data, .elems = elems};
            CHECK_OK(zpp_comm_call(me->comm, &reduce, NULL, &err));
            for (size_t i = 0; i < elems; i = next_of(i, elems))
                CHECK(close_to(data[i], me->rank == root ? combined(me, ops[o], i) : value_of(me->rank, i)));
            fill(whole, me->rank, elems * (size_t)me->ranks);
            CHECK_OK(zpp_reduce_scatter(me->comm, data, whole, elems, ZPP_F32, ops[o], NULL, &err));
            for (size_t i = 0; i < elems; i = next_of(i, elems))
                CHECK(close_to(data[i], combined(me, ops[o], (size_t)me->rank * elems + i)));
            free(data);
            free(whole);
        }
}

static void movements(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        const size_t elems = lengths[l];
        float *data = malloc(elems * sizeof *data), *whole = malloc(elems * (size_t)me->ranks * sizeof *data);
        fill(data, me->rank, elems);
        CHECK_OK(zpp_all_gather(me->comm, whole, data, elems * sizeof *data, NULL, &err));
        for (int r = 0; r < me->ranks; r++)
            for (size_t i = 0; i < elems; i = next_of(i, elems)) CHECK(whole[(size_t)r * elems + i] == value_of(r, i));
        for (int root = 0; root < me->ranks; root++) {
            fill(data, me->rank, elems);
            CHECK_OK(zpp_broadcast(me->comm, data, elems * sizeof *data, root, NULL, &err));
            for (size_t i = 0; i < elems; i = next_of(i, elems)) CHECK(data[i] == value_of(root, i));
        }
        free(data);
        free(whole);
        CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    }
}

/* Rank r has (r + 2 p + 1) * unit bytes of value r ^ p for rank p. */
static void exchanges(struct test_rank *me) {
    static const size_t units[] = {1, 5000, 200000};
    struct zpp_err err = ZPP_ERR_INIT;
    for (size_t u = 0; u < 3; u++) {
        void *dsts[TEST_RANKS_MAX];
        const void *srcs[TEST_RANKS_MAX];
        size_t in[TEST_RANKS_MAX], out[TEST_RANKS_MAX];
        for (int p = 0; p < me->ranks; p++) {
            out[p] = (size_t)(me->rank + 2 * p + 1) * units[u];
            in[p] = (size_t)(p + 2 * me->rank + 1) * units[u];
            unsigned char *from = malloc(out[p]);
            memset(from, me->rank * 16 + p, out[p]);
            srcs[p] = from;
            dsts[p] = malloc(in[p]);
        }
        const struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL, .dtype = ZPP_U8, .dsts = dsts, .srcs = srcs,
                                      .dst_bytes = in, .src_bytes = out};
        CHECK_OK(zpp_comm_call(me->comm, &call, NULL, &err));
        for (int p = 0; p < me->ranks; p++) {
            const unsigned char *got = dsts[p];
            for (size_t i = 0; i < in[p]; i++) CHECK_EQUAL(got[i], p * 16 + me->rank);
            free(dsts[p]);
            free((void *)(uintptr_t)srcs[p]);
        }
    }
}

static void on_every_placement(void (*body)(struct test_rank *)) {
    for (size_t p = 0; p < PLACEMENTS; p++) run_hosts(placements[p], body, NULL);
}

static void reductions_over_hosts(void) { on_every_placement(reductions); }
static void movements_over_hosts(void) { on_every_placement(movements); }
static void exchanges_over_hosts(void) { on_every_placement(exchanges); }

/* A tensor larger than one part and striped over the connections, twice the same bits. */
static void large(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    const size_t elems = 9 * 1024 * 1024 + 5; /* 36 MB */
    float *data = malloc(elems * sizeof *data);
    fill(data, me->rank, elems);
    CHECK_OK(zpp_all_reduce(me->comm, data, elems, ZPP_F32, ZPP_SUM, NULL, &err));
    for (size_t i = 0; i < elems; i += 101) CHECK(data[i] == combined(me, ZPP_SUM, i));
    CHECK(data[elems - 1] == combined(me, ZPP_SUM, elems - 1));
    struct zpp_traffic traffic;
    zpp_comm_traffic(me->comm, &traffic);
    /* 2 (H - 1) / H of the tensor, whole lines. */
    CHECK(traffic.network_bytes[ZPP_TRAFFIC_ALL_REDUCE] >= elems * 4 - 4096);
    CHECK(traffic.network_bytes[ZPP_TRAFFIC_ALL_REDUCE] <= elems * 4 + 4096);
    CHECK_EQUAL(traffic.bytes[ZPP_TRAFFIC_ALL_REDUCE], traffic.network_bytes[ZPP_TRAFFIC_ALL_REDUCE]);
    free(data);
}

static void a_large_tensor(void) { run_hosts("ab", large, NULL); }

/* Bytes by link: each rank of two hosts with two ranks. */
static void counts(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_traffic traffic;
    const size_t elems = 100000;
    float *data = calloc(4 * elems, sizeof *data), *part = calloc(elems, sizeof *data);
    CHECK_EQUAL(zpp_comm_hosts(me->comm), 2);
    CHECK_EQUAL(zpp_comm_host(me->comm, 3), 1);
    CHECK_OK(zpp_all_gather(me->comm, data, part, 4 * elems, NULL, &err));
    CHECK_OK(zpp_reduce_scatter(me->comm, part, data, elems, ZPP_F32, ZPP_SUM, NULL, &err));
    CHECK_OK(zpp_all_reduce(me->comm, data, elems, ZPP_F32, ZPP_SUM, NULL, &err));
    zpp_comm_traffic(me->comm, &traffic);
    CHECK_EQUAL(traffic.network_bytes[ZPP_TRAFFIC_ALL_GATHER], 4 * elems);     /* one of the two ranks there */
    CHECK_EQUAL(traffic.bytes[ZPP_TRAFFIC_ALL_GATHER], 3 * 4 * elems);         /* and all of the others */
    CHECK_EQUAL(traffic.network_bytes[ZPP_TRAFFIC_REDUCE_SCATTER], 4 * elems); /* one sum of one slice */
    CHECK(traffic.network_bytes[ZPP_TRAFFIC_ALL_REDUCE] <= 4 * elems / 2 + 256); /* half of the tensor is mine */
    CHECK_EQUAL(traffic.calls[ZPP_TRAFFIC_ALL_REDUCE], 1);
    free(data);
    free(part);
}

static void bytes_by_link(void) { run_hosts("aabb", counts, NULL); }

/* --- send and receive -------------------------------------------------------------------------------------------- */

static void messages(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    const size_t sizes[] = {0, 1, 70, 5000, 3000000};
    for (size_t s = 0; s < 5; s++) {
        const size_t bytes = sizes[s];
        unsigned char *from = malloc(bytes + 1), *to = malloc(bytes + 1);
        zpp_transfer *sends[TEST_RANKS_MAX] = {0};
        memset(from, me->rank + 1, bytes);
        for (int r = 0; r < me->ranks; r++) /* all send first: no send may block */
            if (r != me->rank) CHECK_OK(zpp_comm_send(me->comm, from, bytes, r, 5, &sends[r], &err));
        for (int k = 1; k < me->ranks; k++) {
            zpp_transfer *transfer = NULL;
            const int source = s % 2 ? ZPP_NO_RANK : (me->rank + k) % me->ranks;
            CHECK_OK(zpp_comm_recv(me->comm, to, bytes, source, 5, &transfer, &err));
            CHECK_OK(zpp_transfer_wait(transfer, NULL, &err));
            const int peer = zpp_transfer_peer(transfer);
            CHECK(source == ZPP_NO_RANK || peer == source);
            for (size_t i = 0; i < bytes; i++) CHECK_EQUAL(to[i], peer + 1);
            zpp_transfer_free(transfer);
        }
        for (int r = 0; r < me->ranks; r++) {
            if (!sends[r]) continue;
            CHECK_OK(zpp_transfer_wait(sends[r], NULL, &err));
            zpp_transfer_free(sends[r]);
        }
        CHECK_OK(zpp_barrier(me->comm, NULL, &err));
        free(from);
        free(to);
    }
}

static void messages_over_hosts(void) {
    run_hosts("ab", messages, NULL);
    run_hosts("aab", messages, NULL);
}

/* --- asynchronous, and what does not work over hosts ------------------------------------------------------------- */

static void limits(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_region *region = NULL;
    zpp_desc_ring *ring = NULL;
    float data[1000];
    zpp_work *work[20];
    for (int i = 0; i < 20; i++) {
        const struct zpp_call call = {.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_F32, .dst = data + 50 * i, .elems = 50};
        fill(data + 50 * i, me->rank, 50);
        CHECK_OK(zpp_comm_submit(me->comm, &call, NULL, NULL, &work[i], &err));
    }
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    for (int i = 0; i < 20; i++) {
        CHECK(zpp_work_finished(work[i]));
        zpp_work_free(work[i]);
        CHECK(data[50 * i + 7] == combined(me, ZPP_SUM, 7));
    }
    CHECK_FAILS(zpp_region_create(me->comm, ZPP_REGION_ONE, 100, &region, &err), ZPP_NOT_BUILT, "which are on 2 hosts");
    CHECK_FAILS(zpp_desc_ring_create(me->comm, "lane", &ring, &err), ZPP_NOT_BUILT, "whose ranks are on 2 hosts");
    CHECK_OK(zpp_region_create(me->comm, ZPP_REGION_PER_RANK, 100, &region, &err));
    CHECK(zpp_region_base(region, me->rank) != NULL);
    CHECK(zpp_region_base(region, 1 - me->rank) == NULL);
    zpp_region_destroy(region);
    zpp_block *block = NULL;
    CHECK_OK(zpp_comm_alloc(me->comm, 1 << 20, &block, &err));
    memset(zpp_block_data(block), 0, 1 << 20);
    CHECK_OK(zpp_all_reduce(me->comm, zpp_block_data(block), 1 << 18, ZPP_F32, ZPP_SUM, NULL, &err));
    zpp_block_free(block);
}

static void limits_and_queues(void) { run_hosts("ab", limits, NULL); }

/* --- what goes wrong --------------------------------------------------------------------------------------------- */

static void abort_reaches_all_hosts(void) { run_hosts("abab", test_abort, NULL); }

static void leaves(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    test_join(me);
    if (me->rank == me->ranks - 1) return;
    const uint64_t start_ns = zpp_now_ns();
    CHECK_FAILS(zpp_barrier(me->comm, NULL, &err), ZPP_PEER, "left the group \"test\"");
    CHECK_EQUAL(err.rank, me->ranks - 1);
    CHECK(zpp_now_ns() - start_ns < 5 * TEST_SECOND_NS);
}

static void a_rank_leaves(void) {
    run_hosts("abab", leaves, NULL); /* not the lowest of its host */
    run_hosts("aab", leaves, NULL);
}

/* A wait inside a host lasts for the timeout, a wait for another host a second longer. So the failed rank is named,
 * whichever rank reports it. */
static void late(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    const int failed_rank = me->ranks - 1;
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    zpp_comm_set_timeout(me->comm, TEST_SECOND_NS / 2);
    test_join(me);
    while (me->rank == failed_rank && zpp_comm_health(me->comm, &err) == ZPP_OK) pause_ms(10);
    CHECK_FAILS(zpp_barrier(me->comm, NULL, &err), ZPP_TIMEOUT, "did not come to barrier() #2 within");
    CHECK_EQUAL(err.rank, failed_rank);
}

static void a_rank_is_late(void) {
    run_hosts("ab", late, NULL);
    run_hosts("abab", late, NULL);
}

static void diverges(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    const int odd = *(const int *)me->arg;
    float data[64] = {0};
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    test_join(me);
    zpp_status status = me->rank == odd ? zpp_all_gather(me->comm, data, data + 32, 4, NULL, &err)
                                        : zpp_all_reduce(me->comm, data, 16, ZPP_F32, ZPP_SUM, NULL, &err);
    CHECK_EQUAL(status, ZPP_PEER);
    CHECK(strstr(err.text, "all_reduce(float32, 16 elements, sum) #2"));
    CHECK(strstr(err.text, "all_gather(uint8, 4 elements) #2"));
}

static void different_collectives(void) {
    int odd = 1;
    run_hosts("ab", diverges, &odd);
    run_hosts("aabb", diverges, &odd);
    odd = 2;
    run_hosts("aabb", diverges, &odd);
}

static void objects(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    float to[8], from[4] = {0};
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_GATHER, .dtype = ZPP_F32, .dst = to, .src = from, .elems = 4,
                                  .object = 3 + (uint32_t)me->rank};
    CHECK_FAILS(zpp_comm_call(me->comm, &call, NULL, &err), ZPP_PEER,
                "rank 0 is in all_gather(float32, 4 elements, object 3) #1 but rank 1 is in all_gather(float32, 4 "
                "elements, object 4) #1");
}

static void different_objects(void) {
    run_hosts("ab", objects, NULL);
    run_hosts("aa", objects, NULL);
}

static void different_splits(void) { run_hosts("ab", test_other_splits, NULL); }

#ifndef TEST_SPARSE
/* --- strangers --------------------------------------------------------------------------------------------------- */

enum { STRANGERS = 3 };

static void *be_strangers(void *arg) {
    struct watched_store *watched = arg;
    struct zpp_err err = ZPP_ERR_INIT;
    uint8_t endpoint[256], junk[40] = {0};
    size_t bytes = sizeof endpoint;
    CHECK_OK(store_table_get(&watched->table, "zpp/address/0", endpoint, &bytes, 60 * TEST_SECOND_NS, &err));
    struct sockaddr_in there = {.sin_family = AF_INET};
    uint16_t port;
    memcpy(&there.sin_addr, endpoint + 16, 4);
    memcpy(&port, endpoint + 32, 2);
    there.sin_port = htons(port);
    for (int k = 0; k < STRANGERS; k++) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        uint8_t answer[256];
        CHECK(connect(fd, (const struct sockaddr *)&there, sizeof there) == 0);
        const uint32_t magic = 0x5a505441;
        const uint16_t rank_and_slot[2] = {1, 0};
        memcpy(junk, &magic, 4);
        memcpy(junk + 4, rank_and_slot, 4); /* as rank 1 would begin, with a wrong proof */
        if (k) CHECK(send(fd, junk, k == 1 ? sizeof junk : sizeof junk - 8, MSG_NOSIGNAL) > 0);
        if (k != 1) shutdown(fd, SHUT_WR);
        size_t got = 0;
        for (ssize_t more; (more = recv(fd, answer, sizeof answer, 0)) > 0;) got += (size_t)more;
        CHECK(got <= 24); /* the challenge and nothing else */
        atomic_fetch_add(&watched->refused, 1);
        close(fd);
    }
    return NULL;
}

static void strangers_are_turned_away(void) { run_with_strangers("zpp/address/0", STRANGERS, "ab", be_strangers); }
#endif

/* The test vectors of the SipHash paper, appendix A. */
static void siphash(void) {
    uint8_t key[16], data[15];
    for (int i = 0; i < 16; i++) key[i] = (uint8_t)i;
    for (int i = 0; i < 15; i++) data[i] = (uint8_t)i;
    CHECK(zpp_net_mac(key, data, 15) == UINT64_C(0xa129ca6149be45e5));
    CHECK(zpp_net_mac(key, data, 0) == UINT64_C(0x726fdb47dd0e0e31));
    CHECK(zpp_net_same_mac(7, 7));
    CHECK(!zpp_net_same_mac(7, 7 ^ UINT64_C(1) << 63));
}

static void interfaces(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_net_address address;
    char words[80];
    struct zpp_network_options options = {.interface = "none-such"};
    CHECK_FAILS(zpp_net_choose(&options, &address, &err), ZPP_INVALID, "interface \"none-such\"");
    CHECK(strstr(err.text, "lo"));
    options = (struct zpp_network_options){.interface = "lo"};
    CHECK_OK(zpp_net_choose(&options, &address, &err));
    zpp_net_describe(&address.address, words, sizeof words);
    CHECK(strcmp(words, "127.0.0.1:0") == 0);
    options = (struct zpp_network_options){.toward = "127.0.0.1"};
    CHECK_OK(zpp_net_choose(&options, &address, &err));
    zpp_net_describe(&address.address, words, sizeof words);
    CHECK(strcmp(words, "127.0.0.1:0") == 0);
    options.family = 5;
    CHECK_FAILS(zpp_net_choose(&options, &address, &err), ZPP_INVALID, "wanted 4 or 6");
    const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&here, sizeof here) == 0);
    zpp_net_interface_of(fd, words, sizeof words);
    CHECK(strcmp(words, "lo") == 0);
    CHECK(zpp_net_has_link(fd, "lo") && !zpp_net_has_link(fd, "none-such"));
    close(fd);
}

/* Hosts of this machine talk over its loopback interface, which a sandbox may have left down. */
static bool has_loopback(void) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof here;
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool works = listener >= 0 && caller >= 0 && bind(listener, (struct sockaddr *)&here, length) == 0 &&
                       listen(listener, 1) == 0 && getsockname(listener, (struct sockaddr *)&here, &length) == 0 &&
                       connect(caller, (struct sockaddr *)&here, length) == 0;
    if (listener >= 0) close(listener);
    if (caller >= 0) close(caller);
    return works;
}

/* The cases that groups with all links and sparse groups share. */
#define CASES_OF_BOTH                                                                                  \
    TEST(siphash), TEST(interfaces), TEST(reductions_over_hosts), TEST(movements_over_hosts),          \
    TEST(exchanges_over_hosts), TEST(a_large_tensor), TEST(bytes_by_link), TEST(messages_over_hosts),  \
    TEST(limits_and_queues), TEST(abort_reaches_all_hosts), TEST(a_rank_leaves), TEST(a_rank_is_late), \
    TEST(different_collectives), TEST(different_objects), TEST(different_splits)

/* Run the cases; where hosts cannot talk, siphash alone. */
static int run_cases(int argc, char **argv, const struct test_case *cases) {
    static const struct test_case alone[] = {TEST(siphash), {0}};
    if (has_loopback()) return test_main(argc, argv, cases);
    printf("skipped all but siphash: 127.0.0.1 cannot be connected to (ip link set lo up)\n");
    return test_main(argc, argv, alone);
}

#ifndef TEST_SPARSE /* test_comm_sparse.c runs these but the last */
int main(int argc, char **argv) {
    static const struct test_case cases[] = {CASES_OF_BOTH, TEST(strangers_are_turned_away), {0}};
    return run_cases(argc, argv, cases);
}
#endif
