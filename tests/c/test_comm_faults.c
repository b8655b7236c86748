/* SPDX-License-Identifier: Apache-2.0
 *
 * What goes wrong between ranks: abort, divergence, ranks that leave or come late, a forked child, a process that dies.
 * Every wait must end, with the same sentence on every rank.
 */
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "group_faults.h"

/* --- abort ------------------------------------------------------------------------------------------------------- */

static void abort_reaches_everybody(void) { run_ranks(3, test_abort, NULL); }

/* --- divergence -------------------------------------------------------------------------------------------------- */

struct path {
    const char *says;
    int odd; /* which rank takes the other path */
};

static void diverging(struct test_rank *me) {
    const struct path *path = me->arg;
    struct zpp_err err = ZPP_ERR_INIT;
    float data[64] = {0};
    zpp_status status;
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    if (me->rank == path->odd)
        status = zpp_broadcast(me->comm, data, 64, 0, NULL, &err);
    else
        status = zpp_all_reduce(me->comm, data, 16, ZPP_F32, ZPP_SUM, NULL, &err);
    CHECK_EQUAL(status, ZPP_PEER);
    CHECK(strstr(err.text, path->says));
    CHECK(strstr(err.text, "all_reduce(float32, 16 elements, sum) #2"));
    CHECK(strstr(err.text, "broadcast(uint8, 64 elements, root 0) #2"));
}

static void different_collectives(void) {
    struct path first = {"rank 0 is in broadcast", 0}, last = {"rank 2 is in broadcast", 2};
    run_ranks(3, diverging, &first);
    run_ranks(3, diverging, &last);
}

static void other_length(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    const size_t elems = me->rank == 1 ? 300000 : 2; /* one in staging, one beside the signature */
    float *data = calloc(elems, sizeof *data);
    CHECK_FAILS(zpp_all_reduce(me->comm, data, elems, ZPP_F32, ZPP_SUM, NULL, &err), ZPP_PEER,
                "rank 0 is in all_reduce(float32, 2 elements, sum) #1 but rank 1 is in all_reduce(float32, 300000 "
                "elements, sum)");
    free(data);
}

static void different_lengths(void) { run_ranks(2, other_length, NULL); }

static void different_splits(void) { run_ranks(2, test_other_splits, NULL); }

/* --- leaving and coming late ------------------------------------------------------------------------------------- */

static void one_leaves(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    if (me->rank == 2) return;
    CHECK_FAILS(zpp_barrier(me->comm, NULL, &err), ZPP_PEER, "rank 2 left the group \"test\"");
    CHECK_EQUAL(err.rank, 2);
}

static void a_rank_leaves(void) { run_ranks(4, one_leaves, NULL); }

/* Until the group has ended, which others see to. */
static void await_comm_error(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    while (zpp_comm_health(me->comm, &err) == ZPP_OK) pause_ms(10);
}

static void one_is_late(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm_set_timeout(me->comm, TEST_SECOND_NS); /* not from the beginning: a busy machine needs longer to join */
    test_join(me);
    if (me->rank == 1) await_comm_error(me);
    CHECK_FAILS(zpp_barrier(me->comm, NULL, &err), ZPP_TIMEOUT,
                "rank 1 of group \"test\" did not come to barrier() #1 within");
    CHECK(strstr(err.text, ". Timed out waiting 1")); /* by which torch's tests know it, and its callers */
    CHECK_EQUAL(err.rank, 1);
}

static void a_rank_is_late(void) { run_ranks(3, one_is_late, NULL); }

