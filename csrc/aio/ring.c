/* SPDX-License-Identifier: Apache-2.0
 *
 * io_uring: ring.h. Without liburing zpp_ring_create returns NOT_BUILT, and nothing else is used.
 */
#include "ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#ifdef ZPP_HAVE_URING

#include <liburing.h>

enum { PIECE_SHIFT = 30 /* the kernel registers at most 1 GiB as one buffer */ };

struct zpp_ring {
    const struct zpp_aio_sys *sys;
    struct io_uring uring;
    bool has_uring, disabled, has_buffers, has_files;
    int wake_fd;
    uint64_t wake_value;
    bool wake_armed;
    struct zpp_ring_result *ready; /* results that sys->ring_op produced: [depth] */
    size_t ready_count;
    bool buffer_taken[ZPP_RING_BUFFERS], file_taken[ZPP_RING_FILES];
};

static zpp_status refused(int os_errno, struct zpp_err *err) {
    const char *hint = os_errno == ENOSYS ? "the kernel has none"
                       : os_errno == EPERM || os_errno == EACCES
                           ? "a seccomp filter (containers) or kernel.io_uring_disabled refuses it"
                       : os_errno == ENOMEM ? "the memlock limit is too small for it (ulimit -l)"
                                            : "the kernel refuses it";
    const zpp_status status = zpp_fail(err, ZPP_NOT_BUILT, "aio: no io_uring: %s: %s", hint, strerror(os_errno));
    if (err) err->os_errno = os_errno;
    return status;
}

/* Set the ring up with the best flags of this kernel: completions handled only when our thread asks (6.1), else without
 * interrupting it (5.19), else plain. */
static int set_up(zpp_ring *ring, unsigned entries, bool sqpoll) {
    const uint32_t deferred = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED;
    const uint32_t normal[] = {deferred, IORING_SETUP_COOP_TASKRUN, 0};
    const uint32_t polled[] = {IORING_SETUP_SQPOLL, IORING_SETUP_SQPOLL, IORING_SETUP_SQPOLL};
    const uint32_t *flags = sqpoll ? polled : normal;
    int failed = -EINVAL;
    for (int attempt = 0; attempt < 3 && failed == -EINVAL; ++attempt) {
        failed = ring->sys->ring_setup(ring->sys->ctx, entries, &ring->uring, flags[attempt]);
        ring->disabled = (flags[attempt] & IORING_SETUP_R_DISABLED) != 0;
    }
    ring->has_uring = failed == 0;
    return failed;
}

zpp_status zpp_ring_create(unsigned depth, bool sqpoll, const struct zpp_aio_sys *sys, zpp_ring **out,
                           struct zpp_err *err) {
    zpp_ring *ring = calloc(1, sizeof *ring);
    if (!ring) return zpp_fail(err, ZPP_NOMEM, "aio: no memory for a ring");
    ring->sys = sys;
    ring->ready = calloc(depth, sizeof *ring->ready);
    ring->wake_fd = eventfd(0, EFD_CLOEXEC);
    zpp_status status = ZPP_OK;
    if (!ring->ready) status = zpp_fail(err, ZPP_NOMEM, "aio: no memory for %u results", depth);
    else if (ring->wake_fd < 0) status = zpp_fail_os(err, errno, "aio: eventfd");
    const int failed = status == ZPP_OK ? set_up(ring, depth + 1, sqpoll) : 0;
    if (failed < 0) status = refused(-failed, err);
    if (status != ZPP_OK) {
        zpp_ring_destroy(ring);
        return status;
    }
    const int tables = sys->ring_tables(sys->ctx, &ring->uring, ZPP_RING_BUFFERS, ZPP_RING_FILES);
    ring->has_buffers = tables > 0 && (tables & 1);
    ring->has_files = tables > 0 && (tables & 2);
    *out = ring;
    return ZPP_OK;
}

void zpp_ring_destroy(zpp_ring *ring) {
    if (!ring) return;
    if (ring->has_uring) io_uring_queue_exit(&ring->uring);
    if (ring->wake_fd >= 0) close(ring->wake_fd);
    free(ring->ready);
    free(ring);
}

