/* SPDX-License-Identifier: Apache-2.0
 *
 * The I/O engine on a real file system, with both drivers: alignment and tails, order, priorities, cancelling,
 * striping, the arena. Failures are in test_aio_faults.c.
 */
#include "aio_common.h"

#include <pthread.h>
#include <stdint.h>

enum { KIB = 1024, MIB = 1024 * 1024 };

/* Every mixture of crooked addresses, offsets and sizes, against a model of the file in memory. */
static void shapes_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(plain_config(backend));
    const char *path = in_folder("shapes");
    enum { FILE_BYTES = 3 * MIB };
    unsigned char *model = calloc(1, FILE_BYTES), *memory = arena_block(aio, FILE_BYTES + 2 * 4096);
    static const size_t sizes[] = {1,     511,   512,   513,    4095,   4096, 4097,      65535,
                                   65536, 65537, 70000, 131072, 300001, MIB,  MIB + 4096};
    static const size_t starts[] = {0, 1, 511, 512, 4096, 5000, 65536, 65537};
    static const size_t shifts[] = {0, 1, 64, 512, 4096};
    unsigned seed = 1, random = 12345;
    size_t end = 0;
    for (size_t a = 0; a < sizeof sizes / sizeof *sizes; ++a) {
        for (size_t b = 0; b < sizeof starts / sizeof *starts; ++b) {
            for (size_t c = 0; c < sizeof shifts / sizeof *shifts; ++c, ++seed) {
                random = random * 1103515245u + 12345u;
                const size_t offset = starts[b] + (random >> 16) % 3 * 4096u;
                unsigned char *data = memory + shifts[c];
                fill(data, sizes[a], offset, seed);
                memcpy(model + offset, data, sizes[a]);
                move(aio, true, path, data, sizes[a], offset);
                if (offset + sizes[a] > end) end = offset + sizes[a];
                CHECK_EQUAL(file_bytes(path), end);
                const size_t from = offset > 700 ? offset - 700 : 0;
                const size_t bytes = (end - from < sizes[a] + 1400 ? end - from : sizes[a] + 1400);
                memset(data, 0xee, bytes);
                data[bytes] = 0x77;
                move(aio, false, path, data, bytes, from);
                CHECK(memcmp(data, model + from, bytes) == 0);
                CHECK_EQUAL(data[bytes], 0x77); /* nothing beyond what was asked for */
            }
        }
    }
    unsigned char *whole = malloc(end); /* ordinary memory */
    move(aio, false, path, whole, end, 0);
    CHECK(memcmp(whole, model, end) == 0);
    free(whole);
    free(model);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(shapes)

/* Neighbours that share a page, written at once, keep each other's bytes. */
static void neighbours_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(plain_config(backend));
    const char *path = in_folder("neighbours");
    enum { COUNT = 64, BYTES = 70001 };
    unsigned char *data = malloc((size_t)COUNT * BYTES);
    zpp_aio_request *requests[COUNT];
    struct zpp_err err = ZPP_ERR_INIT;
    for (unsigned round = 0; round < 3; ++round) {
        fill(data, (size_t)COUNT * BYTES, 0, round);
        for (size_t index = 0; index < COUNT; ++index) {
            const size_t mixed = index * 29 % COUNT;
            requests[index] = begin(aio, true, path, data + mixed * BYTES, BYTES, mixed * BYTES);
        }
        for (size_t index = 0; index < COUNT; ++index) CHECK_OK(finish(requests[index], &err, NULL));
        memset(data, 0, (size_t)COUNT * BYTES);
        move(aio, false, path, data, (size_t)COUNT * BYTES, 0);
        check_filled(data, (size_t)COUNT * BYTES, 0, round);
    }
    free(data);
    zpp_aio_destroy(aio);
}
ON_EACH(neighbours)

/* Requests on the same bytes run in the order of their submission: the last write wins, and each read sees the write
 * before. */
