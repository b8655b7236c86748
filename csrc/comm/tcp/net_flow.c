/* SPDX-License-Identifier: Apache-2.0
 *
 * Flows: bytes of a collective between this rank and ranks of other hosts, all at once, by the calling thread. A flow
 * of some size is cut into chunks that go over the connections of the pair in turn; on each connection it begins with
 * one frame, which identifies it. The receiver knows the frame it expects: any other ends the group with a message
 * that shows both sides. Bytes are received into their final place.
 *
 * Sockets do not block. Every pass moves all bytes that can move; if none can, one poll sleeps on all sockets, at most
 * until the next check for a comm error, dead peers, tick and timeout.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "net.h"

enum { CHUNK_BYTES = 256 * 1024, STRIPED_BYTES = 512 * 1024, SPINS = 64, POLLED_MAX = 2048 };

struct run {
    struct zpp_wait_ctx *wait_ctx;
    struct zpp_comm *comm;
    struct zpp_flow *flows;
    size_t count;
    uint64_t received_bytes, looked_ns;
    /* State of one pass: the connections that an earlier flow still uses, by direction. */
    uint8_t taken[2][ZPP_RANKS_MAX];
    uint8_t closed[ZPP_RANKS_MAX]; /* connections that have ended, one bit each */
};

/* Compute the connections of a flow: [first, end). */
struct span {
    int first, end;
};

static struct span links_of(const struct run *run, const struct zpp_flow *flow) {
    const int links = run->comm->net->peer[flow->peer].data_links;
    struct span span = {0, links};
    if (links > 1 && flow->links == ZPP_LINKS_FIRST) span.end = links / 2;
    if (links > 1 && flow->links == ZPP_LINKS_REST) span.first = links / 2;
    if (flow->bytes < STRIPED_BYTES) span.end = span.first + 1;
    return span;
}

static bool link_finished(const struct zpp_flow *flow, int link) {
    return flow->link[link].header_bytes == ZPP_FRAME_BYTES && flow->link[link].at_bytes >= flow->bytes;
}

static bool finished(const struct run *run, const struct zpp_flow *flow) {
    const struct span span = links_of(run, flow);
    for (int link = span.first; link < span.end; link++)
        if (!link_finished(flow, link)) return false;
    return true;
}

/* Compute how many bytes have moved: all below the lowest position of any connection. */
static void count_done(const struct run *run, struct zpp_flow *flow) {
    const struct span span = links_of(run, flow);
    size_t lowest = flow->bytes;
    for (int link = span.first; link < span.end; link++)
        if (flow->link[link].at_bytes < lowest) lowest = flow->link[link].at_bytes;
    flow->done = lowest;
}

/* Return how much of the current chunk of this connection may move now. */
static size_t chunk_left(const struct zpp_flow *flow, int link) {
    const size_t at = flow->link[link].at_bytes, end = at / CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES;
    size_t limit = flow->out ? flow->ready : flow->bytes;
    if (flow->ring_bytes && flow->taken + flow->ring_bytes < limit) limit = flow->taken + flow->ring_bytes;
    if (at >= limit) return 0;
    return (end < limit ? end : limit) - at;
}

static void advance(const struct run *run, struct zpp_flow *flow, int link, size_t bytes) {
    size_t *at = &flow->link[link].at_bytes;
    *at += bytes;
    const struct span span = links_of(run, flow);
    if (*at < flow->bytes && *at % CHUNK_BYTES == 0) *at += (size_t)(span.end - span.first - 1) * CHUNK_BYTES;
    count_done(run, flow);
}

static struct zpp_frame frame_of(const struct run *run, const struct zpp_flow *flow, int link) {
    return (struct zpp_frame){.magic = ZPP_FRAME_MAGIC,
                              .kind = ZPP_FRAME_DATA,
                              .connection = (uint16_t)link,
                              .seq = run->comm->seq,
                              .what = run->comm->now.what,
                              .elems = run->comm->now.elems,
                              .bytes = flow->bytes,
                              .part = flow->part};
}

static int fd_of(const struct run *run, const struct zpp_flow *flow, int link) {
    return run->comm->net->peer[flow->peer].link[ZPP_NET_DATA + link];
}

/* --- one connection ---------------------------------------------------------------------------------------------- */

static void connection_ended(struct run *run, const struct zpp_flow *flow, int link) {
    run->closed[flow->peer] |= (uint8_t)(1u << link);
    zpp_net_lost(run->comm, flow->peer); /* the next check shows whether it died, left, or recorded a comm error */
}

