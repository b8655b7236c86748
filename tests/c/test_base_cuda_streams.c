/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams of the device cuda over the simulated GPU: host queues, counters, fills, and a change of torch's stream, in
 * every schedule of lazy and eager streams.
 */
#include "sim_gpu.h"

#include "../../csrc/base/device_cuda.h"

enum { SCHEDULES = 16 };
static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};

static zpp_device *new_device(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device;
    CHECK_OK(zpp_device_cuda_create(0, &device, &err));
    CHECK_EQUAL(zpp_device_kind(device), ZPP_DEVICE_CUDA);
    return device;
}

static void end_device(zpp_device *device) {
    zpp_device_destroy(device);
    const struct sim_counts counts = sim_gpu_counts();
    CHECK(counts.contexts == 0 && counts.blocks == 0 && counts.streams == 0 && counts.events == 0);
    CHECK_EQUAL(SIM(sim_contexts_pushed)(), 0);
}

/* Ready once `*gate` is open. It opens the gate itself when the caller is willing to wait. */
static zpp_status behind_gate(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)err;
    int *gate = *(int **)arg;
    CHECK(native != NULL);
    if (!*gate && wait) *gate = 2;
    return *gate ? ZPP_OK : ZPP_AGAIN;
}

struct three {
    zpp_stream *queue, *other, *compute;
    zpp_event *event;
};

static struct three new_streams(zpp_device *device) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct three all;
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_QUEUE, "reduce", &all.queue, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_QUEUE, "other", &all.other, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_HOST, "compute", &all.compute, &err));
    CHECK_OK(zpp_event_create(device, &all.event, &err));
    return all;
}

static void end_streams(const struct three *all) {
    zpp_event_destroy(all->event);
    zpp_stream_destroy(all->queue);
    zpp_stream_destroy(all->other);
    zpp_stream_destroy(all->compute);
}

/* Close the gate. Behind it, the queue copies to[2] to to[0], and records the event. */
static void copy_behind_gate(const struct three *all, int *gate, int *to) {
    struct zpp_err err = ZPP_ERR_INIT;
    *gate = to[0] = to[1] = 0;
    CHECK_OK(zpp_stream_launch(all->queue, behind_gate, &gate, sizeof gate, &err));
    CHECK_OK(zpp_stream_copy(all->queue, &to[0], &to[2], sizeof *to, &err));
    CHECK_OK(zpp_event_record(all->event, all->queue, &err));
}

/* to[1] copies to[0] in another queue, which waits for an event that is recorded elsewhere meanwhile. */
static void a_queue_does_not_block_its_caller(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    struct three all = new_streams(device);
    int gate, *to;
    CHECK_OK(zpp_cuda_host_alloc(device, 4 * sizeof *to, (void **)&to, &err));
    for (uint64_t lazy = 0; lazy < SCHEDULES; ++lazy) {
        SIM(sim_set_schedule)(lazy, 0);
        to[2] = 7;
        copy_behind_gate(&all, &gate, to);
        CHECK_EQUAL(zpp_stream_poll(all.queue, &err), ZPP_AGAIN);
        CHECK_OK(zpp_stream_wait(all.other, all.event, NULL, &err));
        CHECK_OK(zpp_stream_copy(all.other, &to[1], &to[0], sizeof *to, &err));
        CHECK_EQUAL(zpp_stream_wait(all.compute, all.event, NULL, &err), ZPP_AGAIN);
        CHECK_EQUAL(zpp_event_sync(all.event, NULL, &err), ZPP_AGAIN);
        CHECK_OK(zpp_event_record(all.event, all.compute, &err));
        CHECK_OK(zpp_stream_wait(all.compute, all.event, NULL, &err)); /* it no longer stands for the queue */
        CHECK_OK(zpp_event_sync(all.event, &ten_seconds, &err));
        CHECK_EQUAL(gate, 0);
        CHECK_OK(zpp_event_record(all.event, all.other, &err));
        gate = 1;
        CHECK_OK(zpp_event_sync(all.event, &ten_seconds, &err));
        CHECK(to[0] == 7 && to[1] == 7);
    }
    zpp_cuda_host_free(device, to);
    end_streams(&all);
    end_device(device);
}

static zpp_status after_900_ms(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)arg, (void)native, (void)err;
    if (!wait) return ZPP_AGAIN;
    CHECK_EQUAL(nanosleep(&(struct timespec){0, 900000000}, NULL), 0);
    return ZPP_OK;
}

