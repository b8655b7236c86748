/* SPDX-License-Identifier: Apache-2.0
 *
 * One io_uring: set-up with the best flags that the kernel knows, tables of registered buffers and files, submission in
 * batches, and results by tag. Other threads wake the ring's thread by an eventfd that the ring itself reads, so that
 * it sleeps in one place only.
 *
 * Threads: zpp_ring_create and zpp_ring_destroy by the owner while no thread runs the ring; zpp_ring_wake by any
 * thread; everything else by the ring's thread, which calls zpp_ring_start first (the kernel binds the ring to it).
 */
#ifndef ZPP_AIO_RING_H
#define ZPP_AIO_RING_H

#include "../base/status.h"
#include "sys.h"

typedef struct zpp_ring zpp_ring;

enum { ZPP_RING_BUFFERS = 1024, ZPP_RING_FILES = 128 };

/* Create a ring for `depth` operations at once. Return NOT_BUILT where this build has no liburing, or where the kernel,
 * a seccomp filter or io_uring_disabled refuses; the sentence says which. With `sqpoll` a kernel thread submits. `sys`
 * is borrowed. New; free with zpp_ring_destroy. */
zpp_status zpp_ring_create(unsigned depth, bool sqpoll, const struct zpp_aio_sys *sys, zpp_ring **out,
                           struct zpp_err *err);
void zpp_ring_destroy(zpp_ring *ring); /* NULL is fine; no operation may be in flight */

zpp_status zpp_ring_start(zpp_ring *ring, struct zpp_err *err);
void zpp_ring_wake(zpp_ring *ring);

/* Put memory or a file into the tables. Return the (first) slot, or -1 where the table is full or absent, or the kernel
 * refuses; `*os_errno` then says why (0: the table). Memory above 1 GiB takes several slots, one a GiB. */
int zpp_ring_add_buffer(zpp_ring *ring, void *memory, size_t bytes, int *slots, int *os_errno);
void zpp_ring_remove_buffer(zpp_ring *ring, int first_slot, int slots);
int zpp_ring_add_file(zpp_ring *ring, int fd);
void zpp_ring_remove_file(zpp_ring *ring, int slot);

/* Prepare an operation. There is room for `depth` of them. The result has its `tag`, which is not NULL. */
void zpp_ring_push(zpp_ring *ring, const struct zpp_aio_op *op, void *tag);

struct zpp_ring_result {
    void *tag;
    int result; /* bytes, or -errno */
};
/* Submit what is prepared; with `wait`, sleep until a result or a wake-up is there. Write up to `capacity` results to
 * `out` and their number to `*count`. A failure is one of the ring itself; EINTR and EAGAIN are none. */
zpp_status zpp_ring_run(zpp_ring *ring, bool wait, struct zpp_ring_result *out, size_t capacity, size_t *count,
                        struct zpp_err *err);

#endif
