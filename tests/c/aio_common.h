/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of csrc/aio share: a folder that goes away again, engines, patterns, and a table of system calls whose
 * failures are planned.
 */
#ifndef ZPP_TESTS_AIO_COMMON_H
#define ZPP_TESTS_AIO_COMMON_H

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../csrc/aio/engine.h"
#include "harness.h"

static char folder[64];
static atomic_int logged; /* lines */
static char last_log[1024];

static inline void count_log(void *ctx, const char *text) {
    (void)ctx;
    snprintf(last_log, sizeof last_log, "%s", text);
    atomic_fetch_add(&logged, 1);
}

static inline void make_folder(void) {
    snprintf(folder, sizeof folder, "aio-test-XXXXXX");
    CHECK(mkdtemp(folder));
}

static inline void remove_folder(void) {
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_EQUAL(system(command), 0);
}

/* Static, one a thread: good until the eighth next call. */
static inline const char *in_folder(const char *name) {
    static _Thread_local char names[8][128];
    static _Thread_local unsigned turn;
    char *out = names[turn++ % 8];
    snprintf(out, sizeof names[0], "%s/%s", folder, name);
    return out;
}

/* As if on disks of their own; made. Static, one set a thread, good until the next call. */
static inline const char *const *disk_folders(unsigned count) {
    static _Thread_local char names[4][96];
    static _Thread_local const char *folders[4];
    CHECK(count <= 4);
    for (unsigned disk = 0; disk < count; ++disk) {
        snprintf(names[disk], sizeof names[disk], "%s/disk%u", folder, disk);
        folders[disk] = names[disk];
        CHECK(mkdir(names[disk], 0777) == 0 || errno == EEXIST);
    }
    return folders;
}

/* A file in one of them. */
static inline const char *on_disk(unsigned disk, const char *name) {
    char inside[64];
    snprintf(inside, sizeof inside, "disk%u/%s", disk, name);
    return in_folder(inside);
}

static inline struct zpp_aio_config plain_config(enum zpp_aio_backend backend) {
    return (struct zpp_aio_config){
        .depth = 8, .block_bytes = 64 << 10, .direct = true, .backend = backend, .threads = 3, .log = count_log};
}

static inline zpp_aio *new_engine(struct zpp_aio_config config) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_aio *aio = NULL;
    CHECK_OK(zpp_aio_create(&config, &aio, &err));
    return aio;
}

static inline bool machine_has_uring(void) {
    struct zpp_aio_config config = plain_config(ZPP_AIO_URING);
    zpp_aio *aio = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_aio_create(&config, &aio, &err) != ZPP_OK) return false;
    zpp_aio_destroy(aio);
    return true;
}

static inline unsigned char pattern(uint64_t at, unsigned seed) {
    return (unsigned char)((at * 2654435761u + seed) >> 13);
}

static inline void fill(unsigned char *memory, size_t bytes, uint64_t from, unsigned seed) {
    for (size_t index = 0; index < bytes; ++index) memory[index] = pattern(from + index, seed);
}

static inline void check_filled(const unsigned char *memory, size_t bytes, uint64_t from, unsigned seed) {
    for (size_t index = 0; index < bytes; ++index) CHECK_EQUAL(memory[index], pattern(from + index, seed));
}

static const struct zpp_wait patient = {.timeout_ns = 60000000000u};

static inline zpp_aio_request *begin(zpp_aio *aio, bool write, const char *path, void *memory, size_t bytes,
                                     uint64_t offset) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    zpp_aio_request *request = NULL;
    const struct zpp_aio_job job = {
        .path = path, .memory = memory, .bytes = bytes, .offset_bytes = offset, .write = write};
    CHECK_OK(zpp_aio_submit(aio, &job, &request, &fault, &err));
    return request;
}

/* Wait and release: the outcome. */
static inline zpp_status finish(zpp_aio_request *request, struct zpp_err *err, struct zpp_aio_fault *fault) {
    const zpp_status status = zpp_aio_wait(request, &patient, err);
    const struct zpp_aio_fault *seen = zpp_aio_request_fault(request);
    if (seen && fault) *fault = *seen;
    zpp_aio_release(request);
    return status;
}

static inline void move(zpp_aio *aio, bool write, const char *path, void *memory, size_t bytes, uint64_t offset) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(finish(begin(aio, write, path, memory, bytes, offset), &err, NULL));
}

static inline uint64_t file_bytes(const char *path) {
    struct stat seen;
    CHECK_EQUAL(stat(path, &seen), 0);
    return (uint64_t)seen.st_size;
}

static inline void *arena_block(zpp_aio *aio, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    void *block = NULL;
    CHECK_OK(zpp_aio_arena_alloc(zpp_aio_get_arena(aio), bytes, &block, &err));
    return block;
}

/* Runs `body` with each driver that the machine has. */
static inline void with_each_backend(void (*body)(enum zpp_aio_backend backend)) {
    make_folder();
    body(ZPP_AIO_THREADS);
    remove_folder();
    if (!machine_has_uring()) {
        printf("(no io_uring here) ");
        return;
    }
    make_folder();
    body(ZPP_AIO_URING);
    remove_folder();
}
#define ON_EACH(name)                                                                                                  \
    static void name(void) { with_each_backend(name##_on); }

#endif
