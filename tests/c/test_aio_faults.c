/* SPDX-License-Identifier: Apache-2.0
 *
 * Every failure of every call that the I/O engine makes, brought about through its table of system calls, with both
 * drivers where both make the call.
 */
#include "aio_common.h"

#include <inttypes.h>
#include <sys/wait.h>

enum { KIB = 1024, MIB = 1024 * 1024 };

/* What the next operations meet. One plan at a time; set before the engine is used. */
static struct plan {
    enum { NORMAL, SHORT, ERRNO, ZERO } kind;
    int os_errno;
    size_t most_bytes;   /* SHORT: no operation moves more */
    atomic_int times;    /* so many operations meet it; then all is well */
    int only_writes;     /* 1: writes, 0: reads, -1: both */
    uint64_t from_bytes; /* operations at or behind this offset */
} plan;
static atomic_int operations;

/* True: the operation is decided. May shorten it. */
static bool meets_plan(bool write, size_t *bytes, uint64_t offset, int *result) {
    atomic_fetch_add(&operations, 1);
    if (plan.kind == NORMAL || (plan.only_writes >= 0 && write != plan.only_writes) || offset < plan.from_bytes)
        return false;
    if (atomic_fetch_sub(&plan.times, 1) <= 0) {
        atomic_store(&plan.times, 0);
        return false;
    }
    if (plan.kind == SHORT) {
        if (*bytes > plan.most_bytes) *bytes = plan.most_bytes;
        return false;
    }
    *result = plan.kind == ERRNO ? -plan.os_errno : 0;
    return true;
}

static ssize_t planned_pread(void *ctx, int fd, void *memory, size_t bytes, uint64_t offset) {
    (void)ctx;
    int result;
    if (meets_plan(false, &bytes, offset, &result)) return result;
    const ssize_t got = pread(fd, memory, bytes, (off_t)offset);
    return got < 0 ? -errno : got;
}
static ssize_t planned_pwrite(void *ctx, int fd, const void *memory, size_t bytes, uint64_t offset) {
    (void)ctx;
    int result;
    if (meets_plan(true, &bytes, offset, &result)) return result;
    const ssize_t put = pwrite(fd, memory, bytes, (off_t)offset);
    return put < 0 ? -errno : put;
}
static bool planned_op(void *ctx, struct zpp_aio_op *op, int *result) {
    (void)ctx;
    return meets_plan(op->write, &op->bytes, op->offset_bytes, result);
}

static struct zpp_aio_sys sys;

static zpp_aio *planned_engine(enum zpp_aio_backend backend) {
    sys = *zpp_aio_sys_real();
    sys.pread = planned_pread;
    sys.pwrite = planned_pwrite;
    sys.ring_op = planned_op;
    plan.kind = NORMAL;
    plan.from_bytes = 0;
    plan.only_writes = -1;
    struct zpp_aio_config config = plain_config(backend);
    config.sys = &sys;
    return new_engine(config);
}

/* Only between requests: the driver reads it while they run. */
static void set_plan(int kind, int os_errno, size_t most_bytes, int times, int only_writes) {
    plan.kind = kind;
    plan.os_errno = os_errno;
    plan.most_bytes = most_bytes;
    plan.only_writes = only_writes;
    atomic_store(&plan.times, times);
}

enum { BYTES = 300 * KIB + 123 };

/* Moves BYTES through the file under the plan and checks them. */
static void roundtrip(zpp_aio *aio, const char *path, unsigned char *data, int kind, int os_errno, size_t most,
                      int times) {
    static unsigned seed;
    fill(data, BYTES, 0, ++seed);
    set_plan(kind, os_errno, most, times, -1);
    move(aio, true, path, data, BYTES, 1000);
    memset(data, 0, BYTES);
    atomic_store(&plan.times, times);
    move(aio, false, path, data, BYTES, 1000);
    check_filled(data, BYTES, 0, seed);
    set_plan(NORMAL, 0, 0, 0, -1);
}