/* The host part of the queue takes most of the timeout, and the native part never ends: one timeout covers both. */
static void a_timeout_covers_the_queue_and_the_gpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    struct three all = new_streams(device);
    const struct zpp_wait one_second = {1000000000u, NULL, NULL};
    uint64_t *counter;
    SIM(sim_set_schedule)(0, 0);
    CHECK_OK(zpp_cuda_host_alloc(device, sizeof *counter, (void **)&counter, &err));
    *counter = 0;
    CHECK_OK(zpp_stream_launch(all.queue, after_900_ms, NULL, 0, &err));
    CHECK_OK(zpp_stream_await(all.queue, counter, 1, NULL, &err));
    CHECK_OK(zpp_event_record(all.event, all.queue, &err));
    const uint64_t start_ns = zpp_now_ns();
    CHECK_EQUAL(zpp_event_sync(all.event, &one_second, &err), ZPP_TIMEOUT);
    CHECK(zpp_now_ns() - start_ns < 1600000000u);
    *counter = 1;
    CHECK_OK(zpp_event_sync(all.event, &ten_seconds, &err));
    zpp_cuda_host_free(device, counter);
    end_streams(&all);
    end_device(device);
}

static void a_stream_without_a_queue_drives_the_other(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    struct three all = new_streams(device);
    int gate, *to;
    CHECK_OK(zpp_cuda_host_alloc(device, 4 * sizeof *to, (void **)&to, &err));
    for (uint64_t lazy = 0; lazy < SCHEDULES; ++lazy) {
        SIM(sim_set_schedule)(lazy, 0);
        to[2] = 8;
        copy_behind_gate(&all, &gate, to);
        CHECK_OK(zpp_stream_wait(all.compute, all.event, &ten_seconds, &err));
        CHECK_EQUAL(gate, 2);
        CHECK_OK(zpp_stream_copy(all.compute, &to[1], &to[0], sizeof *to, &err));
        CHECK_OK(zpp_event_record(all.event, all.compute, &err));
        CHECK_OK(zpp_event_sync(all.event, &ten_seconds, &err));
        CHECK(to[0] == 8 && to[1] == 8);
    }
    zpp_cuda_host_free(device, to);
    end_streams(&all);
    end_device(device);
}

static zpp_status refuse(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait;
    return **(int **)arg ? zpp_fail(err, ZPP_PEER, "rank 3 is gone") : ZPP_AGAIN;
}

static void a_queue_that_ends_ends_what_waits_for_it(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    struct three all = new_streams(device);
    int gone = 0, *where = &gone;
    CHECK_OK(zpp_stream_launch(all.queue, refuse, &where, sizeof where, &err));
    CHECK_OK(zpp_event_record(all.event, all.queue, &err));
    CHECK_OK(zpp_stream_wait(all.other, all.event, NULL, &err));
    CHECK_EQUAL(zpp_stream_wait(all.compute, all.event, NULL, &err), ZPP_AGAIN);
    gone = 1;
    CHECK_FAILS(zpp_event_sync(all.event, &ten_seconds, &err), ZPP_PEER, "rank 3 is gone");
    CHECK_FAILS(zpp_stream_poll(all.queue, &err), ZPP_PEER, "rank 3 is gone");
    CHECK_FAILS(zpp_stream_poll(all.other, &err), ZPP_PEER, "rank 3 is gone");
    CHECK_FAILS(zpp_stream_wait(all.compute, all.event, NULL, &err), ZPP_PEER, "rank 3 is gone");
    CHECK_FAILS(zpp_stream_poll(all.compute, &err), ZPP_PEER, "rank 3 is gone");
    const int64_t events = sim_gpu_counts().events;
    for (int i = 0; i < 8; i++) {
        CHECK_FAILS(zpp_event_record(all.event, all.queue, &err), ZPP_PEER, "rank 3 is gone");
        CHECK_FAILS(zpp_event_record(all.event, all.compute, &err), ZPP_PEER, "rank 3 is gone");
    }
    CHECK(sim_gpu_counts().events <= events + 1); /* a record that never runs keeps no native event */
    end_streams(&all);
    end_device(device);
}

