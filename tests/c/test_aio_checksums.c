/* SPDX-License-Identifier: Apache-2.0
 *
 * Checksums of files: the table against a plain model of it, and engines that meet bytes which they did not write.
 */
#include "aio_common.h"

#include <inttypes.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "../../csrc/aio/checksums.h"
#include "../../csrc/base/mem.h"

enum { KIB = 1024, MIB = 1024 * 1024, PAGE = ZPP_BLOCK_BYTES };

static uint64_t seed = 1;
static uint64_t next(uint64_t below) {
    seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (seed >> 33) % below;
}

/* --- the table --- */

enum { FILE_BYTES = 20 * PAGE, MOST_FRAGMENTS = 1 << 16, ROUNDS = 3000 };

/* Which fragment each byte was written with; a fragment of which anything was overwritten or cleared has no sum. */
struct model {
    unsigned char data[FILE_BYTES];
    unsigned fragment[FILE_BYTES]; /* 0: none */
    bool broken[MOST_FRAGMENTS];
    unsigned fragments;
};

static void model_write(struct model *model, size_t from, size_t bytes, bool clear) {
    for (size_t at = from; at < from + bytes; ++at) {
        if (!clear && (at == from || at % PAGE == 0)) ++model->fragments;
        model->broken[model->fragment[at]] = model->fragment[at] != 0;
        model->fragment[at] = clear ? 0 : model->fragments;
        if (!clear) model->data[at] = (unsigned char)next(256);
    }
}

static size_t model_sums(const struct model *model, size_t from, size_t bytes) {
    size_t known = 0;
    for (size_t at = from; at < from + bytes; ++at) known += model->fragment[at] && !model->broken[model->fragment[at]];
    return known;
}

static void check_table(zpp_checksums *sums) {
    static struct model model;
    static unsigned char copy[FILE_BYTES];
    memset(&model, 0, sizeof model);
    for (int round = 0; round < ROUNDS && model.fragments + 64 < MOST_FRAGMENTS; ++round) {
        size_t from = next(FILE_BYTES - 300), bytes = 300 + next(round % 5 ? 500 : 6 * PAGE);
        if (round % 3 == 0) from -= from % PAGE; /* whole pages now and then */
        if (round % 3 == 0) bytes += PAGE - bytes % PAGE;
        if (bytes > FILE_BYTES - from) bytes = FILE_BYTES - from;
        const bool clear = round % 17 == 0;
        model_write(&model, from, bytes, clear);
        if (clear) zpp_checksums_clear(sums, from, bytes);
        else zpp_checksums_set(sums, from, model.data + from, bytes, round % 2 ? copy : NULL);
        if (!clear && round % 2) CHECK_EQUAL(memcmp(copy, model.data + from, bytes), 0);

        struct zpp_checksums_bad bad;
        size_t checked = 0;
        CHECK(zpp_checksums_check(sums, 0, model.data, FILE_BYTES, 0, FILE_BYTES, &checked, &bad));
        CHECK_EQUAL(checked, model_sums(&model, 0, FILE_BYTES));
        const size_t page = next(FILE_BYTES / PAGE), wanted = page * PAGE + next(PAGE - 1);
        const size_t some = 1 + next(PAGE - wanted % PAGE);
        CHECK(zpp_checksums_check(sums, page * PAGE, model.data + page * PAGE, PAGE, wanted, some, &checked, &bad));
        CHECK_EQUAL(checked, model_sums(&model, wanted, some));

        const size_t flipped = next(FILE_BYTES);
        model.data[flipped] ^= (unsigned char)(1u << next(8));
        const unsigned fragment = model.fragment[flipped];
        const bool known = fragment && !model.broken[fragment];
        CHECK_EQUAL(zpp_checksums_check(sums, 0, model.data, FILE_BYTES, flipped, 1, &checked, &bad), !known);
        if (known) CHECK(bad.offset_bytes <= flipped && flipped < bad.offset_bytes + bad.bytes);
        if (known) CHECK(bad.read != bad.wrote);
        if (known) CHECK(model.fragment[bad.offset_bytes] == fragment && bad.bytes <= PAGE);
        /* A read of no byte of that fragment does not report it. */
        const size_t other = next(FILE_BYTES);
        if (model.fragment[other] != fragment)
            CHECK(zpp_checksums_check(sums, 0, model.data, FILE_BYTES, other, 1, &checked, &bad));
        model_write(&model, flipped, 1, true);
        zpp_checksums_clear(sums, flipped, 1);
    }
    CHECK(zpp_checksums_bytes(sums) >= FILE_BYTES / PAGE * 8);
    zpp_checksums_clear_all(sums);
    size_t checked;
    struct zpp_checksums_bad bad;
    CHECK(zpp_checksums_check(sums, 0, model.data, FILE_BYTES, 0, FILE_BYTES, &checked, &bad));
    CHECK_EQUAL(checked, 0);
}