/* Short results are continued, whatever their length, in aligned and in crooked memory. */
static void short_results_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = planned_engine(backend);
    unsigned char *memory = arena_block(aio, BYTES + 4096);
    static const size_t mosts[] = {1, 100, 512, 1000, 4096, 5000, 65535};
    for (size_t index = 0; index < sizeof mosts / sizeof *mosts; ++index) {
        roundtrip(aio, in_folder("short"), memory, SHORT, 0, mosts[index], 40);
        roundtrip(aio, in_folder("short"), memory + 3, SHORT, 0, mosts[index], 40);
    }
    struct zpp_aio_figures figures;
    zpp_aio_figures(aio, &figures);
    CHECK(figures.retries > 100);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(short_results)

static void interrupted_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = planned_engine(backend);
    unsigned char *memory = arena_block(aio, BYTES);
    roundtrip(aio, in_folder("again"), memory, ERRNO, EINTR, 0, 60);
    roundtrip(aio, in_folder("again"), memory, ERRNO, EAGAIN, 0, 60);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(interrupted)

/* A file that took O_DIRECT at open and refuses the operation goes through the page cache, with one line to the log. */
static void direct_refused_late_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = planned_engine(backend);
    unsigned char *memory = arena_block(aio, BYTES);
    const int before = atomic_load(&logged);
    plan.from_bytes = 4096; /* the edges go through the page cache anyway */
    set_plan(ERRNO, EINVAL, 0, 1, 1);
    move(aio, true, in_folder("einval"), memory, BYTES, 4096);
    roundtrip(aio, in_folder("einval"), memory, NORMAL, 0, 0, 0);
    CHECK_EQUAL(atomic_load(&logged), before + 1);
    CHECK(strstr(last_log, "refuses O_DIRECT"));
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(direct_refused_late)

/* EIO: the sentence and the fault name file and offset; other requests are not touched; the flush says it once. */
static void disk_error_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = planned_engine(backend);
    unsigned char *memory = arena_block(aio, MIB);
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = {.os_errno = 0};
    fill(memory, MIB, 0, 1);
    move(aio, true, in_folder("bad"), memory, MIB, 0);
    move(aio, true, in_folder("good"), memory, MIB, 0);

    plan.from_bytes = 256 * KIB;
    set_plan(ERRNO, EIO, 0, 1, 0);
    CHECK_FAILS(finish(begin(aio, false, in_folder("bad"), memory, MIB, 0), &err, &fault), ZPP_TIER, "cannot read");
    CHECK(strstr(err.text, "/bad\"") && strstr(err.text, strerror(EIO)));
    CHECK_EQUAL(fault.os_errno, EIO);
    CHECK_EQUAL(err.os_errno, EIO);
    CHECK(fault.offset_bytes >= 256 * KIB && fault.offset_bytes % (64 * KIB) == 0);
    CHECK_OK(zpp_aio_flush(aio, false, &patient, NULL, &err)); /* a read's failure is its reader's */

    set_plan(ERRNO, EIO, 0, 1, 1);
    zpp_aio_request *lost = begin(aio, true, in_folder("bad"), memory, MIB, 0);
    zpp_aio_request *fine = begin(aio, true, in_folder("good"), memory, 256 * KIB, 0);
    CHECK_OK(finish(fine, &err, NULL));
    zpp_aio_release(lost); /* nobody waits for it */
    CHECK_FAILS(zpp_aio_flush(aio, false, &patient, &fault, &err), ZPP_TIER, "cannot write");
    CHECK(strstr(fault.path, "bad"));
    CHECK_OK(zpp_aio_flush(aio, false, &patient, &fault, &err));

    set_plan(ERRNO, EIO, 0, 1, 1);
    CHECK_FAILS(finish(begin(aio, true, in_folder("bad"), memory, MIB, 0), &err, &fault), ZPP_TIER, "cannot write");
    CHECK_OK(zpp_aio_flush(aio, false, &patient, &fault, &err)); /* said already */
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(disk_error)

static uint64_t now_free_bytes;
static int told_free_bytes(void *ctx, int fd, uint64_t *out) {
    (void)ctx, (void)fd;
    *out = now_free_bytes;
    return 0;
}
static int full_reserve(void *ctx, int fd, uint64_t offset, uint64_t bytes) {
    (void)ctx, (void)offset;
    (void)!ftruncate(fd, (off_t)(offset + bytes / 2)); /* file systems may leave a part behind */
    return -ENOSPC;
}
static int refused_reserve(void *ctx, int fd, uint64_t offset, uint64_t bytes) {
    (void)ctx, (void)fd, (void)offset, (void)bytes;
    return -EOPNOTSUPP;
}

