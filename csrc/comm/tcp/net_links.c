/* SPDX-License-Identifier: Apache-2.0
 *
 * The links to a rank of another host, whoever made them, and whether that rank is still there.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "net.h"

/* How long bytes or a comm error of a peer may still arrive after one of its connections closed. */
static const uint64_t GRACE_NS = 700000000u;

static void mark_gone(struct zpp_net_peer *peer) {
    uint64_t there = 0;
    atomic_compare_exchange_strong(&peer->gone_ns, &there, zpp_now_ns());
}

bool zpp_net_gone(const struct zpp_comm *comm, int rank) {
    const struct zpp_net_peer *peer = &comm->net->peer[rank];
    const uint64_t gone_ns = atomic_load(&peer->gone_ns), heard_ns = atomic_load(&peer->heard_ns);
    if (!gone_ns) return false;
    return zpp_now_ns() - (heard_ns > gone_ns ? heard_ns : gone_ns) >= GRACE_NS;
}

bool zpp_net_died(const struct zpp_comm *comm, int rank) {
    return zpp_net_gone(comm, rank) && !zpp_peer_left(comm, rank);
}

void zpp_net_lost(struct zpp_comm *comm, int rank) { mark_gone(&comm->net->peer[rank]); }

zpp_status zpp_net_watch(struct zpp_net *net, int fd, uint64_t rank, int slot, struct zpp_err *err) {
    struct epoll_event event = {
        .events = EPOLLIN | (rank == ZPP_WATCH_DOOR ? 0 : EPOLLRDHUP | EPOLLET) | (slot == ZPP_NET_P2P ? EPOLLOUT : 0),
        .data.u64 = rank << 8 | (uint64_t)slot,
    };
    if (epoll_ctl(net->epoll, EPOLL_CTL_ADD, fd, &event) == 0) return ZPP_OK;
    return zpp_fail_os(err, errno, "comm: a connection cannot be watched (epoll)");
}

static void take_link(struct zpp_net_peer *peer, int slot, bool incoming, int fd) {
    const bool one_way = peer->comm->door != NULL;
    if (slot == ZPP_NET_P2P && (incoming || !one_way)) peer->p2p_in = fd;
    if (slot != ZPP_NET_P2P || !incoming || !one_way) peer->link[slot] = fd;
}

zpp_status zpp_net_attach(struct zpp_comm *comm, int rank, int slot, bool incoming, int fd, struct zpp_err *err) {
    struct zpp_net *net = comm->net;
    struct zpp_net_peer *peer = &net->peer[rank];
    const uint64_t one = 1;
    zpp_status status = ZPP_OK;
    if (slot == ZPP_NET_CONTROL) {
        peer->control = calloc(1, sizeof *peer->control);
        if (!peer->control) status = zpp_fail(err, ZPP_NOMEM, "comm: no memory for a link to rank %d", rank);
    }
    take_link(peer, slot, incoming, fd);
    if (status == ZPP_OK && comm->door && slot < ZPP_NET_DATA)
        status = zpp_net_watch(net, fd, (uint64_t)rank, slot, err);
    /* Who waits for the link sleeps on either of them. */
    zpp_counter_add(&zpp_control(comm, comm->rank)->doorbell.counter);
    if (net->made >= 0 && write(net->made, &one, sizeof one) < 0) return status; /* it is raised already */
    return status;
}