zpp_status zpp_ring_start(zpp_ring *ring, struct zpp_err *err) {
    const int failed = ring->disabled ? io_uring_enable_rings(&ring->uring) : 0;
    return failed < 0 ? zpp_fail_os(err, -failed, "aio: io_uring_enable_rings") : ZPP_OK;
}

void zpp_ring_wake(zpp_ring *ring) {
    const uint64_t one = 1;
    ssize_t put;
    do put = write(ring->wake_fd, &one, sizeof one); /* cannot block: the counter is read long before it is full */
    while (put < 0 && errno == EINTR);
}

/* --- tables ------------------------------------------------------------------------------------------------------- */

static int find_free(const bool *taken, int total, int wanted) {
    for (int first = 0, run = 0, slot = 0; slot < total; ++slot) {
        run = taken[slot] ? 0 : run + 1;
        first = slot - run + 1;
        if (run == wanted) return first;
    }
    return -1;
}

int zpp_ring_add_buffer(zpp_ring *ring, void *memory, size_t bytes, int *slots, int *os_errno) {
    const int pieces = (int)((bytes + ((size_t)1 << PIECE_SHIFT) - 1) >> PIECE_SHIFT);
    const int first = ring->has_buffers ? find_free(ring->buffer_taken, ZPP_RING_BUFFERS, pieces) : -1;
    *os_errno = 0;
    *slots = pieces;
    for (int piece = 0; first >= 0 && piece < pieces; ++piece) {
        const size_t at = (size_t)piece << PIECE_SHIFT, left = bytes - at, most = (size_t)1 << PIECE_SHIFT;
        const int failed = ring->sys->ring_buffer(ring->sys->ctx, &ring->uring, (unsigned)(first + piece),
                                                  (char *)memory + at, left < most ? left : most);
        if (failed < 0) {
            zpp_ring_remove_buffer(ring, first, piece);
            *os_errno = -failed;
            return -1;
        }
        ring->buffer_taken[first + piece] = true;
    }
    return first;
}

void zpp_ring_remove_buffer(zpp_ring *ring, int first_slot, int slots) {
    for (int slot = first_slot; slot < first_slot + slots; ++slot) {
        ring->sys->ring_buffer(ring->sys->ctx, &ring->uring, (unsigned)slot, NULL, 0);
        ring->buffer_taken[slot] = false;
    }
}

int zpp_ring_add_file(zpp_ring *ring, int fd) {
    const int slot = ring->has_files ? find_free(ring->file_taken, ZPP_RING_FILES, 1) : -1;
    if (slot < 0 || ring->sys->ring_file(ring->sys->ctx, &ring->uring, (unsigned)slot, fd) < 0) return -1;
    ring->file_taken[slot] = true;
    return slot;
}

