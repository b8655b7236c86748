/* SPDX-License-Identifier: Apache-2.0
 *
 * The real system calls: sys.h.
 */
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef ZPP_HAVE_URING
#include <liburing.h>
#endif

static int failed(void) { return -errno; }

/* Open a file, and refuse pipes, which have no offsets: open would wait until another process opens the other end. The
 * type is checked before, because some kernels' io_uring refuses with EAGAIN to wait for files opened with O_NONBLOCK.
 * */
static int real_open(void *ctx, const char *path, int flags) {
    (void)ctx;
    struct stat seen;
    if (stat(path, &seen) == 0 && S_ISFIFO(seen.st_mode)) return -ESPIPE;
    const int fd = open(path, flags | O_CLOEXEC, 0666);
    return fd < 0 ? failed() : fd;
}

static int real_close(void *ctx, int fd) {
    (void)ctx;
    return close(fd) < 0 ? failed() : 0;
}

static void keep_stat(const struct stat *from, struct zpp_aio_stat *out) {
    *out = (struct zpp_aio_stat){.device = from->st_dev, .inode = from->st_ino, .bytes = (uint64_t)from->st_size};
}

static int real_stat(void *ctx, const char *path, struct zpp_aio_stat *out) {
    (void)ctx;
    struct stat seen;
    if (stat(path, &seen) < 0) return failed();
    keep_stat(&seen, out);
    return 0;
}

static int real_fstat(void *ctx, int fd, struct zpp_aio_stat *out) {
    (void)ctx;
    struct stat seen;
    if (fstat(fd, &seen) < 0) return failed();
    keep_stat(&seen, out);
    return 0;
}

/* Ask statx for the alignment of O_DIRECT (Linux 6.1). The fields are read by their place in the kernel's fixed layout,
 * because headers older than the kernel have only spare room there. */
static int real_direct_align(void *ctx, int fd, uint32_t *memory_bytes, uint32_t *offset_bytes) {
    (void)ctx;
    enum { STATX_BYTES = 256, MASK_AT = 0, MEMORY_AT = 152, OFFSET_AT = 156 };
    const uint32_t want_dioalign = 0x2000u;
    _Alignas(8) unsigned char answer[STATX_BYTES] = {0};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, want_dioalign, answer) < 0) return failed();
    uint32_t mask;
    __builtin_memcpy(&mask, answer + MASK_AT, sizeof mask);
    if (!(mask & want_dioalign)) return -ENOSYS;
    __builtin_memcpy(memory_bytes, answer + MEMORY_AT, sizeof *memory_bytes);
    __builtin_memcpy(offset_bytes, answer + OFFSET_AT, sizeof *offset_bytes);
    return 0;
}

static int real_reserve(void *ctx, int fd, uint64_t offset_bytes, uint64_t bytes) {
    (void)ctx;
    return fallocate(fd, 0, (off_t)offset_bytes, (off_t)bytes) < 0 ? failed() : 0;
}

static int real_truncate(void *ctx, int fd, uint64_t bytes) {
    (void)ctx;
    return ftruncate(fd, (off_t)bytes) < 0 ? failed() : 0;
}

static int real_sync(void *ctx, int fd) {
    (void)ctx;
    return fdatasync(fd) < 0 ? failed() : 0;
}

static int real_free_bytes(void *ctx, int fd, uint64_t *out) {
    (void)ctx;
    struct statvfs seen;
    if (fstatvfs(fd, &seen) < 0) return failed();
    *out = (uint64_t)seen.f_bavail * seen.f_frsize;
    return 0;
}

static ssize_t real_pread(void *ctx, int fd, void *memory, size_t bytes, uint64_t offset_bytes) {
    (void)ctx;
    const ssize_t got = pread(fd, memory, bytes, (off_t)offset_bytes);
    return got < 0 ? failed() : got;
}

static ssize_t real_pwrite(void *ctx, int fd, const void *memory, size_t bytes, uint64_t offset_bytes) {
    (void)ctx;
    const ssize_t put = pwrite(fd, memory, bytes, (off_t)offset_bytes);
    return put < 0 ? failed() : put;
}

static int real_lock(void *ctx, void *memory, size_t bytes) {
    (void)ctx;
    return mlock(memory, bytes) < 0 ? failed() : 0;
}

static int real_unlock(void *ctx, void *memory, size_t bytes) {
    (void)ctx;
    return munlock(memory, bytes) < 0 ? failed() : 0;
}

#ifdef ZPP_HAVE_URING

static int real_ring_setup(void *ctx, unsigned entries, void *ring, uint32_t flags) {
    (void)ctx;
    struct io_uring_params params = {.flags = flags, .sq_thread_idle = 100 /* ms; read with SQPOLL only */};
    return io_uring_queue_init_params(entries, ring, &params);
}

static int real_ring_enter(void *ctx, void *ring, unsigned wait_results) {
    (void)ctx;
    return wait_results ? io_uring_submit_and_wait(ring, wait_results) : io_uring_submit_and_get_events(ring);
}

static int real_ring_tables(void *ctx, void *ring, unsigned buffers, unsigned files) {
    (void)ctx;
    const int has_buffers = io_uring_register_buffers_sparse(ring, buffers) == 0;
    const int has_files = io_uring_register_files_sparse(ring, files) == 0;
    return has_buffers | has_files << 1;
}

static int real_ring_buffer(void *ctx, void *ring, unsigned slot, void *memory, size_t bytes) {
    (void)ctx;
    const struct iovec piece = {.iov_base = memory, .iov_len = memory ? bytes : 0};
    const __u64 tag = 0;
    const int done = io_uring_register_buffers_update_tag(ring, slot, &piece, &tag, 1);
    return done < 0 ? done : 0;
}

static int real_ring_file(void *ctx, void *ring, unsigned slot, int fd) {
    (void)ctx;
    const int done = io_uring_register_files_update(ring, slot, &fd, 1);
    return done < 0 ? done : 0;
}

#else

static int real_ring_setup(void *ctx, unsigned entries, void *ring, uint32_t flags) {
    (void)ctx, (void)entries, (void)ring, (void)flags;
    return -ENOSYS;
}
static int real_ring_enter(void *ctx, void *ring, unsigned wait_results) {
    (void)ctx, (void)ring, (void)wait_results;
    return -ENOSYS;
}
static int real_ring_tables(void *ctx, void *ring, unsigned buffers, unsigned files) {
    (void)ctx, (void)ring, (void)buffers, (void)files;
    return -ENOSYS;
}
static int real_ring_buffer(void *ctx, void *ring, unsigned slot, void *memory, size_t bytes) {
    (void)ctx, (void)ring, (void)slot, (void)memory, (void)bytes;
    return -ENOSYS;
}
static int real_ring_file(void *ctx, void *ring, unsigned slot, int fd) {
    (void)ctx, (void)ring, (void)slot, (void)fd;
    return -ENOSYS;
}

#endif

const struct zpp_aio_sys *zpp_aio_sys_real(void) {
    static const struct zpp_aio_sys real = {
        .open = real_open,
        .close = real_close,
        .stat = real_stat,
        .fstat = real_fstat,
        .direct_align = real_direct_align,
        .reserve = real_reserve,
        .truncate = real_truncate,
        .sync = real_sync,
        .free_bytes = real_free_bytes,
        .pread = real_pread,
        .pwrite = real_pwrite,
        .lock = real_lock,
        .unlock = real_unlock,
        .ring_setup = real_ring_setup,
        .ring_enter = real_ring_enter,
        .ring_tables = real_ring_tables,
        .ring_buffer = real_ring_buffer,
        .ring_file = real_ring_file,
    };
    return &real;
}