/* A full disk: found at submission where room can be reserved, else by the write; path, wanted, free. */
static void full_disk_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = planned_engine(backend);
    zpp_aio_destroy(aio);
    now_free_bytes = 12345;
    sys.free_bytes = told_free_bytes;
    sys.reserve = full_reserve;
    struct zpp_aio_config config = plain_config(backend);
    config.sys = &sys;
    aio = new_engine(config);
    unsigned char *memory = arena_block(aio, 4 * MIB);
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = {.os_errno = 0};
    const struct zpp_aio_job job = {.path = in_folder("full"), .memory = memory, .bytes = 4 * MIB, .write = true};
    zpp_aio_request *request = NULL;
    CHECK_FAILS(zpp_aio_submit(aio, &job, &request, &fault, &err), ZPP_TIER,
                "wanted 4194304 bytes at offset 0, its file system has 12345 free; free some");
    CHECK_EQUAL(fault.wanted_bytes, 4 * MIB);
    CHECK_EQUAL(fault.free_bytes, 12345);
    CHECK(fault.has_free);
    CHECK_EQUAL(fault.os_errno, ENOSPC);
    CHECK_EQUAL(file_bytes(in_folder("full")), 0); /* what the reservation left is given back */
    now_free_bytes = 4 * MIB; /* another process's reservation, too */
    CHECK_FAILS(zpp_aio_submit(aio, &job, &request, &fault, &err), ZPP_TIER,
                "has 4194304 free by now (a quota is met, or another program held them); free some");
    CHECK_EQUAL(fault.free_bytes, 4 * MIB);
    now_free_bytes = 12345;
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);

    sys.reserve = refused_reserve;
    aio = new_engine(config);
    memory = arena_block(aio, 4 * MIB);
    plan.from_bytes = MIB;
    set_plan(ERRNO, ENOSPC, 0, 1000, 1);
    CHECK_FAILS(finish(begin(aio, true, in_folder("full2"), memory, 4 * MIB, 0), &err, &fault), ZPP_TIER,
                "its file system has 12345 free; free some, or choose another folder");
    CHECK_EQUAL(fault.free_bytes, 12345);
    CHECK(fault.offset_bytes >= MIB);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(full_disk)

/* Nothing written and no error, again and again, is an error and no endless loop. */
static void empty_writes_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = planned_engine(backend);
    unsigned char data[8192] = {0};
    struct zpp_err err = ZPP_ERR_INIT;
    set_plan(ZERO, 0, 0, 3, 1);
    move(aio, true, in_folder("zero"), data, sizeof data, 0);
    set_plan(ZERO, 0, 0, 1000, 1);
    CHECK_FAILS(finish(begin(aio, true, in_folder("zero"), data, sizeof data, 0), &err, NULL), ZPP_TIER, strerror(EIO));
    set_plan(NORMAL, 0, 0, 0, -1);
    zpp_aio_destroy(aio);
}
ON_EACH(empty_writes)

/* A file that is cut while it is read: the sentence has what it holds and what was wanted. */
static void shrinking_file_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = planned_engine(backend);
    unsigned char *memory = arena_block(aio, MIB);
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = {.os_errno = 0};
    const char *path = in_folder("shrinks");
    static const size_t kept[] = {0, 1, 511, 512, 4096, 70000, 500000, MIB - 1};
    fill(memory, MIB, 0, 1);
    for (size_t index = 0; index < sizeof kept / sizeof *kept; ++index) {
        move(aio, true, path, memory, MIB, 0);
        CHECK_EQUAL(truncate(path, (off_t)kept[index]), 0);
        char wanted[64];
        snprintf(wanted, sizeof wanted, "it holds %zu bytes, wanted %d at offset 0", kept[index], MIB);
        CHECK_FAILS(finish(begin(aio, false, path, memory, MIB, 0), &err, &fault), ZPP_TIER, wanted);
        CHECK_EQUAL(fault.wanted_bytes, MIB);
        fill(memory, MIB, 0, 1);
    }
    move(aio, true, path, memory, 1000, 0);
    move(aio, false, path, memory, 0, 5000); /* no bytes are always there */
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(shrinking_file)

/* --- calls beside reading and writing --- */

