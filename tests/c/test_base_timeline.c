/* SPDX-License-Identifier: Apache-2.0
 *
 * Spans of time: kept while on, from many threads, up to the capacity; nothing while off, nor of what began before.
 */
#include "harness.h"

#include <pthread.h>
#include <sched.h>

#include "../../csrc/base/timeline.h"

static void nothing_while_off(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_EQUAL(zpp_span_begin(), 0);
    zpp_span_end(zpp_span_begin(), ZPP_SPAN_WAIT, "off", 1);
    CHECK_OK(zpp_timeline_start(10, &err));
    struct zpp_span *spans;
    size_t count, dropped;
    const uint64_t began_ns = zpp_span_begin();
    CHECK_OK(zpp_timeline_stop(&spans, &count, &dropped, &err));
    CHECK(began_ns > 0 && count == 0 && dropped == 0);
    free(spans);
    zpp_span_end(began_ns, ZPP_SPAN_WAIT, "too late", 1);
}

static void spans_come_back(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_timeline_start(3, &err));
    CHECK_EQUAL(zpp_timeline_start(3, &err), ZPP_STATE);
    for (int i = 0; i < 5; ++i) {
        const char *const name = i ? "b" : "a name that is longer than forty-eight bytes, so it is cut";
        zpp_span_end(zpp_span_begin(), ZPP_SPAN_GATHER, name, 7);
    }
    struct zpp_span *spans;
    size_t count, dropped;
    CHECK_OK(zpp_timeline_stop(&spans, &count, &dropped, &err));
    CHECK_EQUAL(zpp_timeline_stop(&spans, &count, &dropped, &err), ZPP_STATE);
    CHECK_EQUAL(count, 3);
    CHECK_EQUAL(dropped, 2);
    CHECK_EQUAL(strlen(spans[0].name), ZPP_SPAN_NAME_BYTES - 1);
    CHECK(strncmp(spans[0].name, "a name that", 11) == 0 && strcmp(spans[2].name, "b") == 0);
    for (size_t i = 0; i < count; ++i) {
        CHECK(spans[i].kind == ZPP_SPAN_GATHER && spans[i].bytes == 7 && spans[i].thread > 0);
        CHECK(spans[i].began_ns && spans[i].began_ns <= spans[i].ended_ns);
        CHECK(i == 0 || spans[i].ended_ns >= spans[i - 1].ended_ns);
    }
    free(spans);
}

enum { THREADS = 4, SPANS = 2000 };
static atomic_bool go_on;

static void *busy(void *unused) {
    (void)unused;
    for (int i = 0; i < SPANS || atomic_load(&go_on); ++i)
        zpp_span_end(zpp_span_begin(), ZPP_SPAN_REDUCE, "busy", 1);
    return NULL;
}

static void threads_write_while_it_ends(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    pthread_t threads[THREADS];
    atomic_store(&go_on, true);
    for (int i = 0; i < THREADS; ++i) CHECK_EQUAL(pthread_create(&threads[i], NULL, busy, NULL), 0);
    size_t seen = 0;
    for (int round = 0; round < 20 || seen == 0; ++round) {
        struct zpp_span *spans;
        size_t count, dropped;
        CHECK_OK(zpp_timeline_start(100, &err));
        sched_yield();
        CHECK_OK(zpp_timeline_stop(&spans, &count, &dropped, &err));
        CHECK(count <= 100);
        for (size_t i = 0; i < count; ++i) CHECK(strcmp(spans[i].name, "busy") == 0);
        seen += count;
        free(spans);
    }
    atomic_store(&go_on, false);
    for (int i = 0; i < THREADS; ++i) pthread_join(threads[i], NULL);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(nothing_while_off),
        TEST(spans_come_back),
        TEST(threads_write_while_it_ends),
        {0},
    };
    return test_main(argc, argv, cases);
}
