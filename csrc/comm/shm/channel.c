/* SPDX-License-Identifier: Apache-2.0
 *
 * A one-way channel between two ranks: a ring of bytes in a memfd that the sender makes and the receiver maps, with two
 * counters on lines of their own, written by one side each. One writer thread and one reader thread at a time.
 */
#include <string.h>
#include <unistd.h>

#include "../internal.h"
#include "memfd.h"

enum { RING_BYTES = 1 << 20 };

/* Each side stores its own counter with release, after the bytes, and loads the other's with acquire, before them; its
 * own it loads relaxed. So bytes are read after they were written, and overwritten after they were read. */
struct zpp_channel {
    _Alignas(ZPP_LINE_BYTES) _Atomic uint64_t written; /* bytes since the beginning */
    _Alignas(ZPP_LINE_BYTES) _Atomic uint64_t read;
    _Alignas(ZPP_LINE_BYTES) uint8_t ring[RING_BYTES];
};

static zpp_status map(int fd, struct zpp_channel **out, struct zpp_err *err) {
    void *base = NULL;
    const zpp_status status = zpp_memfd_map(fd, sizeof(struct zpp_channel), &base, err);
    if (status == ZPP_OK) *out = base;
    return status;
}

static void channel_close(void *channel) { zpp_memfd_unmap(channel, sizeof(struct zpp_channel)); }

static zpp_status channel_open(struct zpp_comm *comm, int rank, void **out, struct zpp_err *err) {
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
        channel_close(channel);
    return status;
}

static zpp_status channel_accept(struct zpp_comm *comm, int rank, void **out, struct zpp_err *err) {
    struct zpp_message content;
    struct zpp_channel *channel = NULL;
    int fd = -1;
    zpp_status status = zpp_message_try(comm, rank, ZPP_MESSAGE_CHANNEL, 0, &content, &fd, err);
    if (status != ZPP_OK) return status;
    status = map(fd, &channel, err);
    if (fd >= 0) close(fd);
    if (status == ZPP_OK) *out = channel;
    return status;
}

/* The other side can write both counters, so their difference is bounded by the ring, whatever they hold. */
static size_t within_ring(uint64_t bytes) { return bytes < RING_BYTES ? (size_t)bytes : RING_BYTES; }

static size_t channel_readable(void *handle) {
    const struct zpp_channel *channel = handle;
    return within_ring(atomic_load_explicit(&channel->written, memory_order_acquire) -
                       atomic_load_explicit(&channel->read, memory_order_relaxed));
}

static size_t channel_writable(void *handle) {
    const struct zpp_channel *channel = handle;
    return RING_BYTES - within_ring(atomic_load_explicit(&channel->written, memory_order_relaxed) -
                                    atomic_load_explicit(&channel->read, memory_order_acquire));
}

static bool channel_damaged(void *handle) {
    const struct zpp_channel *channel = handle;
    const uint64_t read = atomic_load_explicit(&channel->read, memory_order_acquire); /* never past `written` */
    return atomic_load_explicit(&channel->written, memory_order_acquire) - read > RING_BYTES;
}

static size_t channel_write(void *handle, const void *src, size_t bytes) {
    struct zpp_channel *channel = handle;
    const size_t space = channel_writable(channel), all = bytes < space ? bytes : space;
    const uint64_t from = atomic_load_explicit(&channel->written, memory_order_relaxed);
    const size_t at = (size_t)(from % RING_BYTES), first = all < RING_BYTES - at ? all : RING_BYTES - at;
    memcpy(channel->ring + at, src, first);
    memcpy(channel->ring, (const uint8_t *)src + first, all - first);
    atomic_store_explicit(&channel->written, from + all, memory_order_release);
    return all;
}

static size_t channel_read(void *handle, void *dst, size_t bytes) {
    struct zpp_channel *channel = handle;
    const size_t there = channel_readable(channel), all = bytes < there ? bytes : there;
    const uint64_t from = atomic_load_explicit(&channel->read, memory_order_relaxed);
    const size_t at = (size_t)(from % RING_BYTES), first = all < RING_BYTES - at ? all : RING_BYTES - at;
    if (dst) {
        memcpy(dst, channel->ring + at, first);
        memcpy((uint8_t *)dst + first, channel->ring, all - first);
    }
    atomic_store_explicit(&channel->read, from + all, memory_order_release);
    return all;
}

static bool channel_flushed(void *channel) { return channel != NULL; } /* the peer can read all that is in the ring */

const struct zpp_channel_ops zpp_channels_memory = {
    channel_open,     channel_accept,   channel_close,   channel_write,  channel_read,
    channel_readable, channel_writable, channel_damaged, channel_flushed};