static int failing_open(void *ctx, const char *path, int flags) {
    const int *wanted = ctx;
    if (wanted[1] == -1 || (flags & O_DIRECT)) return -wanted[0];
    const int fd = open(path, flags, 0666);
    return fd < 0 ? -errno : fd;
}
static int failing_fstat(void *ctx, int fd, struct zpp_aio_stat *out) {
    (void)fd, (void)out;
    return -*(const int *)ctx;
}
static int no_align(void *ctx, int fd, uint32_t *memory, uint32_t *offset) {
    (void)ctx, (void)fd, (void)memory, (void)offset;
    return -ENOSYS;
}
static int zero_align(void *ctx, int fd, uint32_t *memory, uint32_t *offset) {
    (void)ctx, (void)fd;
    *memory = *offset = 0;
    return 0;
}
static int failing_sync(void *ctx, int fd) {
    (void)ctx, (void)fd;
    return -EIO;
}

static zpp_aio *engine_of_sys(enum zpp_aio_backend backend) {
    struct zpp_aio_config config = plain_config(backend);
    config.sys = &sys;
    return new_engine(config);
}

static void opening_fails(void) {
    make_folder();
    int wanted[2] = {EMFILE, -1};
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    zpp_aio_request *request;
    char data[8192] = {3};
    sys = *zpp_aio_sys_real();
    sys.ctx = wanted;
    sys.open = failing_open;
    zpp_aio *aio = engine_of_sys(ZPP_AIO_THREADS);
    const struct zpp_aio_job job = {.path = in_folder("x"), .memory = data, .bytes = sizeof data, .write = true};
    CHECK_FAILS(zpp_aio_submit(aio, &job, &request, &fault, &err), ZPP_TIER, strerror(EMFILE));
    CHECK_EQUAL(fault.os_errno, EMFILE);
    CHECK(strstr(fault.path, "/x"));
    zpp_aio_destroy(aio);

    wanted[0] = EINVAL; /* as tmpfs answers O_DIRECT */
    wanted[1] = 0;
    const int before = atomic_load(&logged);
    aio = engine_of_sys(ZPP_AIO_THREADS);
    move(aio, true, in_folder("y"), data, sizeof data, 0);
    data[0] = 0;
    move(aio, false, in_folder("y"), data, 5000, 0);
    CHECK_EQUAL(data[0], 3);
    move(aio, true, in_folder("z"), data, sizeof data, 0);
    CHECK_EQUAL(atomic_load(&logged), before + 1);
    CHECK(strstr(last_log, "has no O_DIRECT"));
    zpp_aio_destroy(aio);

    sys = *zpp_aio_sys_real();
    wanted[0] = EIO;
    sys.ctx = wanted;
    sys.fstat = failing_fstat;
    aio = engine_of_sys(ZPP_AIO_THREADS);
    CHECK_FAILS(zpp_aio_submit(aio, &job, &request, &fault, &err), ZPP_TIER, strerror(EIO));
    zpp_aio_destroy(aio);
    remove_folder();
}

/* Kernels that do not tell the alignment get the one that suits all; those that say "none" get the page cache. */
static void alignment_unknown_on(enum zpp_aio_backend backend) {
    unsigned char *memory = malloc(BYTES);
    for (int none = 0; none < 2; ++none) {
        sys = *zpp_aio_sys_real();
        sys.direct_align = none ? zero_align : no_align;
        zpp_aio *aio = engine_of_sys(backend);
        fill(memory, BYTES, 0, 7);
        move(aio, true, in_folder("align"), memory, BYTES, 513);
        memset(memory, 0, BYTES);
        move(aio, false, in_folder("align"), memory, BYTES, 513);
        check_filled(memory, BYTES, 0, 7);
        zpp_aio_destroy(aio);
    }
    free(memory);
}
ON_EACH(alignment_unknown)

static void sync_fails(void) {
    make_folder();
    sys = *zpp_aio_sys_real();
    sys.sync = failing_sync;
    zpp_aio *aio = engine_of_sys(ZPP_AIO_AUTO);
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    char data[100] = {0};
    move(aio, true, in_folder("s"), data, sizeof data, 0);
    CHECK_OK(zpp_aio_flush(aio, false, &patient, &fault, &err));
    CHECK_FAILS(zpp_aio_flush(aio, true, &patient, &fault, &err), ZPP_TIER, "cannot sync");
    CHECK(!strstr(err.text, "0 bytes")); /* none were asked for */
    CHECK_FAILS(zpp_aio_flush(aio, true, &patient, &fault, &err), ZPP_TIER,
                "cannot sync"); /* it is not durable still */
    zpp_aio_destroy(aio);
    remove_folder();
}