static void does_not_meet(void) {
    struct store_table table;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *comm = NULL;
    store_table_init(&table);
    const struct zpp_store store = store_table_of(&table);
    const struct zpp_comm_options options = {.rank = 0, .ranks = 2, .timeout_ns = TEST_SECOND_NS / 10, .name = "alone"};
    CHECK_FAILS(zpp_comm_create(&options, &store, &comm, &err), ZPP_TIMEOUT, "nobody set");
    CHECK(comm == NULL);
    const struct zpp_comm_options wrong = {.rank = 2, .ranks = 2, .name = "alone"};
    CHECK_FAILS(zpp_comm_create(&wrong, &store, &comm, &err), ZPP_INVALID, "rank 2 is not in 0..1");
    const struct zpp_comm_options many = {.rank = 0, .ranks = ZPP_RANKS_MAX + 1, .name = "many"};
    CHECK_FAILS(zpp_comm_create(&many, &store, &comm, &err), ZPP_INVALID, "\"many\" has 1025 ranks, wanted 1 to 1024");
    store_table_fini(&table);
}

/* --- ticks ------------------------------------------------------------------------------------------------------- */

static zpp_status tick(void *ctx, struct zpp_err *err) {
    atomic_int *left = ctx;
    if (atomic_fetch_sub(left, 1) > 1) return ZPP_OK;
    return zpp_fail(err, ZPP_INTERRUPTED, "somebody pressed Ctrl-C");
}

static void interrupted(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    atomic_int left = 3;
    const struct zpp_wait wait = {0, tick, &left};
    if (me->rank == 0) {
        CHECK_FAILS(zpp_barrier(me->comm, &wait, &err), ZPP_INTERRUPTED, "Ctrl-C");
        CHECK_FAILS(zpp_barrier(me->comm, &wait, &err), ZPP_ABORTED, "rank 0 was interrupted in barrier() #1");
        return;
    }
    await_comm_error(me);
    CHECK_FAILS(zpp_barrier(me->comm, NULL, &err), ZPP_ABORTED, "rank 0 was interrupted in barrier() #1");
}

static void ticks_end_a_wait(void) { run_ranks(2, interrupted, NULL); }

#ifndef ZPP_UNDER_TSAN
static void told(void *ctx, const char *sentence) {
    (void)sentence;
    atomic_fetch_add((atomic_int *)ctx, 1);
}

#endif

struct second_thread {
    zpp_comm *comm;
    atomic_int *refused;
    zpp_status status;
    struct zpp_err err;
};

static void *also_calls(void *arg) {
    struct second_thread *self = arg;
    self->status = zpp_barrier(self->comm, NULL, &self->err);
    if (self->status != ZPP_OK) atomic_store(self->refused, 1);
    return NULL;
}

/* Two threads of rank 0, one of which is refused; the other waits for rank 1, which comes after that. */
static void two_threads(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    atomic_int *refused = me->arg;
    struct second_thread one = {me->comm, refused, ZPP_OK, ZPP_ERR_INIT}, other = one;
    pthread_t thread;
    if (me->rank == 1) {
        while (!atomic_load(refused)) pause_ms(10);
        CHECK_OK(zpp_barrier(me->comm, NULL, &err));
        return;
    }
    CHECK(pthread_create(&thread, NULL, also_calls, &other) == 0);
    (void)also_calls(&one);
    CHECK(pthread_join(thread, NULL) == 0);
    const struct second_thread *late = one.status == ZPP_OK ? &other : &one;
    CHECK_EQUAL(one.status == ZPP_OK ? one.status : other.status, ZPP_OK);
    CHECK_EQUAL(late->status, ZPP_STATE);
    CHECK(strstr(late->err.text, "from two threads at once"));
}

static void one_thread_at_a_time(void) {
    atomic_int refused;
    atomic_init(&refused, 0);
    run_ranks(2, two_threads, &refused);
}

#ifndef ZPP_UNDER_TSAN
/* --- processes --------------------------------------------------------------------------------------------------- */

/* A child forked by rank 0 cannot disturb the group, whatever it does with it. */
static void forks(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    if (me->rank == 0) {
        const pid_t child = fork();
        if (child == 0) {
            float x = 1.0f;
            const bool refused = zpp_all_reduce(me->comm, &x, 1, ZPP_F32, ZPP_SUM, NULL, &err) == ZPP_STATE;
            zpp_comm_abort(me->comm, "from a child");
            zpp_comm_destroy(me->comm);
            _exit(refused && strstr(err.text, "forked child") ? 0 : 1);
        }
        int ended = -1;
        CHECK(child > 0 && waitpid(child, &ended, 0) == child);
        CHECK_EQUAL(ended, 0);
    }
    for (int k = 0; k < 100; k++) CHECK_OK(zpp_barrier(me->comm, NULL, &err));
}