static void same_bytes_in_order_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(plain_config(backend));
    const char *path = in_folder("order");
    enum { ROUNDS = 100, BYTES = 200 * KIB };
    unsigned char *out[ROUNDS], *in[ROUNDS];
    zpp_aio_request *requests[2 * ROUNDS];
    struct zpp_err err = ZPP_ERR_INIT;
    for (unsigned round = 0; round < ROUNDS; ++round) {
        out[round] = malloc(BYTES);
        in[round] = calloc(1, BYTES);
        fill(out[round], BYTES, 0, round);
        requests[2 * round] = begin(aio, true, path, out[round], BYTES, 4096);
        requests[2 * round + 1] = begin(aio, false, path, in[round], BYTES - 100, 4096 + 100);
    }
    for (unsigned index = 0; index < 2 * ROUNDS; ++index) CHECK_OK(finish(requests[index], &err, NULL));
    for (unsigned round = 0; round < ROUNDS; ++round) {
        CHECK(memcmp(in[round], out[round] + 100, BYTES - 100) == 0);
        free(out[round]);
        free(in[round]);
    }
    zpp_aio_destroy(aio);
}
ON_EACH(same_bytes_in_order)

static void stripes_on(enum zpp_aio_backend backend) {
    const char *stripes[3] = {in_folder("a"), in_folder("b"), in_folder("c")};
    for (int index = 0; index < 3; ++index) CHECK_EQUAL(mkdir(stripes[index], 0777), 0);
    struct zpp_aio_config config = plain_config(backend);
    config.stripes = stripes;
    config.stripes_count = 3;
    config.stripe_bytes = 32 * KIB;
    zpp_aio *aio = new_engine(config);
    enum { BYTES = 2 * MIB + 12345 };
    unsigned char *data = malloc(BYTES), *back = malloc(BYTES);
    fill(data, BYTES, 0, 5);
    move(aio, true, "striped", data, BYTES, 0);
    move(aio, false, "striped", back, BYTES, 0);
    CHECK(memcmp(data, back, BYTES) == 0);
    move(aio, false, "striped", back, 100000, 77777);
    CHECK(memcmp(data + 77777, back, 100000) == 0);
    const uint64_t sizes[3] = {file_bytes(in_folder("a/striped")), file_bytes(in_folder("b/striped")),
                               file_bytes(in_folder("c/striped"))};
    CHECK_EQUAL(sizes[0] + sizes[1] + sizes[2], BYTES);
    CHECK(sizes[0] - sizes[2] <= 32 * KIB);
    /* The second stripe is the first of folder b. */
    const int fd = open(in_folder("b/striped"), O_RDONLY);
    CHECK_EQUAL(pread(fd, back, 32 * KIB, 0), 32 * KIB);
    CHECK(memcmp(back, data + 32 * KIB, 32 * KIB) == 0);
    close(fd);
    free(data);
    free(back);
    zpp_aio_destroy(aio);
}
ON_EACH(stripes)

/* A path that names another file now is opened anew; a removed one is created by a write and missed by a read. */
static void replaced_files_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(plain_config(backend));
    const char *path = in_folder("replaced"), *other = in_folder("other");
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    char data[8192] = {1}, seen[8192];
    move(aio, true, path, data, sizeof data, 0);
    data[0] = 2;
    move(aio, true, other, data, sizeof data, 0);
    CHECK_EQUAL(rename(other, path), 0);
    move(aio, false, path, seen, sizeof seen, 0);
    CHECK_EQUAL(seen[0], 2);
    CHECK_EQUAL(unlink(path), 0);
    zpp_aio_request *request = NULL;
    const struct zpp_aio_job job = {.path = path, .memory = seen, .bytes = sizeof seen};
    CHECK_FAILS(zpp_aio_submit(aio, &job, &request, &fault, &err), ZPP_TIER, "replaced");
    CHECK_EQUAL(fault.os_errno, ENOENT);
    move(aio, true, path, data, sizeof data, 0);
    zpp_aio_forget(aio, path);
    zpp_aio_forget(aio, other);
    struct zpp_aio_figures figures;
    zpp_aio_figures(aio, &figures);
    CHECK_EQUAL(figures.open_files, 0);
    zpp_aio_destroy(aio);
}
ON_EACH(replaced_files)

/* A file that is open for reading leaves the table when somebody writes it, while its last request ends. Nothing but
 * the engine's lock may order the two: the test waits by time, and ThreadSanitizer judges. */