/* --- the ring --- */

static int refused_setup(void *ctx, unsigned entries, void *ring, uint32_t flags) {
    (void)entries, (void)ring, (void)flags;
    return -*(const int *)ctx;
}
static atomic_int setups;
static int old_kernel_setup(void *ctx, unsigned entries, void *ring, uint32_t flags) {
    atomic_fetch_add(&setups, 1);
    if (flags) return -EINVAL;
    return zpp_aio_sys_real()->ring_setup(ctx, entries, ring, flags);
}
static int no_tables(void *ctx, void *ring, unsigned buffers, unsigned files) {
    (void)ctx, (void)ring, (void)buffers, (void)files;
    return -EINVAL;
}
static int refused_buffer(void *ctx, void *ring, unsigned slot, void *memory, size_t bytes) {
    (void)ctx, (void)ring, (void)slot, (void)memory, (void)bytes;
    return -ENOMEM;
}
static int refused_file(void *ctx, void *ring, unsigned slot, int fd) {
    (void)ctx, (void)ring, (void)slot, (void)fd;
    return -EBADF;
}
static int refused_lock(void *ctx, void *memory, size_t bytes) {
    (void)ctx, (void)memory, (void)bytes;
    return -ENOMEM;
}
static atomic_int enters;
static int moody_enter(void *ctx, void *ring, unsigned wait) {
    const int number = atomic_fetch_add(&enters, 1);
    if (number % 4 == 1) return -EINTR;
    if (number % 4 == 2) return -EAGAIN;
    if (number % 8 == 3) return -EBUSY;
    return zpp_aio_sys_real()->ring_enter(ctx, ring, wait);
}
static int broken_enter(void *ctx, void *ring, unsigned wait) {
    (void)ctx, (void)ring, (void)wait;
    return -EBADF;
}

static void check_moves(zpp_aio *aio, const char *path) {
    unsigned char *memory = arena_block(aio, BYTES);
    fill(memory, BYTES, 0, 11);
    move(aio, true, path, memory, BYTES, 0);
    memset(memory, 0, BYTES);
    move(aio, false, path, memory, BYTES, 0);
    check_filled(memory, BYTES, 0, 11);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
}

/* io_uring refused: threads do the same, one line to the log; insisting on the ring is an error that says why. */
static void ring_refused(void) {
    make_folder();
    static const int refusals[] = {ENOSYS, EPERM, ENOMEM};
    static const char *const words[] = {"the kernel has none", "seccomp", "memlock"};
    for (int index = 0; index < 3; ++index) {
        int os_errno = refusals[index];
        struct zpp_err err = ZPP_ERR_INIT;
        sys = *zpp_aio_sys_real();
        sys.ctx = &os_errno;
        sys.ring_setup = refused_setup;
        const int before = atomic_load(&logged);
        zpp_aio *aio = engine_of_sys(ZPP_AIO_AUTO);
        CHECK_EQUAL(atomic_load(&logged), before + 1);
        CHECK(strstr(last_log, "with threads instead"));
        struct zpp_aio_figures figures;
        zpp_aio_figures(aio, &figures);
        CHECK(!figures.uring);
        check_moves(aio, in_folder("refused"));
        zpp_aio_destroy(aio);
        if (!machine_has_uring()) continue; /* the sentence would be about the build */
        CHECK(strstr(last_log, words[index]));
        struct zpp_aio_config config = plain_config(ZPP_AIO_URING);
        config.sys = &sys;
        CHECK_FAILS(zpp_aio_create(&config, &aio, &err), ZPP_NOT_BUILT, words[index]);
        CHECK_EQUAL(err.os_errno, os_errno);
    }
    remove_folder();
}

