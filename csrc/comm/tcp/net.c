/* SPDX-License-Identifier: Apache-2.0
 *
 * The connections to other hosts: their life cycle, the control messages that arrive over them, and the byte channels
 * of send and receive.
 *
 * The watcher sleeps in epoll. A control message is a comm error, which is recorded here too; a farewell, which sets
 * `left` in the peer's block; or the end of the connection. Bytes or space on a p2p connection raise this rank's
 * doorbell, which wakes the thread that moves transfers (p2p.c). p2p connections are edge-triggered, so unread bytes
 * cause no further events. Twice a second the watcher checks whether the network interface has a link.
 */
#include "net.h"
#include "../../base/mem.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

/* How often the watcher checks the interface for a link, and how long the link may be missing (a cable is put
 * back). */
enum { LINK_LOOK_MS = 500 };
static const uint64_t NO_LINK_NS = 2500000000u;

static void *mirror_memory(void) {
    void *memory = mmap(NULL, sizeof(struct zpp_control), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* --- control links ----------------------------------------------------------------------------------------------- */

static void send_control(struct zpp_comm *comm, int rank, const struct zpp_frame *frame, const char *text) {
    const int fd = comm->net->peer[rank].link[ZPP_NET_CONTROL];
    uint8_t whole[ZPP_FRAME_BYTES + ZPP_ERR_TEXT_BYTES];
    memcpy(whole, frame, sizeof *frame);
    memcpy(whole + sizeof *frame, text, (size_t)frame->bytes);
    /* A frame has a few hundred bytes, on a connection that carries nothing else: it fits unless the peer is
     * unreachable. */
    if (fd >= 0) (void)send(fd, whole, sizeof *frame + (size_t)frame->bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void send_to_all(struct zpp_comm *comm, const struct zpp_frame *frame, const char *text) {
    pthread_mutex_lock(&comm->net->control_link_lock);
    for (int r = 0; r < comm->ranks; r++)
        if (zpp_net_elsewhere(comm, r)) send_control(comm, r, frame, text);
    pthread_mutex_unlock(&comm->net->control_link_lock);
}

void zpp_net_tell(struct zpp_comm *comm, zpp_status status, int failed_rank, const char *text) {
    const struct zpp_frame frame = {.magic = ZPP_FRAME_MAGIC,
                                    .kind = ZPP_FRAME_ERROR,
                                    .what = (uint64_t)(-(int64_t)status),
                                    .elems = (uint64_t)(failed_rank + 1),
                                    .bytes = strlen(text)};
    if (frame.bytes) send_to_all(comm, &frame, text);
}

/* In a sparse group the first rank of each host that hears of an error passes it on. */
static void hear(struct zpp_comm *comm, int rank, const struct zpp_frame *frame, const char *text) {
    if (frame->kind == ZPP_FRAME_ERROR) {
        const bool first =
            zpp_comm_fail_heard(comm, (zpp_status)-(int)frame->what, (int)frame->elems - 1, text);
        if (first && comm->door) send_to_all(comm, frame, text);
        return;
    }
    atomic_store(&comm->net->peer[rank].left, 1);
    zpp_net_lost(comm, rank);
}

/* Read all that is there: the connection is edge-triggered. */
static void read_control(struct zpp_comm *comm, int rank) {
    struct zpp_net_peer *peer = &comm->net->peer[rank];
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_frame frame;
    for (;;) {
        void *at;
        const size_t capacity = zpp_control_link_space(peer->control, &at);
        const ssize_t got = recv(peer->link[ZPP_NET_CONTROL], at, capacity, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) break;
        const zpp_status status = zpp_control_link_parse(peer->control, (size_t)got, comm->ranks, &frame, &err);
        if (status == ZPP_AGAIN) continue;
        if (status != ZPP_OK) {
            (void)zpp_comm_fail(comm, ZPP_PEER, rank, &err, "comm: rank %d of group \"%s\" told rank %d %s",
                                zpp_label(comm, rank), comm->name, zpp_label(comm, comm->rank), err.text);
            break;
        }
        hear(comm, rank, &frame, peer->control->text);
    }
    zpp_net_lost(comm, rank);
    zpp_counter_add(&zpp_control(comm, comm->rank)->doorbell.counter);
}

/* --- the watcher ------------------------------------------------------------------------------------------------- */

/* Return true once the interface of a control link is known, or is known to have no name. It has to be asked for before
 * its link is lost: an interface without a link may have no address. A sparse group that is joining has no link yet. */
static bool ask_for_interface(struct zpp_comm *comm) {
    struct zpp_net *net = comm->net;
    if (net->asked) return true;
    int r = 0;
    while (r < comm->ranks && net->peer[r].link[ZPP_NET_CONTROL] < 0) r++;
    if (r == comm->ranks) return false;
    net->farther = r;
    zpp_net_interface_of(net->peer[r].link[ZPP_NET_CONTROL], net->interface, sizeof net->interface);
    net->asked = true;
    return true;
}

/* Fail the group if the interface has no link. An unplugged cable breaks no connection: TCP would retransmit for
 * minutes. If the other end is unplugged, this end sees only silence, which the timeout covers. */
static void look_for_link(struct zpp_comm *comm) {
    struct zpp_net *net = comm->net;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!ask_for_interface(comm)) return;
    const int socket = net->peer[net->farther].link[ZPP_NET_CONTROL];
    if (!net->interface[0] || zpp_net_has_link(socket, net->interface)) {
        net->no_link_ns = 0;
        return;
    }
    const uint64_t now_ns = zpp_now_ns();
    if (!net->no_link_ns) net->no_link_ns = now_ns;
    if (now_ns - net->no_link_ns < NO_LINK_NS) return;
    (void)zpp_comm_fail(comm, ZPP_PEER, net->farther, &err,
                        "comm: rank %d cannot reach rank %d of group \"%s\": network interface \"%s\" has had no link "
                        "for %.1f s; is its cable plugged in, and is it up?",
                        zpp_label(comm, comm->rank), zpp_label(comm, net->farther), comm->name, net->interface,
                        (double)(now_ns - net->no_link_ns) / 1e9);
    net->interface[0] = '\0'; /* once */
}

static void *watch(void *arg) {
    struct zpp_comm *comm = arg;
    struct epoll_event event[16];
    uint64_t looked_ns = zpp_now_ns();
    for (;;) {
        const int count = epoll_wait(comm->net->epoll, event, 16, LINK_LOOK_MS);
        if (count < 0 && errno != EINTR) return NULL;
        if (zpp_now_ns() - looked_ns >= LINK_LOOK_MS * UINT64_C(1000000)) {
            looked_ns = zpp_now_ns();
            look_for_link(comm);
            if (comm->door) zpp_door_serve(comm);
        }
        for (int i = 0; i < count; i++) {
            const uint32_t rank = (uint32_t)(event[i].data.u64 >> 8), slot = (uint32_t)(event[i].data.u64 & 0xff);
            if (rank == ZPP_WATCH_STOP) return NULL;
            if (rank == ZPP_WATCH_DOOR)
                zpp_door_serve(comm);
            else if (slot == ZPP_NET_CONTROL)
                read_control(comm, (int)rank);
            else
                zpp_counter_add(&zpp_control(comm, comm->rank)->doorbell.counter);
        }
    }
}

static zpp_status make_watch(struct zpp_comm *comm, struct zpp_err *err) {
    struct zpp_net *net = comm->net;
    net->epoll = epoll_create1(EPOLL_CLOEXEC);
    net->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    net->made = comm->door ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
    if (net->epoll < 0 || net->stop < 0 || (comm->door && net->made < 0))
        return zpp_fail_os(err, errno, "comm: no epoll for the watcher of a group");
    const zpp_status status = zpp_net_watch(net, net->stop, ZPP_WATCH_STOP, 0, err);
    if (status != ZPP_OK || !comm->door) return status;
    return zpp_net_watch(net, zpp_door_epoll(comm), ZPP_WATCH_DOOR, 0, err);
}

/* Watch the links of a full group, which are all there. */
static zpp_status watch_all(struct zpp_comm *comm, struct zpp_err *err) {
    struct zpp_net *net = comm->net;
    zpp_status status = ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++) {
        if (!zpp_net_elsewhere(comm, r)) continue;
        status = zpp_net_watch(net, net->peer[r].link[ZPP_NET_CONTROL], (uint64_t)r, ZPP_NET_CONTROL, err);
        if (status != ZPP_OK) break;
        status = zpp_net_watch(net, net->peer[r].link[ZPP_NET_P2P], (uint64_t)r, ZPP_NET_P2P, err);
    }
    return status;
}

static zpp_status start_watcher(struct zpp_comm *comm, struct zpp_err *err) {
    struct zpp_net *net = comm->net;
    sigset_t all, before;
    zpp_status status = make_watch(comm, err);
    if (status == ZPP_OK && !comm->door) status = watch_all(comm, err);
    if (status != ZPP_OK) return status;
    (void)ask_for_interface(comm);
    sigfillset(&all); /* the program's threads handle signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&net->watcher, NULL, watch, comm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) return zpp_fail_os(err, failed, "comm: no thread to watch the connections of group \"%s\"", comm->name);
    net->watching = true;
    return ZPP_OK;
}

/* --- life -------------------------------------------------------------------------------------------------------- */

static void begin_peer(struct zpp_net_peer *peer, struct zpp_comm *comm, int rank) {
    peer->comm = comm;
    peer->rank = rank;
    peer->p2p_in = -1;
    if (comm->door) peer->data_links = zpp_door_links(comm);
    for (int slot = 0; slot < ZPP_NET_SLOTS_MAX; slot++) peer->link[slot] = -1;
}

/* The watcher of a sparse group lets other ranks in, so it comes first. */
static zpp_status connect_and_watch(struct zpp_comm *comm, const struct zpp_network_options *options,
                                    const struct zpp_store *store, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = comm->door ? start_watcher(comm, err) : ZPP_OK;
    if (status == ZPP_OK) status = zpp_net_connect(comm, options, store, wait, err);
    return status == ZPP_OK && !comm->door ? start_watcher(comm, err) : status;
}

zpp_status zpp_net_create(struct zpp_comm *comm, const struct zpp_hosts *hosts,
                          const struct zpp_network_options *options, const struct zpp_store *store,
                          const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_net *net = calloc(1, sizeof *net);
    if (!net) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for connections to %d hosts", hosts->hosts);
    net->hosts = *hosts;
    net->epoll = net->stop = net->made = -1;
    pthread_mutex_init(&net->control_link_lock, NULL);
    for (int r = 0; r < comm->ranks; r++) begin_peer(&net->peer[r], comm, r);
    comm->net = net;
    comm->first_here = zpp_rank_at(hosts, hosts->mine, 0);
    net->mirror = mirror_memory();
    if (!net->mirror) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for ranks on other hosts");
    for (int r = 0; r < comm->ranks; r++)
        if (zpp_net_elsewhere(comm, r)) comm->base[r] = net->mirror;
    zpp_status status = zpp_local_create(comm, &net->local, err);
    if (status == ZPP_OK) status = connect_and_watch(comm, options, store, wait, err);
    if (status == ZPP_OK) net->local->joined = true;
    return status;
}

static void stop_watcher(struct zpp_net *net, bool forked) {
    const uint64_t one = 1;
    if (net->watching && !forked) {
        if (write(net->stop, &one, sizeof one) == sizeof one) pthread_join(net->watcher, NULL);
    }
    if (net->epoll >= 0) close(net->epoll);
    if (net->stop >= 0) close(net->stop);
    if (net->made >= 0) close(net->made);
}

/* Send the comm error again before the farewell. It is in this host's memory before the rank that recorded it has sent
 * it to other hosts, and a rank that leaves first must not make its farewell look like the cause. */
static void retell(struct zpp_comm *comm) {
    struct zpp_err err = ZPP_ERR_INIT;
    const zpp_status status = zpp_comm_check(comm, &err);
    if (status != ZPP_OK) zpp_net_tell(comm, status, err.rank, err.text);
}

void zpp_net_farewell(struct zpp_comm *comm) {
    const struct zpp_frame farewell = {.magic = ZPP_FRAME_MAGIC, .kind = ZPP_FRAME_FAREWELL};
    if (!comm->joined) return;
    retell(comm);
    send_to_all(comm, &farewell, "");
    for (int r = 0; comm->door && r < comm->ranks; r++)
        for (int slot = ZPP_NET_DATA; zpp_net_elsewhere(comm, r) && slot < ZPP_NET_SLOTS_MAX; slot++)
            if (comm->net->peer[r].link[slot] >= 0)
                (void)send(comm->net->peer[r].link[slot], &farewell, sizeof farewell, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void zpp_net_destroy(struct zpp_comm *comm, bool forked) {
    struct zpp_net *net = comm->net;
    if (!net) return;
    stop_watcher(net, forked);
    for (int r = 0; r < comm->ranks; r++) {
        if (!zpp_net_elsewhere(comm, r)) continue;
        for (int slot = 0; slot < ZPP_NET_SLOTS_MAX; slot++)
            if (net->peer[r].link[slot] >= 0) close(net->peer[r].link[slot]);
        if (comm->door && net->peer[r].p2p_in >= 0) close(net->peer[r].p2p_in);
        free(net->peer[r].stream);
        free(net->peer[r].control);
        comm->base[r] = NULL;
    }
    if (net->mirror) munmap(net->mirror, sizeof(struct zpp_control));
    zpp_local_destroy(net->local, forked);
    if (!forked) pthread_mutex_destroy(&net->control_link_lock);
    free(net->scratch);
    free(net->flows);
    free(net);
    comm->net = NULL;
    comm->first_here = 0;
}

zpp_status zpp_net_scratch(struct zpp_comm *comm, size_t bytes, uint8_t **out, struct zpp_err *err) {
    struct zpp_net *net = comm->net;
    if (bytes > net->scratch_bytes) {
        const size_t page_bytes = zpp_page_bytes(), wanted = (bytes + page_bytes - 1) / page_bytes * page_bytes;
        uint8_t *memory = aligned_alloc(page_bytes, wanted);
        if (!memory) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for %zu bytes from other hosts", wanted);
        free(net->scratch);
        net->scratch = memory;
        net->scratch_bytes = wanted;
    }
    *out = net->scratch;
    return ZPP_OK;
}

zpp_status zpp_net_flows(struct zpp_comm *comm, size_t count, struct zpp_flow **out, struct zpp_err *err) {
    struct zpp_net *net = comm->net;
    if (count > net->flows_most) {
        struct zpp_flow *flows = malloc(count * sizeof *flows);
        if (!flows) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for %zu transfers between hosts", count);
        free(net->flows);
        net->flows = flows;
        net->flows_most = count;
    }
    *out = net->flows;
    return ZPP_OK;
}

/* --- p2p: the byte channels of send and receive ------------------------------------------------------------------ */

static zpp_status make_stream(struct zpp_net_peer *peer, struct zpp_err *err) {
    if (!peer->stream) peer->stream = malloc(sizeof *peer->stream);
    if (!peer->stream) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for what rank %d sends", peer->rank);
    peer->stream->stash_bytes = peer->stream->inbox_at = peer->stream->inbox_end = 0;
    return ZPP_OK;
}

static void describe_send(const void *ctx, char *text, size_t capacity) {
    const struct zpp_net_peer *peer = ctx;
    snprintf(text, capacity, "a send to rank %d", zpp_label(peer->comm, peer->rank));
}

static zpp_status p2p_open(struct zpp_comm *comm, int rank, void **out, struct zpp_err *err) {
    struct zpp_net_peer *peer = &comm->net->peer[rank];
    struct zpp_wait_ctx wait_ctx = {.comm = comm, .own_timeout = true, .describe = describe_send, .ctx = peer};
    zpp_status status = peer->stream ? ZPP_OK : make_stream(peer, err);
    if (status == ZPP_OK && comm->door) status = zpp_net_reach(&wait_ctx, rank, ZPP_NET_P2P, ZPP_NET_P2P + 1, err);
    if (status == ZPP_OK) *out = peer;
    return status;
}

static zpp_status p2p_accept(struct zpp_comm *comm, int rank, void **out, struct zpp_err *err) {
    struct zpp_net_peer *peer = &comm->net->peer[rank];
    if (peer->p2p_in < 0) return ZPP_AGAIN;
    const zpp_status status = peer->stream ? ZPP_OK : make_stream(peer, err);
    if (status == ZPP_OK) *out = peer;
    return status;
}

static void p2p_close(void *channel) { (void)channel; } /* with the connection */

static size_t push(struct zpp_net_peer *peer, const void *src, size_t bytes) {
    const ssize_t sent = send(peer->link[ZPP_NET_P2P], src, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR && peer->comm->door) zpp_net_lost(peer->comm, peer->rank);
    return sent > 0 ? (size_t)sent : 0; /* in a full group the watcher handles a broken connection */
}

static bool push_stash(struct zpp_net_peer *peer) {
    struct zpp_net_stream *stream = peer->stream;
    const size_t sent = stream->stash_bytes ? push(peer, stream->stash, stream->stash_bytes) : 0;
    stream->stash_bytes -= sent;
    if (sent && stream->stash_bytes) memmove(stream->stash, stream->stash + sent, stream->stash_bytes);
    return stream->stash_bytes == 0;
}

static size_t p2p_writable(void *channel) { return push_stash(channel) ? ZPP_NET_P2P_BYTES : 0; }

/* p2p.c needs headers written whole or not at all: bytes of a header that the socket does not take wait in the
 * stash. */
static size_t p2p_write(void *channel, const void *src, size_t bytes) {
    struct zpp_net_peer *peer = channel;
    struct zpp_net_stream *stream = peer->stream;
    if (!push_stash(peer) || !bytes) return 0;
    const size_t sent = push(peer, src, bytes);
    if (sent == bytes || bytes > sizeof stream->stash) return sent;
    stream->stash_bytes = bytes - sent;
    memcpy(stream->stash, (const uint8_t *)src + sent, stream->stash_bytes);
    return bytes;
}

static size_t pull(struct zpp_net_peer *peer, void *dst, size_t bytes) {
    const ssize_t got = recv(peer->p2p_in, dst, bytes, MSG_DONTWAIT);
    if (got > 0) atomic_store(&peer->heard_ns, zpp_now_ns());
    /* There may be no control link that closes. */
    if (got == 0 && bytes && peer->comm->door) zpp_net_lost(peer->comm, peer->rank);
    return got > 0 ? (size_t)got : 0;
}

static size_t p2p_readable(void *channel) {
    struct zpp_net_peer *peer = channel;
    struct zpp_net_stream *stream = peer->stream;
    if (stream->inbox_at == stream->inbox_end) stream->inbox_at = stream->inbox_end = 0;
    if (stream->inbox_end - stream->inbox_at < 64 && stream->inbox_at) {
        memmove(stream->inbox, stream->inbox + stream->inbox_at, stream->inbox_end - stream->inbox_at);
        stream->inbox_end -= stream->inbox_at;
        stream->inbox_at = 0;
    }
    if (stream->inbox_end - stream->inbox_at < 64)
        stream->inbox_end += pull(peer, stream->inbox + stream->inbox_end, ZPP_NET_P2P_BYTES - stream->inbox_end);
    return stream->inbox_end - stream->inbox_at;
}

static size_t p2p_read(void *channel, void *dst, size_t bytes) {
    struct zpp_net_peer *peer = channel;
    struct zpp_net_stream *stream = peer->stream;
    size_t there = stream->inbox_end - stream->inbox_at;
    if (!there && bytes >= ZPP_NET_P2P_BYTES && dst) return pull(peer, dst, bytes);
    if (!there) there = p2p_readable(peer);
    const size_t taken = there < bytes ? there : bytes;
    if (dst && taken) memcpy(dst, stream->inbox + stream->inbox_at, taken);
    stream->inbox_at += taken;
    return taken;
}

static bool p2p_damaged(void *channel) {
    (void)channel;
    return false; /* a socket has no counters; p2p.c checks headers */
}

static bool p2p_flushed(void *channel) { return push_stash(channel); }

const struct zpp_channel_ops zpp_channels_tcp = {p2p_open, p2p_accept,   p2p_close,    p2p_write,
                                                 p2p_read, p2p_readable, p2p_writable, p2p_damaged,
                                                 p2p_flushed};