static bool send_some(struct run *run, struct zpp_flow *flow, int link) {
    struct zpp_frame frame = frame_of(run, flow, link);
    const size_t header = ZPP_FRAME_BYTES - flow->link[link].header_bytes, chunk = chunk_left(flow, link);
    if (!header && !chunk) return false;
    struct iovec part[2] = {{(uint8_t *)&frame + flow->link[link].header_bytes, header},
                            {flow->data + (chunk ? flow->link[link].at_bytes : 0), chunk}};
    const struct msghdr message = {.msg_iov = header ? part : part + 1, .msg_iovlen = header ? 2 : 1};
    const ssize_t sent = sendmsg(fd_of(run, flow, link), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0) {
        if (sent < 0 && errno != EAGAIN && errno != EINTR) connection_ended(run, flow, link);
        return false;
    }
    const size_t of_header = (size_t)sent < header ? (size_t)sent : header;
    flow->link[link].header_bytes += of_header;
    if ((size_t)sent > of_header) advance(run, flow, link, (size_t)sent - of_header);
    return true;
}

static zpp_status diverged(struct run *run, const struct zpp_flow *flow, const struct zpp_frame *wanted,
                           const struct zpp_frame *came, struct zpp_err *err) {
    struct zpp_comm *comm = run->comm;
    const struct zpp_sig here = {wanted->what, wanted->elems}, there = {came->what, came->elems};
    char mine[160], theirs[160];
    zpp_sig_describe(&here, mine, sizeof mine);
    zpp_sig_describe(&there, theirs, sizeof theirs);
    if (came->what == wanted->what && came->elems == wanted->elems && came->seq == wanted->seq)
        return zpp_comm_fail(comm, ZPP_PEER, flow->peer, err,
                             "comm: in %s #%" PRIu64 " of group \"%s\" rank %d sends %" PRIu64 " bytes to rank %d, "
                             "which expects %" PRIu64 "; the split sizes of the two must agree",
                             mine, wanted->seq, comm->name, zpp_label(comm, flow->peer), came->bytes,
                             zpp_label(comm, comm->rank), wanted->bytes);
    const bool first = comm->rank < flow->peer; /* both sides report the same text */
    return zpp_comm_fail(comm, ZPP_PEER, flow->peer, err,
                         "comm: rank %d is in %s #%" PRIu64 " but rank %d is in %s #%" PRIu64 " of group \"%s\"; all "
                         "ranks must call the same collectives with the same sizes in the same order",
                         zpp_label(comm, first ? comm->rank : flow->peer), first ? mine : theirs,
                         first ? wanted->seq : came->seq, zpp_label(comm, first ? flow->peer : comm->rank),
                         first ? theirs : mine, first ? came->seq : wanted->seq,
                         comm->name);
}

static zpp_status check_header(struct run *run, const struct zpp_flow *flow, int link, const void *raw,
                               struct zpp_err *err) {
    struct zpp_comm *comm = run->comm;
    const struct zpp_frame wanted = frame_of(run, flow, link);
    struct zpp_err reason = ZPP_ERR_INIT;
    struct zpp_frame came;
    if (memcmp(raw, &wanted, sizeof wanted) == 0) return ZPP_OK;
    if (zpp_frame_check(raw, comm->ranks, &came, &reason) != ZPP_OK)
        return zpp_comm_fail(comm, ZPP_PEER, flow->peer, err, "comm: rank %d of group \"%s\" sent rank %d %s",
                             zpp_label(comm, flow->peer), comm->name, zpp_label(comm, comm->rank), reason.text);
    return diverged(run, flow, &wanted, &came, err);
}


/* In a sparse group, a rank that leaves says so on its data links, too. */
static bool is_farewell(const struct run *run, const uint8_t *raw) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    struct zpp_frame came;
    return run->comm->door && zpp_frame_check(raw, run->comm->ranks, &came, &ignored) == ZPP_OK &&
           came.kind == ZPP_FRAME_FAREWELL;
}

