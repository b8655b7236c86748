/* SPDX-License-Identifier: Apache-2.0
 *
 * A ring of bytes with two counters on lines of their own, written by one side each.
 */
#include "channel.h"

#include <string.h>
#include <unistd.h>

#include "memfd.h"

enum { RING_BYTES = 1 << 20 };

struct zpp_channel {
    _Alignas(ZPP_LINE_BYTES) _Atomic uint64_t written; /* bytes since the beginning */
    _Alignas(ZPP_LINE_BYTES) _Atomic uint64_t read;
    _Alignas(4096) uint8_t ring[RING_BYTES];
};

static zpp_status map(int fd, struct zpp_channel **out, struct zpp_err *err) {
    void *base = NULL;
    const zpp_status status = zpp_memfd_map(fd, sizeof(struct zpp_channel), &base, err);
    if (status == ZPP_OK) *out = base;
    return status;
}

zpp_status zpp_channel_open(struct zpp_comm *comm, int rank, struct zpp_channel **out, struct zpp_err *err) {
    const struct zpp_message content = {ZPP_MESSAGE_CHANNEL, 0, sizeof(struct zpp_channel), 0};
    struct zpp_channel *channel = NULL;
    int fd = -1;
    zpp_status status = zpp_memfd_create("zeropp-channel", sizeof(struct zpp_channel), &fd, err);
    if (status == ZPP_OK) status = map(fd, &channel, err);
    if (status == ZPP_OK) status = zpp_message_send(comm, rank, &content, fd, err);
    if (fd >= 0) close(fd);
    if (status == ZPP_OK)
        *out = channel;
    else
        zpp_channel_close(channel);
    return status;
}

zpp_status zpp_channel_accept(struct zpp_comm *comm, int rank, struct zpp_channel **out, struct zpp_err *err) {
    struct zpp_message content;
    int fd = -1;
    zpp_status status = zpp_message_try(comm, rank, ZPP_MESSAGE_CHANNEL, 0, &content, &fd, err);
    if (status != ZPP_OK) return status;
    status = map(fd, out, err);
    if (fd >= 0) close(fd);
    return status;
}

void zpp_channel_close(struct zpp_channel *channel) { zpp_memfd_unmap(channel, sizeof *channel); }

/* Both counters lie where the other side can write, so what they say is bounded by the ring whatever they hold. */
static size_t within_ring(uint64_t bytes) { return bytes < RING_BYTES ? (size_t)bytes : RING_BYTES; }

size_t zpp_channel_readable(const struct zpp_channel *channel) {
    return within_ring(atomic_load_explicit(&channel->written, memory_order_acquire) -
                       atomic_load_explicit(&channel->read, memory_order_relaxed));
}

size_t zpp_channel_writable(const struct zpp_channel *channel) {
    return RING_BYTES - within_ring(atomic_load_explicit(&channel->written, memory_order_relaxed) -
                                    atomic_load_explicit(&channel->read, memory_order_acquire));
}

bool zpp_channel_damaged(const struct zpp_channel *channel) {
    const uint64_t read = atomic_load_explicit(&channel->read, memory_order_acquire); /* first: it never overtakes */
    return atomic_load_explicit(&channel->written, memory_order_acquire) - read > RING_BYTES;
}

size_t zpp_channel_write(struct zpp_channel *channel, const void *src, size_t bytes) {
    const size_t room = zpp_channel_writable(channel), all = bytes < room ? bytes : room;
    const uint64_t from = atomic_load_explicit(&channel->written, memory_order_relaxed);
    const size_t at = (size_t)(from % RING_BYTES), first = all < RING_BYTES - at ? all : RING_BYTES - at;
    memcpy(channel->ring + at, src, first);
    memcpy(channel->ring, (const uint8_t *)src + first, all - first);
    atomic_store_explicit(&channel->written, from + all, memory_order_release);
    return all;
}

size_t zpp_channel_read(struct zpp_channel *channel, void *dst, size_t bytes) {
    const size_t there = zpp_channel_readable(channel), all = bytes < there ? bytes : there;
    const uint64_t from = atomic_load_explicit(&channel->read, memory_order_relaxed);
    const size_t at = (size_t)(from % RING_BYTES), first = all < RING_BYTES - at ? all : RING_BYTES - at;
    if (dst) {
        memcpy(dst, channel->ring + at, first);
        memcpy((uint8_t *)dst + first, channel->ring, all - first);
    }
    atomic_store_explicit(&channel->read, from + all, memory_order_release);
    return all;
}

/* --- as a row of the table --------------------------------------------------------------------------------------- */

static zpp_status table_open(struct zpp_comm *comm, int rank, void **out, struct zpp_err *err) {
    struct zpp_channel *channel = NULL;
    const zpp_status status = zpp_channel_open(comm, rank, &channel, err);
    if (status == ZPP_OK) *out = channel;
    return status;
}

static zpp_status table_accept(struct zpp_comm *comm, int rank, void **out, struct zpp_err *err) {
    struct zpp_channel *channel = NULL;
    const zpp_status status = zpp_channel_accept(comm, rank, &channel, err);
    if (status == ZPP_OK) *out = channel;
    return status;
}

static void table_close(void *channel) { zpp_channel_close(channel); }
static size_t table_write(void *channel, const void *src, size_t bytes) {
    return zpp_channel_write(channel, src, bytes);
}
static size_t table_read(void *channel, void *dst, size_t bytes) { return zpp_channel_read(channel, dst, bytes); }
static size_t table_readable(void *channel) { return zpp_channel_readable(channel); }
static size_t table_writable(void *channel) { return zpp_channel_writable(channel); }
static bool table_damaged(void *channel) { return zpp_channel_damaged(channel); }
static bool table_flushed(void *channel) { return channel != NULL; }

const struct zpp_channel_ops zpp_channels_memory = {table_open, table_accept,   table_close,    table_write,
                                                    table_read, table_readable, table_writable, table_damaged,
                                                    table_flushed};