/* What `reader` copies was filled before, in every schedule, because it waits for the counter; and no host waits. */
static void counters_order_streams(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    zpp_stream *writer, *reader;
    zpp_event *done;
    uint64_t *shared;
    CHECK_OK(zpp_stream_create_priority(device, ZPP_STREAM_QUEUE, ZPP_PRIORITY_HIGH, "writer", &writer, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_THREAD, "reader", &reader, &err));
    CHECK_OK(zpp_event_create(device, &done, &err));
    CHECK(zpp_stream_device(writer) == device);
    shared = aligned_alloc(4096, 4096);
    memset(shared, 0, 4096);
    CHECK_OK(zpp_device_pin(device, shared, 4096, &err));
    uint64_t *counter = &shared[0], *from = &shared[8], *to = &shared[16];
    for (uint64_t lazy = 0; lazy < SCHEDULES; ++lazy) {
        SIM(sim_set_schedule)(lazy << 1, 0);
        const uint64_t host_waits = sim_gpu_counts().host_waits;
        CHECK_OK(zpp_stream_fill(writer, from, (unsigned char)(lazy + 1), 5, &err));
        CHECK_OK(zpp_stream_signal(writer, counter, lazy + 1, &err));
        CHECK_OK(zpp_stream_await(reader, counter, lazy + 1, NULL, &err));
        CHECK_OK(zpp_stream_copy(reader, to, from, sizeof *to, &err));
        CHECK_OK(zpp_event_record(done, reader, &err));
        CHECK_EQUAL(sim_gpu_counts().host_waits, host_waits);
        CHECK_OK(zpp_event_sync(done, &ten_seconds, &err));
        CHECK_EQUAL(*counter, lazy + 1);
        CHECK_EQUAL(*to, (lazy + 1) * UINT64_C(0x0101010101));
    }
    /* A comm error releases waits that no peer will end. */
    CHECK_OK(zpp_stream_await(reader, counter, 1000, NULL, &err));
    CHECK_OK(zpp_event_record(done, reader, &err));
    __atomic_fetch_add(counter, ZPP_STREAM_COUNTER_RELEASED, __ATOMIC_RELEASE);
    CHECK_OK(zpp_event_sync(done, &ten_seconds, &err));
    zpp_event_destroy(done);
    zpp_stream_destroy(writer);
    zpp_stream_destroy(reader);
    zpp_device_unpin(device, shared);
    free(shared);
    end_device(device);
}

/* --- waits for several counters at once --- */
enum { WRITERS = 3 };

struct several {
    zpp_device *device;
    zpp_stream *writers[WRITERS], *reader;
    zpp_event *done;
    unsigned char *shared; /* a line for each counter, then one for each value, then what the reader copied */
    size_t bytes;
};

static uint64_t *counter_of(const struct several *all, int writer) { return (void *)(all->shared + 64 * writer); }
static unsigned char *value_of(const struct several *all, int writer) { return all->shared + 64 * (WRITERS + writer); }
static unsigned char *copy_of(const struct several *all, int writer) {
    return all->shared + 64 * (2 * WRITERS + writer);
}

static struct several open_several(enum zpp_stream_kind reader) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct several all = {.device = new_device(), .bytes = 4096};
    for (int i = 0; i < WRITERS; ++i)
        CHECK_OK(zpp_stream_create(all.device, ZPP_STREAM_THREAD, "writer", &all.writers[i], &err));
    CHECK_OK(zpp_stream_create(all.device, reader, "reader", &all.reader, &err));
    CHECK_OK(zpp_event_create(all.device, &all.done, &err));
    all.shared = aligned_alloc(4096, all.bytes);
    memset(all.shared, 0, all.bytes);
    CHECK_OK(zpp_device_pin(all.device, all.shared, all.bytes, &err));
    return all;
}

static void close_several(struct several *all) {
    zpp_event_destroy(all->done);
    for (int i = 0; i < WRITERS; ++i) zpp_stream_destroy(all->writers[i]);
    zpp_stream_destroy(all->reader);
    zpp_device_unpin(all->device, all->shared);
    free(all->shared);
    end_device(all->device);
}

/* Each writer fills its value and signals; the reader awaits all of them and copies. Return how many copies are old. */
static int read_too_early(struct several *all, uint64_t round, uint64_t *driver_calls) {
    struct zpp_err err = ZPP_ERR_INIT;
    const uint64_t *counters[WRITERS];
    int old = 0;
    for (int i = 0; i < WRITERS; ++i) {
        counters[i] = counter_of(all, i);
        CHECK_OK(zpp_stream_fill(all->writers[i], value_of(all, i), (unsigned char)round, 1, &err));
        CHECK_OK(zpp_stream_signal(all->writers[i], counter_of(all, i), round, &err));
    }
    const uint64_t before = sim_gpu_counts().counters;
    CHECK_OK(zpp_stream_await_all(all->reader, counters, WRITERS, round, NULL, &err));
    *driver_calls = sim_gpu_counts().counters - before;
    for (int i = 0; i < WRITERS; ++i)
        CHECK_OK(zpp_stream_copy(all->reader, copy_of(all, i), value_of(all, i), 1, &err));
    CHECK_OK(zpp_event_record(all->done, all->reader, &err));
    CHECK_OK(zpp_event_sync(all->done, &ten_seconds, &err));
    SIM(sim_finish)();
    for (int i = 0; i < WRITERS; ++i) old += *copy_of(all, i) != (unsigned char)round;
    return old;
}