static void reopened_files_on(enum zpp_aio_backend backend) {
    enum { BYTES = 4096, PAUSE_US = 2000, ROUNDS = 20 };
    char old[BYTES], fresh[BYTES], seen[BYTES];
    const char *path = in_folder("reopened");
    zpp_aio *aio = new_engine(plain_config(backend));
    struct zpp_err err = ZPP_ERR_INIT;
    for (int round = 0; round < ROUNDS; ++round) {
        memset(old, 2 * round, BYTES);
        memset(fresh, 2 * round + 1, BYTES);
        move(aio, true, path, old, BYTES, 0);
        zpp_aio_forget(aio, path);
        zpp_aio_request *reading = begin(aio, false, path, seen, BYTES, 0);
        if (round % 2) usleep(PAUSE_US);
        zpp_aio_request *writing = begin(aio, true, path, fresh, BYTES, 0);
        CHECK_OK(finish(reading, &err, NULL));
        CHECK(memcmp(seen, old, BYTES) == 0);
        CHECK_OK(finish(writing, &err, NULL));
        move(aio, false, path, seen, BYTES, 0);
        CHECK(memcmp(seen, fresh, BYTES) == 0);
    }
    struct zpp_aio_figures figures;
    zpp_aio_figures(aio, &figures);
    CHECK_EQUAL(figures.open_files, 1);
    zpp_aio_destroy(aio);
}
ON_EACH(reopened_files)

static void many_files_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(plain_config(backend));
    enum { FILES = 400, BYTES = 5000 };
    unsigned char *data = malloc((size_t)FILES * BYTES), *back = calloc(FILES, BYTES);
    zpp_aio_request *requests[FILES];
    struct zpp_err err = ZPP_ERR_INIT;
    char name[32];
    fill(data, (size_t)FILES * BYTES, 0, 9);
    for (int write = 1; write >= 0; --write) {
        for (size_t index = 0; index < FILES; ++index) {
            snprintf(name, sizeof name, "file%zu", index);
            requests[index] = begin(aio, write, in_folder(name), (write ? data : back) + index * BYTES, BYTES, 0);
        }
        for (size_t index = 0; index < FILES; ++index) CHECK_OK(finish(requests[index], &err, NULL));
    }
    CHECK(memcmp(data, back, (size_t)FILES * BYTES) == 0);
    struct zpp_aio_figures figures;
    CHECK_OK(finish(begin(aio, false, in_folder(name), back, BYTES, 0), &err, NULL)); /* idle files close at a submit */
    zpp_aio_figures(aio, &figures);
    CHECK(figures.open_files <= 256);
    CHECK_OK(zpp_aio_flush(aio, true, &patient, NULL, &err));
    free(data);
    free(back);
    zpp_aio_destroy(aio);
}
ON_EACH(many_files)

static void arena_gives_exact_sizes(void) {
    zpp_aio *aio = new_engine(plain_config(ZPP_AIO_THREADS));
    struct zpp_aio_figures figures;
    struct zpp_err err = ZPP_ERR_INIT;
    const size_t large = 33 * MIB + 1;
    void *block = arena_block(aio, large);
    CHECK_EQUAL((uintptr_t)block % 4096, 0);
    zpp_aio_figures(aio, &figures);
    CHECK_EQUAL(figures.arena_used_bytes, 33 * MIB + 4096);
    CHECK_EQUAL(figures.arena_held_bytes, 33 * MIB + 4096); /* no power of two */
    void *small[300];
    for (int index = 0; index < 300; ++index) {
        small[index] = arena_block(aio, (size_t)(index % 40 + 1) * 4096 - 5);
        memset(small[index], index, (size_t)(index % 40 + 1) * 4096 - 5);
    }
    for (int index = 0; index < 300; index += 2) zpp_aio_arena_free(zpp_aio_get_arena(aio), small[index]);
    for (int index = 1; index < 300; index += 2)
        CHECK_EQUAL(((unsigned char *)small[index])[4000], (unsigned char)index);
    for (int index = 1; index < 300; index += 2) zpp_aio_arena_free(zpp_aio_get_arena(aio), small[index]);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), block);
    zpp_aio_figures(aio, &figures);
    CHECK_EQUAL(figures.arena_used_bytes, 0);
    CHECK(figures.arena_held_bytes <= ZPP_AIO_ARENA_SLAB_BYTES);
    zpp_aio_destroy(aio);

    struct zpp_aio_config config = plain_config(ZPP_AIO_THREADS);
    config.arena_bytes = 10 * MIB;
    aio = new_engine(config);
    block = arena_block(aio, 9 * MIB);
    void *more = NULL;
    CHECK_FAILS(zpp_aio_arena_alloc(zpp_aio_get_arena(aio), 2 * MIB, &more, &err), ZPP_NOMEM, "raise arena_bytes");
    void *fits = arena_block(aio, MIB / 2); /* where a whole shared slab would not */
    zpp_aio_arena *arena = zpp_aio_get_arena(aio);
    zpp_aio_destroy(aio); /* blocks outlive the engine */
    memset(fits, 1, MIB / 2);
    zpp_aio_arena_free(arena, fits);
    zpp_aio_arena_free(arena, block);
}