static void a_forked_child_is_harmless(void) { run_ranks(2, forks, NULL); }

/* A store in memory that forked processes share. */
struct shared_store {
    atomic_int set[8];
    unsigned char value[8][1024];
    size_t bytes[8];
};

static zpp_status shared_set(void *ctx, const char *key, const void *value, size_t bytes, struct zpp_err *err) {
    struct shared_store *store = ctx;
    const int rank = key[strlen(key) - 1] - '0';
    (void)err;
    memcpy(store->value[rank], value, bytes);
    store->bytes[rank] = bytes;
    atomic_store(&store->set[rank], 1);
    return ZPP_OK;
}

static zpp_status shared_get(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns,
                             struct zpp_err *err) {
    struct shared_store *store = ctx;
    const int rank = key[strlen(key) - 1] - '0';
    (void)timeout_ns, (void)err;
    while (!atomic_load(&store->set[rank])) pause_ms(1);
    memcpy(value, store->value[rank], store->bytes[rank]);
    *bytes = store->bytes[rank];
    return ZPP_OK;
}

enum { PROCESSES = 4, VICTIM = 2 };

/* A rank in a process of its own. It runs barriers until one fails, and answers with whether the error is right. */
static int in_process(struct shared_store *shared, int rank) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *comm = NULL;
    atomic_int heard = 0;
    const struct zpp_store store = {shared, shared_set, shared_get};
    const struct zpp_comm_options options = {.rank = rank,
                                             .ranks = PROCESSES,
                                             .timeout_ns = 60 * TEST_SECOND_NS,
                                             .name = "world",
                                             .log = told,
                                             .log_ctx = &heard};
    CHECK_OK(zpp_comm_create(&options, &store, &comm, &err));
    zpp_status status = ZPP_OK;
    while (status == ZPP_OK) status = zpp_barrier(comm, NULL, &err);
    const bool right =
        status == ZPP_PEER && err.rank == VICTIM && strstr(err.text, "rank 2 (process ") && strstr(err.text, "died");
    if (!right) fprintf(stderr, "rank %d: %s\n", rank, err.text);
    zpp_comm_destroy(comm);
    return right ? 0 : 1;
}

static void a_killed_process_is_named(void) {
    struct shared_store *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child[PROCESSES];
    CHECK(shared != MAP_FAILED);
    for (int r = 0; r < PROCESSES; r++) {
        child[r] = fork();
        if (child[r] == 0) _exit(in_process(shared, r));
        CHECK(child[r] > 0);
    }
    pause_ms(500);
    const uint64_t start_ns = zpp_now_ns();
    CHECK(kill(child[VICTIM], SIGKILL) == 0);
    for (int r = 0; r < PROCESSES; r++) {
        int ended = -1;
        CHECK(waitpid(child[r], &ended, 0) == child[r]);
        if (r == VICTIM)
            CHECK(WIFSIGNALED(ended));
        else
            CHECK_EQUAL(ended, 0);
    }
    CHECK(zpp_now_ns() - start_ns < 4 * TEST_SECOND_NS);
    munmap(shared, sizeof *shared);
}

#endif

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(abort_reaches_everybody),
                                             TEST(different_collectives),
                                             TEST(different_lengths),
                                             TEST(different_splits),
                                             TEST(a_rank_leaves),
                                             TEST(a_rank_is_late),
                                             TEST(does_not_meet),
                                             TEST(ticks_end_a_wait),
                                             TEST(one_thread_at_a_time),
#ifndef ZPP_UNDER_TSAN /* which does not follow threads across fork */
                                             TEST(a_forked_child_is_harmless),
                                             TEST(a_killed_process_is_named),
#endif
                                             {0}};
    return test_main(argc, argv, cases);
}