static void own_table(void) {
    zpp_checksums *sums = zpp_checksums_create();
    CHECK(sums);
    check_table(sums);
    zpp_checksums_unref(sums);
    zpp_checksums_unref(NULL);
}

static void *shared_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void shared_table(void) {
    const size_t bytes = zpp_checksums_shared_bytes(FILE_BYTES);
    void *memory = shared_memory(bytes);
    zpp_checksums *sums = zpp_checksums_attach(memory, FILE_BYTES, true);
    CHECK(sums);
    check_table(sums);
    unsigned char page[PAGE] = {5};
    size_t checked;
    struct zpp_checksums_bad bad;
    zpp_checksums_set(sums, FILE_BYTES, page, PAGE,
                      NULL); /* beyond the file: there is no room, and so nothing to check */
    page[0] = 6;
    CHECK(zpp_checksums_check(sums, FILE_BYTES, page, PAGE, FILE_BYTES, PAGE, &checked, &bad));
    CHECK_EQUAL(checked, 0);
#ifndef ZPP_UNDER_TSAN /* it does not follow locks over processes */
    const pid_t child = fork();
    if (child == 0) {
        zpp_checksums *theirs = zpp_checksums_attach(memory, FILE_BYTES, false);
        zpp_checksums_set(theirs, 3 * PAGE, page, PAGE, NULL);
        _exit(theirs ? 0 : 1);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    CHECK(zpp_checksums_check(sums, 3 * PAGE, page, PAGE, 3 * PAGE, PAGE, &checked, &bad));
    CHECK_EQUAL(checked, PAGE);
    page[PAGE - 1] = 1;
    CHECK(!zpp_checksums_check(sums, 3 * PAGE, page, PAGE, 3 * PAGE, PAGE, &checked, &bad));
#endif
    zpp_checksums_unref(sums);
    munmap(memory, bytes);
}

/* More pieces of a page than have room are not checked, and nothing else changes. */
static void crowded_page(void) {
    zpp_checksums *sums = zpp_checksums_create();
    unsigned char page[PAGE];
    size_t checked;
    struct zpp_checksums_bad bad;
    fill(page, PAGE, 0, 1);
    for (size_t at = 0; at < PAGE; at += 32) zpp_checksums_set(sums, at, page + at, 32, NULL);
    CHECK(zpp_checksums_check(sums, 0, page, PAGE, 0, PAGE, &checked, &bad));
    CHECK_EQUAL(checked, 32 * ZPP_SUMS_FRAGMENTS);
    page[PAGE - 1] ^= 1;
    CHECK(zpp_checksums_check(sums, 0, page, PAGE, 0, PAGE, &checked, &bad));
    page[0] ^= 1;
    CHECK(!zpp_checksums_check(sums, 0, page, PAGE, 0, PAGE, &checked, &bad));
    zpp_checksums_set(sums, 0, page, PAGE, NULL);
    CHECK(zpp_checksums_check(sums, 0, page, PAGE, 0, PAGE, &checked, &bad));
    CHECK_EQUAL(checked, PAGE);
    zpp_checksums_unref(sums);
}

/* --- engines --- */

static struct zpp_aio_config summing_config(enum zpp_aio_backend backend) {
    struct zpp_aio_config config = plain_config(backend);
    config.checksums = true;
    return config;
}

static void flip(const char *path, uint64_t at) {
    unsigned char byte;
    const int fd = open(path, O_RDWR);
    CHECK_EQUAL(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= 0x10;
    CHECK_EQUAL(pwrite(fd, &byte, 1, (off_t)at), 1);
    CHECK_EQUAL(fsync(fd), 0);
    close(fd);
}

static uint64_t checked_bytes(zpp_aio *aio) {
    struct zpp_aio_figures figures;
    zpp_aio_figures(aio, &figures);
    CHECK(figures.checked_bytes <= figures.read_bytes);
    return figures.checked_bytes;
}

/* Whatever was written is checked when it is read, wherever it begins and ends, in any memory, through any door. */
static void everything_is_checked_on(enum zpp_aio_backend backend) {
    static const size_t offsets[] = {0, 1, 4096, 4095, 70001, 131072};
    static const size_t sizes[] = {1, 511, 4096, 4097, 65537, 300 * KIB + 5};
    for (int direct = 0; direct < 2; ++direct) {
        struct zpp_aio_config config = summing_config(backend);
        config.direct = direct;
        config.block_bytes = direct ? 64 * KIB : 4 * KIB;
        zpp_aio *aio = new_engine(config);
        unsigned char *memory = arena_block(aio, 512 * KIB);
        const char *path = in_folder(direct ? "direct" : "buffered");
        uint64_t wanted = 0;
        unsigned round = 0;
        for (size_t size = 0; size < sizeof sizes / sizeof *sizes; ++size)
            for (size_t at = 0; at < sizeof offsets / sizeof *offsets; ++at, ++round) {
                unsigned char *data = memory + (round % 3 ? 0 : 3);
                fill(data, sizes[size], offsets[at], round);
                move(aio, true, path, data, sizes[size], offsets[at]);
                memset(data, 0, sizes[size]);
                move(aio, false, path, data, sizes[size], offsets[at]);
                check_filled(data, sizes[size], offsets[at], round);
                wanted += sizes[size];
                CHECK_EQUAL(checked_bytes(aio), wanted);
            }
        zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
        zpp_aio_destroy(aio);
    }
}
ON_EACH(everything_is_checked)

/* A bit that changed on the disk: file, offset, bytes, both sums. The rest of the file is good; writing mends it. */
static void a_bit_that_changed_on(enum zpp_aio_backend backend) {
    static const uint64_t flips[] = {0, 4095, 4096, 100000, 299 * KIB, 300 * KIB + 4};
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = {.os_errno = 1};
    zpp_aio *aio = new_engine(summing_config(backend));
    unsigned char *memory = arena_block(aio, 512 * KIB);
    const size_t bytes = 300 * KIB + 5;
    const char *path = in_folder("flipped");
    for (size_t index = 0; index < sizeof flips / sizeof *flips; ++index) {
        fill(memory, bytes, 0, 1);
        move(aio, true, path, memory, bytes, 0);
        flip(path, flips[index]);
        CHECK_FAILS(finish(begin(aio, false, path, memory, bytes, 0), &err, &fault), ZPP_TIER,
                    "does not hold what was written");
        CHECK(strstr(err.text, "/flipped\"") && strstr(err.text, "use another disk, and go on from a checkpoint"));
        CHECK(fault.offset_bytes <= flips[index] && flips[index] < fault.offset_bytes + fault.wanted_bytes);
        CHECK(fault.wanted_bytes <= PAGE && fault.offset_bytes % PAGE == 0 && fault.os_errno == 0);
        char offset[64];
        snprintf(offset, sizeof offset, "%" PRIu64 " bytes at offset %" PRIu64, fault.wanted_bytes, fault.offset_bytes);
        CHECK(strstr(err.text, offset));
        const uint64_t page = flips[index] / PAGE;
        if (page) move(aio, false, path, memory, (size_t)(page * PAGE), 0); /* what lies before is good */
        CHECK_OK(zpp_aio_flush(aio, false, &patient, NULL, &err));
    }
    fill(memory, PAGE, 0, 9);
    flip(path, 300 * KIB + 4);
    move(aio, true, path, memory, bytes, 0);
    flip(path, 5);
    CHECK_FAILS(finish(begin(aio, false, path, memory, 6, 0), &err, &fault), ZPP_TIER, "does not hold");
    move(aio, true, path, memory, PAGE, 0);
    move(aio, false, path, memory, bytes, 0);

    flip(path, 5); /* on purpose, this time */
    zpp_aio_forget(aio, path);
    const uint64_t before = checked_bytes(aio);
    move(aio, false, path, memory, bytes, 0);
    CHECK_EQUAL(checked_bytes(aio), before);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(a_bit_that_changed)

/* A file of that name that is another one is not checked against the first one's sums. */
static void another_file_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(summing_config(backend));
    unsigned char data[2 * PAGE];
    const char *path = in_folder("other");
    fill(data, sizeof data, 0, 1);
    move(aio, true, path, data, sizeof data, 0);
    CHECK_EQUAL(unlink(path), 0);
    fill(data, sizeof data, 0, 2);
    const int fd = open(path, O_CREAT | O_WRONLY, 0666);
    CHECK_EQUAL(write(fd, data, sizeof data), sizeof data);
    close(fd);
    move(aio, false, path, data, sizeof data, 0);
    check_filled(data, sizeof data, 0, 2);
    CHECK_EQUAL(checked_bytes(aio), 0);
    zpp_aio_destroy(aio);
}
ON_EACH(another_file)

/* One file by several names has one set of sums: what was written by one is checked by the other, and is never compared
 * with what was known by a name that was closed meanwhile. */
static void several_names_on(enum zpp_aio_backend backend) {
    enum { MORE_THAN_STAY_OPEN = 300 };
    zpp_aio *aio = new_engine(summing_config(backend));
    struct zpp_err err = ZPP_ERR_INIT;
    unsigned char data[2 * PAGE];
    char other[128];
    const char *names[] = {in_folder("one"), in_folder("./one"), in_folder(".//one"), in_folder("././one")};
    for (unsigned round = 0; round < 4; ++round) {
        const uint64_t before = checked_bytes(aio);
        for (unsigned index = 0; round % 2 && index < MORE_THAN_STAY_OPEN; ++index) {
            snprintf(other, sizeof other, "%s/other%u", folder, index);
            move(aio, true, other, data, 1, 0);
        }
        fill(data, sizeof data, 0, round);
        move(aio, true, names[round], data, sizeof data, 0);
        move(aio, false, names[0], data, sizeof data, 0);
        check_filled(data, sizeof data, 0, round);
        CHECK_EQUAL(checked_bytes(aio), before + sizeof data);
    }
    flip(names[0], 5); /* on purpose */
    CHECK_FAILS(finish(begin(aio, false, names[2], data, sizeof data, 0), &err, NULL), ZPP_TIER, "does not hold");
    zpp_aio_forget(aio, names[1]);
    move(aio, false, names[3], data, sizeof data, 0);
    zpp_aio_destroy(aio);
}
ON_EACH(several_names)

/* What the next reads meet: `wrong` of them give bytes that are not the file's; others are short. */
static atomic_int wrong_reads, short_reads, failing_writes;

static ssize_t moody_pread(void *ctx, int fd, void *memory, size_t bytes, uint64_t offset) {
    (void)ctx;
    if (atomic_fetch_sub(&short_reads, 1) > 0 && bytes > 700) bytes = 700;
    const ssize_t got = pread(fd, memory, bytes, (off_t)offset);
    if (got > 0 && atomic_fetch_sub(&wrong_reads, 1) > 0) ((unsigned char *)memory)[got / 2] ^= 2;
    return got < 0 ? -errno : got;
}
static ssize_t moody_pwrite(void *ctx, int fd, const void *memory, size_t bytes, uint64_t offset) {
    (void)ctx;
    if (atomic_fetch_sub(&failing_writes, 1) > 0) return -EIO;
    const ssize_t put = pwrite(fd, memory, bytes, (off_t)offset);
    return put < 0 ? -errno : put;
}
static bool moody_op(void *ctx, struct zpp_aio_op *op, int *result) {
    *result = (int)(op->write ? moody_pwrite(ctx, op->fd, op->memory, op->bytes, op->offset_bytes)
                              : moody_pread(ctx, op->fd, op->memory, op->bytes, op->offset_bytes));
    return true;
}

static void set_moods(int wrong, int shorts, int failing) {
    atomic_store(&wrong_reads, wrong);
    atomic_store(&short_reads, shorts);
    atomic_store(&failing_writes, failing);
}

/* Bytes that were wrong on their way are right when they are read again; short reads are continued; bytes of a write
 * that failed are unknown, and no error later. */
static void on_the_way_on(enum zpp_aio_backend backend) {
    struct zpp_aio_sys sys = *zpp_aio_sys_real();
    sys.pread = moody_pread;
    sys.pwrite = moody_pwrite;
    sys.ring_op = moody_op;
    struct zpp_aio_config config = summing_config(backend);
    config.sys = &sys;
    set_moods(0, 0, 0);
    zpp_aio *aio = new_engine(config);
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_figures figures;
    unsigned char *memory = arena_block(aio, 512 * KIB);
    const size_t bytes = 200 * KIB + 77;
    const char *path = in_folder("way");
    fill(memory, bytes, 0, 1);
    move(aio, true, path, memory, bytes, 3);
    for (int shorts = 0; shorts < 200; shorts += 66) {
        memset(memory, 0, bytes);
        set_moods(1, shorts, 0);
        move(aio, false, path, memory, bytes, 3);
        check_filled(memory, bytes, 0, 1);
        zpp_aio_figures(aio, &figures);
        CHECK(figures.retries > 0 && figures.checked_bytes == figures.read_bytes);
    }
    set_moods(1000, 0, 0);
    CHECK_FAILS(finish(begin(aio, false, path, memory, bytes, 3), &err, NULL), ZPP_TIER, "read a second time");
    set_moods(0, 0, 1);
    CHECK_FAILS(finish(begin(aio, true, path, memory, 64 * KIB, 64 * KIB), &err, NULL), ZPP_TIER, "cannot write");
    zpp_aio_figures(aio, &figures);
    move(aio, false, path, memory, 64 * KIB, 64 * KIB);
    CHECK_EQUAL(checked_bytes(aio), figures.checked_bytes);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(on_the_way)

/* Static, two a thread. */
static const char *in(const char *where, const char *name) {
    static _Thread_local char paths[2][128];
    static _Thread_local unsigned turn;
    char *out = paths[++turn % 2];
    snprintf(out, sizeof paths[0], "%s/%s", where, name);
    return out;
}

/* Stripes: each part has sums of its own, and forgetting the file forgets them all, by any of its names. */
static void stripes_on(enum zpp_aio_backend backend) {
    const char *const folders[] = {in_folder("a"), in_folder("b"), in_folder("c")};
    for (int index = 0; index < 3; ++index) CHECK_EQUAL(mkdir(folders[index], 0777), 0);
    struct zpp_aio_config config = summing_config(backend);
    config.stripes = folders;
    config.stripes_count = 3;
    config.stripe_bytes = 8 * KIB;
    zpp_aio *aio = new_engine(config);
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = {.os_errno = 0};
    unsigned char *memory = arena_block(aio, 128 * KIB);
    fill(memory, 100 * KIB, 0, 1);
    move(aio, true, "striped", memory, 100 * KIB, 77);
    move(aio, false, "striped", memory, 100 * KIB, 77);
    check_filled(memory, 100 * KIB, 0, 1);
    CHECK_EQUAL(checked_bytes(aio), 100 * KIB);
    flip(in_folder("b/striped"), 9000);
    CHECK_FAILS(finish(begin(aio, false, "striped", memory, 100 * KIB, 77), &err, &fault), ZPP_TIER, "/b/striped\"");
    CHECK_EQUAL(fault.offset_bytes, 2 * PAGE);
    zpp_aio_forget(aio, "striped");
    struct zpp_aio_figures figures;
    zpp_aio_figures(aio, &figures);
    CHECK_EQUAL(figures.checksums_bytes, 0);
    move(aio, false, "striped", memory, 100 * KIB, 77);
    move(aio, true, "striped", memory, 100 * KIB, 0);
    for (int index = 0; index < 3; ++index) {
        CHECK_EQUAL(mkdir(in(folders[index], "deep"), 0777), 0);
        CHECK_EQUAL(link(in(folders[index], "striped"), in(folders[index], "deep/striped")), 0);
    }
    zpp_aio_figures(aio, &figures);
    CHECK(figures.checksums_bytes > 0);
    zpp_aio_forget(aio, "./deep/striped"); /* another name of the same parts */
    zpp_aio_figures(aio, &figures);
    CHECK_EQUAL(figures.checksums_bytes, 0);
    move(aio, true, "deep/striped", memory, 50 * KIB, 0);
    for (int index = 0; index < 3; ++index) CHECK_EQUAL(unlink(in(folders[index], "striped")), 0);
    move(aio, true, "striped", memory, 50 * KIB, 0);
    zpp_aio_figures(aio, &figures);
    const size_t both_bytes = figures.checksums_bytes;
    zpp_aio_forget(aio, "striped"); /* and not another file that ends alike */
    zpp_aio_figures(aio, &figures);
    CHECK(figures.checksums_bytes > 0 && figures.checksums_bytes < both_bytes);
    zpp_aio_arena_free(zpp_aio_get_arena(aio), memory);
    zpp_aio_destroy(aio);
}
ON_EACH(stripes)

/* Two engines over one table, as two ranks of a host: each writes and reads its own bytes of the same pages. */
struct neighbour {
    zpp_aio *aio;
    const char *path;
    uint64_t from;
    size_t bytes;
    unsigned seed;
};

static void *neighbour_thread(void *ctx) {
    struct neighbour *own = ctx;
    unsigned char data[3 * PAGE];
    for (unsigned round = 0; round < 200; ++round) {
        fill(data, own->bytes, own->from, own->seed + round);
        move(own->aio, true, own->path, data, own->bytes, own->from);
        memset(data, 0, own->bytes);
        move(own->aio, false, own->path, data, own->bytes, own->from);
        check_filled(data, own->bytes, own->from, own->seed + round);
    }
    return NULL;
}

static void neighbours_on(enum zpp_aio_backend backend) {
    const size_t bytes = zpp_checksums_shared_bytes(MIB);
    void *memory = shared_memory(bytes);
    struct zpp_err err = ZPP_ERR_INIT;
    const char *path = in_folder("shared");
    struct neighbour both[2] = {{.path = path, .from = 0, .bytes = 5000}, {.path = path, .from = 5000, .bytes = 6001}};
    pthread_t threads[2];
    for (int index = 0; index < 2; ++index) {
        both[index].aio = new_engine(summing_config(backend));
        both[index].seed = 1000u * (unsigned)index;
        CHECK_OK(
            zpp_aio_share_checksums(both[index].aio, path, 0, zpp_checksums_attach(memory, MIB, index == 0), &err));
    }
    unsigned char all[11001];
    fill(all, sizeof all, 0, 7);
    move(both[0].aio, true, path, all, sizeof all, 0); /* whole pages, over both parts */
    for (int index = 0; index < 2; ++index)
        CHECK_EQUAL(pthread_create(&threads[index], NULL, neighbour_thread, &both[index]), 0);
    for (int index = 0; index < 2; ++index) pthread_join(threads[index], NULL);
    const uint64_t before = checked_bytes(both[0].aio);
    move(both[0].aio, false, path, all, sizeof all, 0);
    CHECK_EQUAL(checked_bytes(both[0].aio), before + sizeof all); /* the other one's as well */
    flip(path, 5001);
    CHECK_FAILS(finish(begin(both[0].aio, false, path, all, sizeof all, 0), &err, NULL), ZPP_TIER, "at offset 5000");
    move(both[0].aio, false, path, all, 5000, 0);
    for (int index = 0; index < 2; ++index) zpp_aio_destroy(both[index].aio);
    munmap(memory, bytes);
}
ON_EACH(neighbours)

/* Requests of one engine that share a page, and no byte: in their order, so that none meets half of another. */
static void same_page_on(enum zpp_aio_backend backend) {
    zpp_aio *aio = new_engine(summing_config(backend));
    struct zpp_err err = ZPP_ERR_INIT;
    static unsigned char parts[8][512], back[8][512];
    const char *path = in_folder("page");
    for (unsigned round = 0; round < 100; ++round) {
        zpp_aio_request *requests[16];
        for (unsigned part = 0; part < 8; ++part) {
            fill(parts[part], 512, 0, round + part);
            requests[part] = begin(aio, true, path, parts[part], 512, part * 512);
            requests[8 + part] = begin(aio, false, path, back[part], 512, part * 512);
        }
        for (unsigned index = 0; index < 16; ++index) CHECK_OK(finish(requests[index], &err, NULL));
        for (unsigned part = 0; part < 8; ++part) check_filled(back[part], 512, 0, round + part);
    }
    CHECK_EQUAL(checked_bytes(aio), 100 * 8 * 512);
    zpp_aio_destroy(aio);
}
ON_EACH(same_page)

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(own_table),  TEST(shared_table),          TEST(crowded_page),
        TEST(same_page),  TEST(everything_is_checked), TEST(a_bit_that_changed),
        TEST(stripes),    TEST(another_file),          TEST(on_the_way),
        TEST(neighbours), TEST(several_names),         {0},
    };
    return test_main(argc, argv, cases);
}