/* --- waiting, cancelling --- */

/* A disk that stands still until it is let go. */
static atomic_bool stands;
static atomic_int begun[2];      /* reads, writes that reached it */
static atomic_int writes_before; /* of the last read, those that had reached it */
static ssize_t slow_pread(void *ctx, int fd, void *memory, size_t bytes, uint64_t offset) {
    (void)ctx;
    atomic_fetch_add(&begun[0], 1);
    atomic_store(&writes_before, atomic_load(&begun[1]));
    while (atomic_load(&stands)) usleep(200);
    const ssize_t got = pread(fd, memory, bytes, (off_t)offset);
    return got < 0 ? -errno : got;
}
static char written_order[4096];
static atomic_int written_count;
static ssize_t slow_pwrite(void *ctx, int fd, const void *memory, size_t bytes, uint64_t offset) {
    (void)ctx;
    atomic_fetch_add(&begun[1], 1);
    while (atomic_load(&stands)) usleep(200);
    const int place = atomic_fetch_add(&written_count, 1);
    written_order[place % 4096] = *(const char *)memory;
    const ssize_t put = pwrite(fd, memory, bytes, (off_t)offset);
    return put < 0 ? -errno : put;
}

static zpp_aio *bounded_engine(struct zpp_aio_sys *sys, unsigned threads, size_t flight_bytes) {
    *sys = *zpp_aio_sys_real();
    sys->pread = slow_pread;
    sys->pwrite = slow_pwrite;
    struct zpp_aio_config config = plain_config(ZPP_AIO_THREADS);
    config.threads = threads;
    config.block_bytes = 4096;
    config.flight_bytes = flight_bytes;
    config.sys = sys;
    atomic_store(&stands, true);
    atomic_store(&begun[0], 0);
    atomic_store(&begun[1], 0);
    return new_engine(config);
}

static zpp_aio *slow_engine(struct zpp_aio_sys *sys, unsigned threads) {
    return bounded_engine(sys, threads, 0);
}

static void until_begun(int kind, int count) {
    while (atomic_load(&begun[kind]) < count) usleep(200);
}

static zpp_status stop_tick(void *ctx, struct zpp_err *err) {
    ++*(int *)ctx;
    return zpp_fail(err, ZPP_INTERRUPTED, "enough");
}

