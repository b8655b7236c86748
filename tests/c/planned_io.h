/* SPDX-License-Identifier: Apache-2.0
 *
 * System calls of an I/O engine whose failures are planned.
 */
#ifndef ZPP_TESTS_PLANNED_IO_H
#define ZPP_TESTS_PLANNED_IO_H

#include <errno.h>
#include <stdatomic.h>
#include <time.h>

#include "../../csrc/aio/sys.h"

static struct {
    atomic_int reads_left, writes_left; /* 0: the next one fails; below: none does */
    size_t most_bytes;                  /* no operation moves more; 0: any */
    int error, open_error, reserve_error;
    atomic_int reserves_left; /* before reserve_error */
    bool no_ring;
    atomic_bool writes_rest; /* without a ring: they begin when this is over */
} plan;

static bool fails(bool write) {
    return atomic_fetch_sub(write ? &plan.writes_left : &plan.reads_left, 1) == 0;
}

static size_t shortened(size_t bytes) {
    return plan.most_bytes && bytes > plan.most_bytes ? plan.most_bytes : bytes;
}

static bool planned_op(void *ctx, struct zpp_aio_op *op, int *result) {
    (void)ctx;
    op->bytes = shortened(op->bytes);
    *result = -plan.error;
    return fails(op->write);
}

static ssize_t planned_pread(void *ctx, int fd, void *memory, size_t bytes, uint64_t offset_bytes) {
    return fails(false) ? -plan.error : zpp_aio_sys_real()->pread(ctx, fd, memory, shortened(bytes), offset_bytes);
}

static void rest_1ms(void) {
    const struct timespec time = { .tv_nsec = 1000000 };
    nanosleep(&time, NULL);
}

static ssize_t planned_pwrite(void *ctx, int fd, const void *memory, size_t bytes, uint64_t offset_bytes) {
    while (atomic_load(&plan.writes_rest)) rest_1ms();
    return fails(true) ? -plan.error : zpp_aio_sys_real()->pwrite(ctx, fd, memory, shortened(bytes), offset_bytes);
}

static int planned_open(void *ctx, const char *path, int flags) {
    return plan.open_error ? -plan.open_error : zpp_aio_sys_real()->open(ctx, path, flags);
}

static int planned_reserve(void *ctx, int fd, uint64_t offset_bytes, uint64_t bytes) {
    if (plan.reserve_error && atomic_fetch_sub(&plan.reserves_left, 1) <= 0) return -plan.reserve_error;
    return zpp_aio_sys_real()->reserve(ctx, fd, offset_bytes, bytes);
}

static int planned_setup(void *ctx, unsigned entries, void *ring, uint32_t flags) {
    return plan.no_ring ? -EPERM : zpp_aio_sys_real()->ring_setup(ctx, entries, ring, flags);
}

/* Filled in once, before any engine has a thread. */
static struct zpp_aio_sys sys;

static inline void reset_plan(void) {
    sys = *zpp_aio_sys_real();
    sys.ring_op = planned_op;
    sys.pread = planned_pread;
    sys.pwrite = planned_pwrite;
    sys.open = planned_open;
    sys.reserve = planned_reserve;
    sys.ring_setup = planned_setup;
    atomic_store(&plan.reads_left, -1);
    atomic_store(&plan.writes_left, -1);
    plan.error = EIO;
    plan.most_bytes = 0;
    plan.open_error = plan.reserve_error = 0;
    atomic_store(&plan.reserves_left, 0);
    plan.no_ring = false;
    atomic_store(&plan.writes_rest, false);
}

#endif