static const uint64_t *left_out_counter;
static bool leave_out_one(const struct sim_wait *wait) { return wait->counter == left_out_counter; }

static int old_in_all_schedules(struct several *all, uint64_t wanted_calls) {
    static uint64_t round;
    int old = 0;
    for (uint64_t lazy = 0; lazy < 1 << (WRITERS + 1); ++lazy) {
        uint64_t calls;
        SIM(sim_set_schedule)(lazy << 1, 0);
        old += read_too_early(all, ++round, &calls);
        CHECK_EQUAL(calls, wanted_calls);
    }
    return old;
}

static void one_call_waits_for_several_counters(void) {
    struct several all = open_several(ZPP_STREAM_THREAD);
    CHECK_EQUAL(old_in_all_schedules(&all, 1), 0);
    for (int i = 0; i < WRITERS; ++i) { /* each of them counts */
        left_out_counter = counter_of(&all, i);
        *SIM(sim_leave_out) = leave_out_one;
        CHECK(old_in_all_schedules(&all, 1) > 0);
        *SIM(sim_leave_out) = NULL;
    }
    close_several(&all);
}

static void a_queue_waits_for_counters_one_by_one(void) {
    struct several all = open_several(ZPP_STREAM_QUEUE);
    CHECK_EQUAL(old_in_all_schedules(&all, WRITERS), 0);
    close_several(&all);
}

static void one_of_several_counters_that_is_not_pinned_is_an_error(void) {
    struct several all = open_several(ZPP_STREAM_THREAD);
    struct zpp_err err = ZPP_ERR_INIT;
    uint64_t stray = 0;
    const uint64_t *counters[] = {counter_of(&all, 0), &stray};
    CHECK_FAILS(zpp_stream_await_all(all.reader, counters, 2, 0, NULL, &err), ZPP_DEVICE, "wait for counters");
    close_several(&all);
}

static zpp_status saw_native(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    **(void ***)arg = native;
    return ZPP_OK;
}

static void a_change_of_stream_keeps_the_order(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    zpp_stream *compute, *one, *two;
    void *natives[2], **where;
    int *to;
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_HOST, "compute", &compute, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_THREAD, "one", &one, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_THREAD, "two", &two, &err));
    CHECK_OK(zpp_cuda_host_alloc(device, 4 * sizeof *to, (void **)&to, &err));
    where = &natives[0];
    CHECK_OK(zpp_stream_launch(one, saw_native, &where, sizeof where, &err));
    where = &natives[1];
    CHECK_OK(zpp_stream_launch(two, saw_native, &where, sizeof where, &err));
    CHECK_OK(zpp_stream_follow(compute, natives[0], &err));
    CHECK_EQUAL(sim_gpu_counts().events, 0); /* the first stream is after nothing */
    for (uint64_t lazy = 0; lazy < SCHEDULES; ++lazy) {
        SIM(sim_set_schedule)(lazy, 0);
        to[0] = to[1] = 0, to[2] = 7;
        CHECK_OK(zpp_stream_follow(compute, natives[0], &err));
        CHECK_OK(zpp_stream_copy(compute, &to[0], &to[2], sizeof *to, &err));
        CHECK_OK(zpp_stream_follow(compute, natives[1], &err));
        CHECK_OK(zpp_stream_copy(compute, &to[1], &to[0], sizeof *to, &err));
        SIM(sim_finish)();
        CHECK_EQUAL(to[1], 7);
    }
    zpp_stream_adopt(compute, NULL);
    zpp_stream_destroy(compute);
    zpp_stream_destroy(one);
    zpp_stream_destroy(two);
    zpp_cuda_host_free(device, to);
    end_device(device);
}

int main(int argc, char **argv) {
    sim_gpu_load();
    static const struct test_case cases[] = {
        TEST(a_queue_does_not_block_its_caller),
        TEST(a_timeout_covers_the_queue_and_the_gpu),
        TEST(a_stream_without_a_queue_drives_the_other),
        TEST(a_queue_that_ends_ends_what_waits_for_it),
        TEST(counters_order_streams),
        TEST(one_call_waits_for_several_counters),
        TEST(a_queue_waits_for_counters_one_by_one),
        TEST(one_of_several_counters_that_is_not_pinned_is_an_error),
        TEST(a_change_of_stream_keeps_the_order),
        {0},
    };
    return test_main(argc, argv, cases);
}