static zpp_status receive_header(struct run *run, struct zpp_flow *flow, int link, bool *moved, struct zpp_err *err) {
    uint8_t raw[ZPP_FRAME_BYTES];
    /* Peek until the frame is whole: then one read takes it, and no part is kept between calls. */
    const ssize_t there = recv(fd_of(run, flow, link), raw, sizeof raw, MSG_DONTWAIT | MSG_PEEK);
    if (there == 0 || (there < 0 && errno != EAGAIN && errno != EINTR)) connection_ended(run, flow, link);
    if (there < (ssize_t)sizeof raw) return ZPP_OK;
    if (recv(fd_of(run, flow, link), raw, sizeof raw, MSG_DONTWAIT) != (ssize_t)sizeof raw) return ZPP_OK;
    if (is_farewell(run, raw)) {
        atomic_store(&run->comm->net->peer[flow->peer].left, 1);
        connection_ended(run, flow, link);
        return ZPP_OK;
    }
    *moved = true;
    flow->link[link].header_bytes = sizeof raw;
    return check_header(run, flow, link, raw, err);
}

static zpp_status receive_some(struct run *run, struct zpp_flow *flow, int link, bool *moved, struct zpp_err *err) {
    if (flow->link[link].header_bytes < ZPP_FRAME_BYTES) {
        const zpp_status status = receive_header(run, flow, link, moved, err);
        if (status != ZPP_OK || flow->link[link].header_bytes < ZPP_FRAME_BYTES) return status;
    }
    const size_t chunk = chunk_left(flow, link);
    if (!chunk) return ZPP_OK;
    const size_t at = flow->link[link].at_bytes, place = flow->ring_bytes ? at % flow->ring_bytes : at;
    const ssize_t got = recv(fd_of(run, flow, link), flow->data + place, chunk, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) connection_ended(run, flow, link);
    if (got <= 0) return ZPP_OK;
    run->received_bytes += (uint64_t)got;
    advance(run, flow, link, (size_t)got);
    *moved = true;
    return ZPP_OK;
}

/* --- all of them ------------------------------------------------------------------------------------------------- */

/* Compute the connections that a flow may use now: those that no earlier flow of its peer and direction still uses. */
static uint8_t open_links(struct run *run, const struct zpp_flow *flow) {
    const struct span span = links_of(run, flow);
    uint8_t wanted = 0;
    for (int link = span.first; link < span.end; link++)
        if (!link_finished(flow, link)) wanted |= (uint8_t)(1u << link);
    const uint8_t open = wanted & (uint8_t)~run->taken[flow->out][flow->peer];
    run->taken[flow->out][flow->peer] |= wanted;
    uint8_t made = 0; /* in a sparse group the peer may have to make it */
    for (int link = 0; link < ZPP_NET_DATA_MAX && open >> link; link++)
        if (fd_of(run, flow, link) >= 0) made |= (uint8_t)(1u << link);
    return open & made & (uint8_t)~run->closed[flow->peer];
}

static zpp_status move_all(struct run *run, bool *moved, bool *all, struct zpp_err *err) {
    *all = true;
    memset(run->taken, 0, sizeof run->taken);
    for (size_t i = 0; i < run->count; i++) {
        struct zpp_flow *flow = &run->flows[i];
        const uint8_t open = open_links(run, flow);
        for (int link = 0; link < ZPP_NET_DATA_MAX && open >> link; link++) {
            zpp_status status = ZPP_OK;
            if (!(open >> link & 1)) continue;
            if (flow->out)
                *moved = send_some(run, flow, link) || *moved;
            else
                status = receive_some(run, flow, link, moved, err);
            if (status != ZPP_OK) return status;
        }
        if (!finished(run, flow)) *all = false;
    }
    return ZPP_OK;
}

/* Add the open connections that a flow can use to what is polled; return how many those are. */
static nfds_t poll_flow(const struct run *run, const struct zpp_flow *flow, uint8_t open, struct pollfd *polled,
                        nfds_t count) {
    for (int link = 0; link < ZPP_NET_DATA_MAX && open >> link && count + 1 < POLLED_MAX; link++) {
        if (!(open >> link & 1)) continue;
        if (flow->link[link].header_bytes == ZPP_FRAME_BYTES && !chunk_left(flow, link)) continue;
        polled[count++] = (struct pollfd){fd_of(run, flow, link), flow->out ? POLLOUT : POLLIN, 0};
    }
    return count;
}

/* Sleep until a connection can be used, or a peer of a sparse group has made one. */
static void sleep_on_sockets(struct run *run) {
    struct pollfd polled[POLLED_MAX];
    nfds_t count = 0;
    uint64_t made;
    bool unmade = false;
    memset(run->taken, 0, sizeof run->taken);
    for (size_t i = 0; i < run->count; i++) {
        const struct zpp_flow *flow = &run->flows[i];
        const uint8_t open = open_links(run, flow);
        unmade = unmade || (run->comm->door && !open && !finished(run, flow));
        count = poll_flow(run, flow, open, polled, count);
    }
    if (unmade) polled[count++] = (struct pollfd){run->comm->net->made, POLLIN, 0};
    (void)poll(polled, count, 100);
    if (unmade && read(run->comm->net->made, &made, sizeof made) < 0) return; /* none was made */
}

