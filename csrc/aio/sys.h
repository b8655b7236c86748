/* SPDX-License-Identifier: Apache-2.0
 *
 * Every call that the I/O engine makes into the operating system, as one table. Production uses zpp_aio_sys_real();
 * tests copy it and replace rows, so that they can produce each failure of each call (tests/c/test_aio_faults.c).
 *
 * Every row returns what its system call returns, with -errno in place of -1. `ring` is a `struct io_uring *` of
 * liburing, opaque here so that builds without liburing have the same table.
 *
 * Threads: rows are called from any thread, the ring_* rows (but ring_setup) from the ring's own thread only.
 */
#ifndef ZPP_AIO_SYS_H
#define ZPP_AIO_SYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* One read or write as the kernel sees it. */
struct zpp_aio_op {
    void *memory; /* borrowed until the result is there */
    size_t bytes;
    uint64_t offset_bytes;
    int fd;
    int file_slot;   /* place in the ring's table of files, or -1 */
    int buffer_slot; /* place in the ring's table of buffers, or -1 */
    bool write;
};

/* The identity of a file, and its length. */
struct zpp_aio_stat {
    uint64_t device, inode, bytes;
};

struct zpp_aio_sys {
    void *ctx; /* borrowed; the first argument of every row */
    int (*open)(void *ctx, const char *path, int flags);
    int (*close)(void *ctx, int fd);
    int (*stat)(void *ctx, const char *path, struct zpp_aio_stat *out);
    int (*fstat)(void *ctx, int fd, struct zpp_aio_stat *out);
    /* The alignment that O_DIRECT requires of addresses, and of offsets and sizes; -ENOSYS where the kernel has no
     * answer. */
    int (*direct_align)(void *ctx, int fd, uint32_t *memory_bytes, uint32_t *offset_bytes);
    int (*reserve)(void *ctx, int fd, uint64_t offset_bytes, uint64_t bytes); /* grows the file, too */
    int (*truncate)(void *ctx, int fd, uint64_t bytes);
    int (*sync)(void *ctx, int fd);                      /* returns when data are on the device */
    int (*free_bytes)(void *ctx, int fd, uint64_t *out); /* of the file system */
    ssize_t (*pread)(void *ctx, int fd, void *memory, size_t bytes, uint64_t offset_bytes);
    ssize_t (*pwrite)(void *ctx, int fd, const void *memory, size_t bytes, uint64_t offset_bytes);
    int (*lock)(void *ctx, void *memory, size_t bytes); /* mlock */
    int (*unlock)(void *ctx, void *memory, size_t bytes);

    int (*ring_setup)(void *ctx, unsigned entries, void *ring, uint32_t flags);
    int (*ring_enter)(void *ctx, void *ring, unsigned wait_results); /* submit what is prepared, wait for results */
    int (*ring_tables)(void *ctx, void *ring, unsigned buffers,
                       unsigned files); /* bit 0: buffers, bit 1: files; or -errno */
    int (*ring_buffer)(void *ctx, void *ring, unsigned slot, void *memory,
                       size_t bytes);                               /* memory NULL: empty the slot */
    int (*ring_file)(void *ctx, void *ring, unsigned slot, int fd); /* fd -1: empty the slot */
    /* Inspects an operation before it is submitted, and may shorten it. Returns true to submit nothing: `*result` is
     * then its result. NULL in production. */
    bool (*ring_op)(void *ctx, struct zpp_aio_op *op, int *result);
};

/* Return the real calls. Static. */
const struct zpp_aio_sys *zpp_aio_sys_real(void);

#endif