static void waits_end(void) {
    make_folder();
    struct zpp_aio_sys sys;
    zpp_aio *aio = slow_engine(&sys, 1);
    struct zpp_err err = ZPP_ERR_INIT;
    char *data = aligned_alloc(4096, 16 * 4096);
    memset(data, 1, 16 * 4096);
    zpp_aio_request *request = begin(aio, true, in_folder("slow"), data, 16 * 4096, 0);
    CHECK(!zpp_aio_done(request));
    CHECK_EQUAL(zpp_aio_wait(request, NULL, &err), ZPP_AGAIN);
    CHECK_EQUAL(zpp_aio_flush(aio, false, NULL, NULL, &err), ZPP_AGAIN);
    CHECK_FAILS(zpp_aio_wait(request, &(struct zpp_wait){.timeout_ns = 20000000}, &err), ZPP_TIMEOUT,
                "slow\" were not written after 0.0");
    int ticks = 0;
    CHECK_FAILS(zpp_aio_wait(request, &(struct zpp_wait){.tick = stop_tick, .ctx = &ticks}, &err), ZPP_INTERRUPTED,
                "enough");
    CHECK_EQUAL(ticks, 1);
    CHECK_FAILS(zpp_aio_flush(aio, false, &(struct zpp_wait){.timeout_ns = 20000000}, NULL, &err), ZPP_TIMEOUT,
                "not written");
    atomic_store(&stands, false);
    CHECK_OK(finish(request, &err, NULL));
    zpp_aio_destroy(aio);
    free(data);
    remove_folder();
}

static void cancelling(void) {
    make_folder();
    struct zpp_aio_sys sys;
    zpp_aio *aio = slow_engine(&sys, 1);
    struct zpp_err err = ZPP_ERR_INIT;
    char *data = aligned_alloc(4096, 16 * 4096);
    memset(data, 1, 16 * 4096);
    zpp_aio_request *running = begin(aio, true, in_folder("c"), data, 16 * 4096, 0);
    until_begun(1, 1);
    zpp_aio_request *held = begin(aio, false, in_folder("c"), data, 4096, 0);
    zpp_aio_request *after = begin(aio, true, in_folder("c"), data, 4096, 4096);
    zpp_aio_request *waits = begin(aio, true, in_folder("d"), data, 4096, 0);
    CHECK(zpp_aio_cancel(held));
    CHECK(zpp_aio_done(held));
    CHECK_FAILS(finish(held, &err, NULL), ZPP_ABORTED, "a read of 4096 bytes at offset 0 was cancelled");
    CHECK(zpp_aio_cancel(waits));
    CHECK(!zpp_aio_cancel(waits));
    CHECK_FAILS(finish(waits, &err, NULL), ZPP_ABORTED, "a write");
    CHECK(zpp_aio_cancel(running));
    CHECK(!zpp_aio_done(running)); /* a piece is with the disk: the memory stays borrowed */
    atomic_store(&stands, false);
    CHECK_FAILS(finish(running, &err, NULL), ZPP_ABORTED, "cancelled");
    CHECK_OK(finish(after, &err, NULL));
    CHECK_EQUAL(atomic_load(&begun[1]), 2);
    CHECK_OK(zpp_aio_flush(aio, false, &patient, NULL, &err));
    zpp_aio_destroy(aio);
    free(data);
    remove_folder();
}

/* Closing cancels what waits and ends what runs; requests stay good for waiting. */
static void closing_with_requests(void) {
    make_folder();
    struct zpp_aio_sys sys;
    zpp_aio *aio = slow_engine(&sys, 2);
    struct zpp_err err = ZPP_ERR_INIT;
    char *data = aligned_alloc(4096, 4096);
    memset(data, 1, 4096);
    zpp_aio_request *requests[20];
    for (uint64_t index = 0; index < 20; ++index)
        requests[index] = begin(aio, true, in_folder("c"), data, 4096, index * 4096);
    until_begun(1, 2);
    atomic_store(&stands, false);
    zpp_aio_destroy(aio);
    int cancelled = 0;
    for (int index = 0; index < 20; ++index) {
        CHECK(zpp_aio_done(requests[index]));
        cancelled += finish(requests[index], &err, NULL) == ZPP_ABORTED;
    }
    CHECK(cancelled <= 18);
    free(data);
    remove_folder();
}