void zpp_ring_remove_file(zpp_ring *ring, int slot) {
    if (slot < 0) return;
    ring->sys->ring_file(ring->sys->ctx, &ring->uring, (unsigned)slot, -1);
    ring->file_taken[slot] = false;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

/* Return an entry. There is always one: depth + 1 exist, and what is prepared is submitted before more is prepared. */
static struct io_uring_sqe *next_entry(zpp_ring *ring) { return io_uring_get_sqe(&ring->uring); }

void zpp_ring_push(zpp_ring *ring, const struct zpp_aio_op *wanted, void *tag) {
    struct zpp_aio_op op = *wanted;
    int result = 0;
    struct io_uring_sqe *entry = NULL;
    if (ring->sys->ring_op && ring->sys->ring_op(ring->sys->ctx, &op, &result)) {
        ring->ready[ring->ready_count++] = (struct zpp_ring_result){tag, result};
        return;
    }
    entry = next_entry(ring);
    if (!entry) { /* an EBUSY ring has not taken an entry yet: try again later */
        ring->ready[ring->ready_count++] = (struct zpp_ring_result){tag, -EAGAIN};
        return;
    }
    const int fd = op.file_slot >= 0 ? op.file_slot : op.fd;
    const unsigned bytes = (unsigned)op.bytes;
    if (op.buffer_slot >= 0 && op.write)
        io_uring_prep_write_fixed(entry, fd, op.memory, bytes, op.offset_bytes, op.buffer_slot);
    else if (op.buffer_slot >= 0)
        io_uring_prep_read_fixed(entry, fd, op.memory, bytes, op.offset_bytes, op.buffer_slot);
    else if (op.write) io_uring_prep_write(entry, fd, op.memory, bytes, op.offset_bytes);
    else io_uring_prep_read(entry, fd, op.memory, bytes, op.offset_bytes);
    if (op.file_slot >= 0) entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(entry, tag);
}

static void arm_wake(zpp_ring *ring) {
    struct io_uring_sqe *entry = ring->wake_armed ? NULL : next_entry(ring);
    if (!entry) return;
    io_uring_prep_read(entry, ring->wake_fd, &ring->wake_value, sizeof ring->wake_value, 0);
    io_uring_sqe_set_data(entry, NULL);
    ring->wake_armed = true;
}

static size_t reap(zpp_ring *ring, struct zpp_ring_result *out, size_t capacity) {
    size_t count = 0;
    while (count < capacity && ring->ready_count) out[count++] = ring->ready[--ring->ready_count];
    struct io_uring_cqe *seen;
    while (count < capacity && io_uring_peek_cqe(&ring->uring, &seen) == 0 && seen) {
        void *const tag = io_uring_cqe_get_data(seen);
        if (tag) out[count++] = (struct zpp_ring_result){tag, seen->res};
        else ring->wake_armed = false;
        io_uring_cqe_seen(&ring->uring, seen);
    }
    return count;
}

zpp_status zpp_ring_run(zpp_ring *ring, bool wait, struct zpp_ring_result *out, size_t capacity, size_t *count,
                        struct zpp_err *err) {
    arm_wake(ring);
    const int done = ring->sys->ring_enter(ring->sys->ctx, &ring->uring, wait && ring->ready_count == 0);
    *count = 0;
    if (done < 0 && done != -EINTR && done != -EAGAIN && done != -EBUSY && done != -ETIME) {
        return zpp_fail_os(err, -done, "aio: io_uring_enter");
    }
    *count = reap(ring, out, capacity);
    return ZPP_OK;
}

#else /* no liburing */

zpp_status zpp_ring_create(unsigned depth, bool sqpoll, const struct zpp_aio_sys *sys, zpp_ring **out,
                           struct zpp_err *err) {
    (void)depth, (void)sqpoll, (void)sys, (void)out;
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "aio: no io_uring: built without liburing (install liburing-dev and build again)");
}
void zpp_ring_destroy(zpp_ring *ring) { (void)ring; }
zpp_status zpp_ring_start(zpp_ring *ring, struct zpp_err *err) {
    (void)ring;
    return zpp_fail(err, ZPP_NOT_BUILT, "aio: no io_uring in this build");
}
void zpp_ring_wake(zpp_ring *ring) { (void)ring; }
int zpp_ring_add_buffer(zpp_ring *ring, void *memory, size_t bytes, int *slots, int *os_errno) {
    (void)ring, (void)memory, (void)bytes, (void)slots, (void)os_errno;
    return -1;
}
void zpp_ring_remove_buffer(zpp_ring *ring, int first_slot, int slots) { (void)ring, (void)first_slot, (void)slots; }
int zpp_ring_add_file(zpp_ring *ring, int fd) {
    (void)ring, (void)fd;
    return -1;
}
void zpp_ring_remove_file(zpp_ring *ring, int slot) { (void)ring, (void)slot; }
void zpp_ring_push(zpp_ring *ring, const struct zpp_aio_op *op, void *tag) { (void)ring, (void)op, (void)tag; }
zpp_status zpp_ring_run(zpp_ring *ring, bool wait, struct zpp_ring_result *out, size_t capacity, size_t *count,
                        struct zpp_err *err) {
    (void)ring, (void)wait, (void)out, (void)capacity, (void)count;
    return zpp_fail(err, ZPP_NOT_BUILT, "aio: no io_uring in this build");
}

#endif