/* What only makes the ring faster may be missing: flags of new kernels, the tables, room in them, locked memory. */
static void poor_ring(void) {
    make_folder();
    if (machine_has_uring()) {
        sys = *zpp_aio_sys_real();
        sys.ring_setup = old_kernel_setup;
        zpp_aio *aio = engine_of_sys(ZPP_AIO_URING);
        CHECK_EQUAL(atomic_load(&setups), 3);
        check_moves(aio, in_folder("old"));
        zpp_aio_destroy(aio);

        sys = *zpp_aio_sys_real();
        sys.ring_tables = no_tables;
        aio = engine_of_sys(ZPP_AIO_URING);
        check_moves(aio, in_folder("tables"));
        zpp_aio_destroy(aio);

        sys = *zpp_aio_sys_real();
        sys.ring_buffer = refused_buffer;
        sys.ring_file = refused_file;
        const int before = atomic_load(&logged);
        aio = engine_of_sys(ZPP_AIO_URING);
        check_moves(aio, in_folder("memlock"));
        check_moves(aio, in_folder("memlock2"));
        zpp_aio_destroy(aio);
        CHECK_EQUAL(atomic_load(&logged), before + 1);
        CHECK(strstr(last_log, "memlock limit is"));

        struct zpp_aio_config config = plain_config(ZPP_AIO_URING);
        config.sqpoll = true;
        aio = new_engine(config);
        check_moves(aio, in_folder("sqpoll"));
        zpp_aio_destroy(aio);
    }
    sys = *zpp_aio_sys_real();
    sys.lock = refused_lock;
    const int before = atomic_load(&logged);
    zpp_aio *aio = engine_of_sys(ZPP_AIO_THREADS);
    check_moves(aio, in_folder("mlock"));
    check_moves(aio, in_folder("mlock2"));
    zpp_aio_destroy(aio);
    CHECK_EQUAL(atomic_load(&logged), before + 1);
    CHECK(strstr(last_log, "memlock limit is"));
    remove_folder();
}

static void moody_ring(void) {
    if (!machine_has_uring()) return;
    make_folder();
    sys = *zpp_aio_sys_real();
    sys.ring_enter = moody_enter;
    zpp_aio *aio = engine_of_sys(ZPP_AIO_URING);
    for (int round = 0; round < 5; ++round) check_moves(aio, in_folder("moody"));
    zpp_aio_destroy(aio);
    remove_folder();
}

/* The ring itself fails: every request ends with the error, so does every later one, and closing works. */
static void broken_ring(void) {
    if (!machine_has_uring()) return;
    make_folder();
    sys = *zpp_aio_sys_real();
    sys.ring_enter = broken_enter;
    zpp_aio *aio = engine_of_sys(ZPP_AIO_URING);
    struct zpp_err err = ZPP_ERR_INIT;
    char data[4096] = {0};
    zpp_aio_request *request = NULL;
    const struct zpp_aio_job job = {.path = in_folder("b"), .memory = data, .bytes = sizeof data, .write = true};
    zpp_status status = zpp_aio_submit(aio, &job, &request, NULL, &err);
    if (status == ZPP_OK) status = finish(request, &err, NULL); /* or the ring had failed before */
    CHECK_FAILS(status, ZPP_OS, "io_uring_enter");
    CHECK_FAILS(zpp_aio_submit(aio, &job, &request, NULL, &err), ZPP_OS, "io_uring_enter");
    zpp_aio_destroy(aio);
    remove_folder();
}

static void after_fork(void) {
    make_folder();
    zpp_aio *aio = new_engine(plain_config(ZPP_AIO_AUTO));
    const pid_t child = fork();
    if (child == 0) {
        struct zpp_err err = ZPP_ERR_INIT;
        char data[10] = {0};
        zpp_aio_request *request;
        const struct zpp_aio_job job = {.path = in_folder("f"), .memory = data, .bytes = sizeof data, .write = true};
        const bool refused = zpp_aio_submit(aio, &job, &request, NULL, &err) == ZPP_STATE && strstr(err.text, "forked");
        zpp_aio_destroy(aio); /* returns, and leaves the parent's threads alone */
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    check_moves(aio, in_folder("parent"));
    zpp_aio_destroy(aio);
    remove_folder();
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(short_results),     TEST(interrupted),  TEST(direct_refused_late), TEST(disk_error),
        TEST(full_disk),         TEST(empty_writes), TEST(shrinking_file),      TEST(opening_fails),
        TEST(alignment_unknown), TEST(sync_fails),   TEST(ring_refused),        TEST(poor_ring),
        TEST(moody_ring),        TEST(broken_ring),  TEST(after_fork),          {0},
    };
    return test_main(argc, argv, cases);
}
