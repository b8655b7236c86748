/* SPDX-License-Identifier: Apache-2.0
 *
 * A one-way channel between two ranks: a ring of bytes in a memfd that the sender makes and the receiver maps. One
 * writer thread and one reader thread at a time.
 */
#ifndef ZPP_COMM_CHANNEL_H
#define ZPP_COMM_CHANNEL_H

#include "../internal.h"

struct zpp_channel; /* shared memory */

/* The sender's end: make the ring and send its descriptor to `rank`. */
zpp_status zpp_channel_open(struct zpp_comm *comm, int rank, struct zpp_channel **out, struct zpp_err *err);
/* The receiver's end: AGAIN while `rank` has not sent anything yet. */
zpp_status zpp_channel_accept(struct zpp_comm *comm, int rank, struct zpp_channel **out, struct zpp_err *err);
void zpp_channel_close(struct zpp_channel *channel); /* NULL is fine */

/* Write or read as much as there is room or data for; the number of bytes. dst NULL: throw away. */
size_t zpp_channel_write(struct zpp_channel *channel, const void *src, size_t bytes);
size_t zpp_channel_read(struct zpp_channel *channel, void *dst, size_t bytes);
size_t zpp_channel_readable(const struct zpp_channel *channel);
size_t zpp_channel_writable(const struct zpp_channel *channel);
/* The counters say that more is in the ring than fits: the other side wrote where it must not. */
bool zpp_channel_damaged(const struct zpp_channel *channel);

extern const struct zpp_channel_ops zpp_channels_memory; /* the above as a row of the table of transports */

#endif