/* Reads go before writes that were submitted earlier, and every eighth place is the writes'. */
static void reads_go_first(void) {
    make_folder();
    struct zpp_aio_sys sys;
    zpp_aio *aio = slow_engine(&sys, 1);
    struct zpp_err err = ZPP_ERR_INIT;
    enum { COUNT = 40 };
    char *data = aligned_alloc(4096, 4096);
    memset(data, 1, 4096);
    atomic_store(&stands, false);
    for (uint64_t index = 0; index < 2 * COUNT; ++index) move(aio, true, in_folder("p"), data, 4096, index * 4096);
    atomic_store(&stands, true);
    atomic_store(&begun[0], 0);
    atomic_store(&begun[1], 0);
    zpp_aio_request *first = begin(aio, true, in_folder("p"), data, 4096, 0), *writes[COUNT], *reads[COUNT];
    until_begun(1, 1);
    char *back = aligned_alloc(4096, (size_t)COUNT * 4096);
    for (uint64_t index = 0; index < COUNT; ++index) {
        writes[index] = begin(aio, true, in_folder("p"), data, 4096, (index + 1) * 4096);
        reads[index] = begin(aio, false, in_folder("p"), back + index * 4096, 4096, (COUNT + index) * 4096);
    }
    zpp_aio_release(reads[COUNT - 1]);
    reads[COUNT - 1] = begin(aio, false, in_folder("p"), back, 4096, 2 * COUNT * 4096 - 4096);
    atomic_store(&stands, false);
    CHECK_OK(zpp_aio_wait(reads[COUNT - 1], &patient, &err));
    const int written = atomic_load(&writes_before); /* more have begun since, when this thread was slow to wake */
    CHECK(written >= COUNT / 8 && written <= COUNT / 8 + 3);
    for (int index = 0; index < COUNT; ++index) {
        CHECK_OK(finish(writes[index], &err, NULL));
        CHECK_OK(finish(reads[index], &err, NULL));
    }
    CHECK_OK(finish(first, &err, NULL));
    zpp_aio_destroy(aio);
    free(back);
    free(data);
    remove_folder();
}

/* No more operations begin than `flight_bytes` has room for, however many threads there are; there is room again. */
static void bytes_in_flight(void) {
    make_folder();
    struct zpp_aio_sys sys;
    enum { BLOCK = 4096, COUNT = 24, ROOM = 3 };
    zpp_aio *aio = bounded_engine(&sys, 6, ROOM * BLOCK);
    struct zpp_err err = ZPP_ERR_INIT;
    char *data = aligned_alloc(BLOCK, BLOCK);
    memset(data, 1, BLOCK);
    for (int round = 0; round < 2; ++round) {
        zpp_aio_request *writes[COUNT];
        atomic_store(&stands, true);
        for (uint64_t index = 0; index < COUNT; ++index)
            writes[index] = begin(aio, true, in_folder("f"), data, BLOCK, index * BLOCK);
        until_begun(1, round * COUNT + ROOM);
        usleep(20000); /* three threads have nothing to do */
        CHECK_EQUAL(atomic_load(&begun[1]), round * COUNT + ROOM);
        atomic_store(&stands, false);
        for (int index = 0; index < COUNT; ++index) CHECK_OK(finish(writes[index], &err, NULL));
    }
    zpp_aio_destroy(aio);
    free(data);
    remove_folder();
}

/* --- threads --- */

struct client {
    zpp_aio *aio;
    unsigned seed;
    bool arena;
};

static void *client(void *arg) {
    const struct client *self = arg;
    enum { ROUNDS = 60, BYTES = 150 * KIB };
    unsigned char *data = self->arena ? arena_block(self->aio, BYTES) : malloc(BYTES);
    struct zpp_err err = ZPP_ERR_INIT;
    char name[128];
    snprintf(name, sizeof name, "%s/shared%u", folder, self->seed % 2);
    const uint64_t base = (uint64_t)(self->seed / 2) * MIB + self->seed;
    for (unsigned round = 0; round < ROUNDS; ++round) {
        const size_t bytes = BYTES - round * 997;
        fill(data, bytes, 0, self->seed + round);
        zpp_aio_request *request = begin(self->aio, true, name, data, bytes, base);
        if (round % 7 == 3) zpp_aio_cancel(request);
        const zpp_status written = finish(request, &err, NULL);
        if (written == ZPP_ABORTED) continue;
        CHECK_EQUAL(written, ZPP_OK);
        memset(data, 0, bytes);
        request = begin(self->aio, false, name, data, bytes, base);
        CHECK_OK(finish(request, &err, NULL));
        check_filled(data, bytes, 0, self->seed + round);
        if (round % 16 == 5) CHECK_OK(zpp_aio_flush(self->aio, false, &patient, NULL, &err));
    }
    if (self->arena) zpp_aio_arena_free(zpp_aio_get_arena(self->aio), data);
    else free(data);
    return NULL;
}

