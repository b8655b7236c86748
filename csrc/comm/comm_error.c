/* SPDX-License-Identifier: Apache-2.0
 *
 * The error of a group: why it ended, and which rank caused it. It is one 64-bit value in rank 0's control memory, or
 * in that of the lowest rank of each host, which sends it to the other hosts. It outlives that rank, because all ranks
 * map it. It is set once, by compare-and-swap, so that all survivors report the same rank even while survivors exit
 * one after the other. The message lies in the control memory of the rank that recorded it:
 *
 *   bits 0-15 failed rank + 1, 16-31 recording rank + 1, 32-63 minus the status
 */
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tcp/net.h"

/* Return the whole group, whose comm error the local group of a host (net_local.c) shares. */
static const struct zpp_comm *whole(const struct zpp_comm *comm) { return comm->outer ? comm->outer : comm; }

static _Atomic uint64_t *comm_error_of(const struct zpp_comm *comm) {
    return &zpp_control(comm, comm->first_here)->comm_error;
}

bool zpp_comm_forked(const struct zpp_comm *comm) {
    return comm->fork_guard && !atomic_load_explicit(comm->fork_guard, memory_order_relaxed);
}

/* Return false where the value in shared memory cannot be one that a rank wrote. */
static bool decode(const struct zpp_comm *comm, uint64_t comm_error, struct zpp_comm_error *out) {
    const int recorder = (int)(comm_error >> 16 & 0xffff) - 1;
    const uint32_t minus_status = (uint32_t)(comm_error >> 32);
    if (recorder < 0 || recorder >= comm->ranks || minus_status == 0 || minus_status > INT32_MAX) return false;
    out->status = (zpp_status)-(int)minus_status;
    out->failed_rank = (int)(comm_error & 0xffff) - 1;
    memcpy(out->text, zpp_control(comm, recorder)->comm_error_text, sizeof out->text);
    out->text[sizeof out->text - 1] = '\0';
    return true;
}

static zpp_status report(const struct zpp_comm *comm, uint64_t comm_error, struct zpp_err *err) {
    struct zpp_comm_error error;
    if (!decode(comm, comm_error, &error))
        return zpp_fail(err, ZPP_PEER, "comm: control memory of group \"%s\" is damaged (comm error %#llx)", comm->name,
                        (unsigned long long)comm_error);
    return zpp_fail_rank(err, error.status, zpp_label(comm, error.failed_rank), "%s", error.text);
}

bool zpp_comm_error_read(const struct zpp_comm *comm, struct zpp_comm_error *out) {
    const uint64_t comm_error = atomic_load_explicit(comm_error_of(comm), memory_order_acquire);
    return comm_error && decode(comm, comm_error, out);
}

zpp_status zpp_comm_check(const struct zpp_comm *part, struct zpp_err *err) {
    const struct zpp_comm *comm = whole(part);
    if (zpp_comm_forked(comm))
        return zpp_fail(err, ZPP_STATE,
                        "comm: group \"%s\" was made by the parent of this process; a forked child cannot use it, "
                        "make a group of its own",
                        comm->name);
    if (atomic_load_explicit(&comm->closed, memory_order_relaxed))
        return zpp_fail(err, ZPP_STATE, "comm: rank %d has closed group \"%s\"; make a new one",
                        zpp_label(comm, comm->rank), comm->name);
    if (!comm->joined) return ZPP_OK; /* some peers' memory is not mapped yet; the first call will see the comm error */
    const uint64_t comm_error = atomic_load_explicit(comm_error_of(comm), memory_order_acquire);
    return comm_error ? report(comm, comm_error, err) : ZPP_OK;
}

/* Return true if this became the comm error; `text` is then in this rank's memory. */
static bool record(struct zpp_comm *comm, zpp_status status, int failed_rank, const char *text, uint64_t *standing) {
    bool first = false;
    pthread_mutex_lock(&comm->comm_error_lock);
    *standing = atomic_load(comm_error_of(comm));
    if (!*standing) { /* so no rank reads this text yet */
        const uint64_t mine =
            (uint64_t)(failed_rank + 1) | (uint64_t)(comm->rank + 1) << 16 | (uint64_t)(-(int)status) << 32;
        snprintf(zpp_control(comm, comm->rank)->comm_error_text, ZPP_ERR_TEXT_BYTES, "%s", text);
        first = atomic_compare_exchange_strong(comm_error_of(comm), standing, mine);
        if (first) *standing = mine;
    }
    pthread_mutex_unlock(&comm->comm_error_lock);
    return first;
}

zpp_status zpp_comm_fail(struct zpp_comm *part, zpp_status status, int failed_rank, struct zpp_err *err,
                         const char *format, ...) {
    struct zpp_comm *comm = part->outer ? part->outer : part;
    const int rank = zpp_outer_rank(part, failed_rank);
    char text[ZPP_ERR_TEXT_BYTES];
    uint64_t standing;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (record(comm, status, rank, text, &standing) && comm->net) comm->transport->tell(comm, status, rank, text);
    return report(comm, standing, err);
}

void zpp_comm_pass_on(struct zpp_comm *comm, zpp_status status, int failed_rank, const char *text) {
    uint64_t standing;
    if (record(comm, status, failed_rank, text, &standing) && comm->net)
        comm->transport->tell(comm, status, failed_rank, text);
}

bool zpp_comm_fail_heard(struct zpp_comm *comm, zpp_status status, int failed_rank, const char *text) {
    uint64_t standing;
    return record(comm, status, failed_rank, text, &standing);
}

bool zpp_peer_left(const struct zpp_comm *comm, int rank) {
    if (zpp_net_elsewhere(comm, rank)) return atomic_load(&comm->net->peer[rank].left);
    return comm->base[rank] && atomic_load(&zpp_control(comm, rank)->left);
}

bool zpp_peer_gone(const struct zpp_comm *part, int part_rank) {
    const struct zpp_comm *comm = whole(part);
    const int rank = zpp_outer_rank(part, part_rank);
    if (zpp_net_elsewhere(comm, rank)) return comm->transport->gone(comm, rank);
    if (zpp_peer_left(comm, rank)) return true;
    const struct zpp_peer *peer = &comm->peer[rank];
    /* A pidfd becomes readable when the process itself ends, zombie or not. A socket would stay open as long as some
     * forked child (a DataLoader worker) holds a copy, so it is only the second choice. */
    struct pollfd poll_fd = {peer->pidfd, POLLIN, 0};
    if (peer->pidfd < 0) {
        poll_fd.fd = peer->socket;
        poll_fd.events = POLLRDHUP;
    }
    if (poll_fd.fd < 0 || poll(&poll_fd, 1, 0) <= 0) return false;
    return (poll_fd.revents & (peer->pidfd < 0 ? POLLHUP | POLLRDHUP : POLLIN)) != 0;
}

zpp_status zpp_comm_health(const zpp_comm *comm, struct zpp_err *err) { return zpp_comm_check(comm, err); }