/* Return the rank that the flows wait for: a peer that is gone, if there is one, or a rank that died on the host of an
 * awaited peer; else the peer of the first unfinished flow. */
static int awaited(const struct run *run, bool *gone) {
    int first = ZPP_NO_RANK;
    for (size_t i = 0; i < run->count; i++) {
        const struct zpp_flow *flow = &run->flows[i];
        if (finished(run, flow)) continue;
        if (first == ZPP_NO_RANK) first = flow->peer;
        *gone = zpp_net_gone(run->comm, flow->peer);
        if (*gone) return flow->peer;
    }
    for (int r = 0; r < run->comm->ranks; r++) {
        if (!zpp_net_elsewhere(run->comm, r) || !zpp_net_died(run->comm, r)) continue;
        *gone = true;
        return r;
    }
    return first;
}

static void heard(struct run *run, uint64_t now_ns) {
    for (size_t i = 0; i < run->count; i++)
        if (!run->flows[i].out) atomic_store(&run->comm->net->peer[run->flows[i].peer].heard_ns, now_ns);
}

/* Wait after a pass that moved nothing. `gone` was checked before that pass, so bytes that a peer sent before it left
 * have been received. */
static zpp_status rest(struct run *run, int *spins, int *rank, bool *gone, struct zpp_err *err) {
    if (!run->comm->crowded && (*spins)++ < SPINS) return ZPP_OK;
    const uint64_t slept_ns = zpp_now_ns();
    sleep_on_sockets(run);
    const uint64_t now_ns = zpp_now_ns();
    if (now_ns - slept_ns < 90000000u && now_ns - run->looked_ns < 90000000u) return ZPP_OK; /* woken by a socket */
    run->looked_ns = now_ns;
    const zpp_status status = zpp_wait_check(run->wait_ctx, *rank, *gone, err);
    *rank = awaited(run, gone);
    return status;
}

size_t zpp_flow_ring_bytes(const struct zpp_comm *comm) {
    int links = 1;
    for (int r = 0; r < comm->ranks; r++)
        if (comm->net->peer[r].data_links > links) links = comm->net->peer[r].data_links;
    return (size_t)(2 * links) * CHUNK_BYTES;
}

static zpp_status begin(struct run *run, struct zpp_err *err) {
    for (size_t i = 0; i < run->count; i++) {
        const struct span span = links_of(run, &run->flows[i]);
        const int peer = run->flows[i].peer;
        const zpp_status status =
            run->comm->door
                ? zpp_net_reach(run->wait_ctx, peer, ZPP_NET_DATA + span.first, ZPP_NET_DATA + span.end, err)
                : ZPP_OK;
        if (status != ZPP_OK) return status;
        for (int link = span.first; link < span.end; link++)
            run->flows[i].link[link].at_bytes = (size_t)(link - span.first) * CHUNK_BYTES;
    }
    run->looked_ns = zpp_now_ns();
    return ZPP_OK;
}

zpp_status zpp_flows_run(struct zpp_wait_ctx *wait_ctx, struct zpp_flow *flows, size_t count, void (*step)(void *ctx),
                         void *ctx, struct zpp_err *err) {
    struct run run = {.wait_ctx = wait_ctx, .comm = wait_ctx->comm, .flows = flows, .count = count};
    bool all = count == 0, gone = false;
    int spins = 0, rank = count ? flows[0].peer : ZPP_NO_RANK;
    zpp_status status = begin(&run, err);
    while (status == ZPP_OK && !all) {
        bool moved = false;
        status = move_all(&run, &moved, &all, err);
        if (status != ZPP_OK || all) break;
        if (moved && step) step(ctx);
        if (moved) {
            spins = 0;
            gone = false;
            wait_ctx->start_ns = wait_ctx->check_ns = wait_ctx->log_ns = 0; /* bytes came: the timeout restarts */
        } else {
            status = rest(&run, &spins, &rank, &gone, err);
        }
    }
    if (status == ZPP_OK && step) step(ctx);
    if (run.received_bytes) heard(&run, zpp_now_ns());
    wait_ctx->comm->net->received_bytes += run.received_bytes;
    return status;
}
