/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread pool: every item once, grains kept, nesting, several callers, fork, short runs in a row.
 */
#include "harness.h"
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../csrc/base/pool.h"

enum { ITEMS = 100003 };

struct job {
    unsigned char *seen;
    size_t grain, items;
    _Atomic size_t pieces, bad;
};

static void mark(size_t begin, size_t end, void *arg) {
    struct job *job = arg;
    if (begin >= end || begin % job->grain || (end % job->grain && end != job->items)) atomic_fetch_add(&job->bad, 1);
    for (size_t i = begin; i < end; ++i) job->seen[i] += 1;
    atomic_fetch_add(&job->pieces, 1);
}

static void run_once(zpp_pool *pool, size_t items, size_t grain) {
    struct job job = {.seen = calloc(items ? items : 1, 1), .grain = grain, .items = items};
    zpp_pool_run(pool, items, grain, mark, &job);
    CHECK_EQUAL(job.bad, 0);
    for (size_t i = 0; i < items; ++i) CHECK_EQUAL(job.seen[i], 1);
    CHECK(items == 0 ? job.pieces == 0 : job.pieces >= 1);
    free(job.seen);
}

static void covers_every_item_once(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (int threads = 1; threads <= 5; ++threads) {
        zpp_pool *pool;
        CHECK_OK(zpp_pool_create(in_new_threads, threads, &pool, &err));
        CHECK_EQUAL(zpp_pool_threads(pool), threads);
        for (size_t items = 0; items < 70; ++items) run_once(pool, items, 1 + items % 9);
        run_once(pool, ITEMS, 64);
        run_once(pool, ITEMS, ITEMS * 2);
        zpp_pool_destroy(pool);
    }
    run_once(NULL, 1000, 16);
    CHECK_EQUAL(zpp_pool_threads(NULL), 1);
    zpp_pool_destroy(NULL);
}

static void add_one(size_t begin, size_t end, void *arg) {
    long *numbers = arg;
    for (size_t i = begin; i < end; ++i) numbers[i] += 1; /* plain memory: the pool must order runs */
}

static void thousands_of_short_runs(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool;
    enum { RUNS = 2000, SHORT = 64 };
    static long numbers[SHORT];
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (int run = 0; run < RUNS; ++run) zpp_pool_run(pool, SHORT, 1, add_one, numbers);
    for (int i = 0; i < SHORT; ++i) CHECK_EQUAL(numbers[i], RUNS);
    zpp_pool_destroy(pool);
}

struct nested {
    zpp_pool *pool;
    _Atomic long total;
};
static void inner(size_t begin, size_t end, void *arg) {
    atomic_fetch_add(&((struct nested *)arg)->total, (long)(end - begin));
}
static void outer(size_t begin, size_t end, void *arg) {
    for (size_t i = begin; i < end; ++i) zpp_pool_run(((struct nested *)arg)->pool, 100, 1, inner, arg);
}

static void nested_runs_stay_in_their_thread(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct nested nested = {0};
    CHECK_OK(zpp_pool_create(in_new_threads, 4, &nested.pool, &err));
    zpp_pool_run(nested.pool, 50, 1, outer, &nested);
    CHECK_EQUAL(nested.total, 5000);
    zpp_pool_destroy(nested.pool);
}

static void *caller(void *arg) {
    for (int run = 0; run < 300; ++run) run_once(arg, 500, 8);
    return NULL;
}

static void callers_take_turns(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool;
    pthread_t threads[3];
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (int i = 0; i < 3; ++i) pthread_create(&threads[i], NULL, caller, pool);
    for (int i = 0; i < 3; ++i) pthread_join(threads[i], NULL);
    zpp_pool_destroy(pool);
}

/* What a pool of threads does inside of a parallel region: fewer threads than asked for. */
static void in_this_thread(int threads, void (*each)(void *arg), void *arg) {
    (void)threads;
    each(arg);
}

static void fewer_threads_than_asked_for(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (int threads = 1; threads <= 4; ++threads) {
        zpp_pool *pool;
        CHECK_OK(zpp_pool_create(in_this_thread, threads, &pool, &err));
        for (size_t items = 0; items < 40; ++items) run_once(pool, items, 1 + items % 9);
        run_once(pool, ITEMS, 64);
        zpp_pool_destroy(pool);
    }
}

static void child_runs_alone(void) {
#ifdef ZPP_UNDER_TSAN
    printf("skipped, TSan has no fork from threads: ");
#else
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    run_once(pool, 1000, 8);
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        run_once(pool, 1000, 8);
        zpp_pool_destroy(pool);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    run_once(pool, 1000, 8);
    zpp_pool_destroy(pool);
#endif
}

static void refuses_bad_counts(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool = NULL;
    CHECK_FAILS(zpp_pool_create(in_new_threads, 0, &pool, &err), ZPP_INVALID, "threads is 0, wanted 1 to");
    CHECK_FAILS(zpp_pool_create(in_new_threads, -3, &pool, &err), ZPP_INVALID, "threads is -3");
    CHECK(pool == NULL);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(covers_every_item_once), TEST(thousands_of_short_runs), TEST(nested_runs_stay_in_their_thread),
        TEST(callers_take_turns),     TEST(child_runs_alone),        TEST(fewer_threads_than_asked_for),
        TEST(refuses_bad_counts),     {0},
    };
    return test_main(argc, argv, cases);
}