static void many_threads_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(plain_config(backend));
    enum { CLIENTS = 6 };
    pthread_t threads[CLIENTS];
    struct client clients[CLIENTS];
    for (unsigned index = 0; index < CLIENTS; ++index) {
        clients[index] = (struct client){aio, index, index % 2 == 0};
        CHECK_EQUAL(pthread_create(&threads[index], NULL, client, &clients[index]), 0);
    }
    for (unsigned index = 0; index < CLIENTS; ++index) pthread_join(threads[index], NULL);
    zpp_aio_destroy(aio);
}
ON_EACH(many_threads)

/* Requests whose caller goes away at once are done all the same. */
static void let_go_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(plain_config(backend));
    struct zpp_err err = ZPP_ERR_INIT;
    enum { COUNT = 200, BYTES = 12 * KIB };
    unsigned char *data = malloc((size_t)COUNT * BYTES), *back = malloc((size_t)COUNT * BYTES);
    fill(data, (size_t)COUNT * BYTES, 0, 4);
    for (size_t index = 0; index < COUNT; ++index) {
        zpp_aio_release(begin(aio, true, in_folder("go"), data + index * BYTES, BYTES, index * BYTES));
    }
    CHECK_OK(zpp_aio_flush(aio, true, &patient, NULL, &err));
    move(aio, false, in_folder("go"), back, (size_t)COUNT * BYTES, 0);
    CHECK(memcmp(data, back, (size_t)COUNT * BYTES) == 0);
    move(aio, true, in_folder("nothing"), NULL, 0, 7);
    CHECK_EQUAL(file_bytes(in_folder("nothing")), 0);
    free(data);
    free(back);
    zpp_aio_destroy(aio);
}
ON_EACH(let_go)

static void wrong_arguments(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_aio *aio = NULL;
    struct zpp_aio_config config = plain_config(ZPP_AIO_AUTO);
    config.depth = 0;
    CHECK_FAILS(zpp_aio_create(&config, &aio, &err), ZPP_INVALID, "depth is 0, wanted 1 to 1024");
    config = plain_config(ZPP_AIO_AUTO);
    config.block_bytes = 5000;
    CHECK_FAILS(zpp_aio_create(&config, &aio, &err), ZPP_INVALID, "block_bytes is 5000");
    config = plain_config(ZPP_AIO_AUTO);
    config.stripes_count = 17;
    CHECK_FAILS(zpp_aio_create(&config, &aio, &err), ZPP_INVALID, "17 paths");
    aio = new_engine(plain_config(ZPP_AIO_AUTO));
    zpp_aio_request *request;
    char byte;
    CHECK_FAILS(zpp_aio_submit(aio, &(struct zpp_aio_job){.path = ""}, &request, NULL, &err), ZPP_INVALID,
                "path is empty");
    CHECK_FAILS(zpp_aio_submit(aio, &(struct zpp_aio_job){.path = "x", .bytes = 1}, &request, NULL, &err), ZPP_INVALID,
                "is NULL");
    CHECK_FAILS(
        zpp_aio_submit(aio, &(struct zpp_aio_job){.path = "x", .memory = &byte, .bytes = 1, .offset_bytes = INT64_MAX},
                       &request, NULL, &err),
        ZPP_INVALID, "beyond 2^63");
    zpp_aio_destroy(aio);
    zpp_aio_destroy(NULL);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(shapes),
        TEST(neighbours),
        TEST(same_bytes_in_order),
        TEST(stripes),
        TEST(replaced_files),
        TEST(reopened_files),
        TEST(many_files),
        TEST(arena_gives_exact_sizes),
        TEST(waits_end),
        TEST(cancelling),
        TEST(closing_with_requests),
        TEST(reads_go_first),
        TEST(bytes_in_flight),
        TEST(many_threads),
        TEST(let_go),
        TEST(wrong_arguments),
        {0},
    };
    return test_main(argc, argv, cases);
}
