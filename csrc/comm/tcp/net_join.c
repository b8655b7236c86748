/* SPDX-License-Identifier: Apache-2.0
 *
 * How ranks of different hosts connect. Each puts its address and a secret into the job's store, the higher rank of a
 * pair connects to the lower one, once for each slot, and both prove that they know the listener's secret, which never
 * crosses the network:
 *
 *   listener   challenge: magic, rank, 16 random bytes
 *   caller     handshake: magic, rank, slot, 16 random bytes of its own, MAC(secret; 'C', rank, slot, both random
 *              numbers)
 *   listener   answer: magic, MAC(secret; 'L', the same)
 *
 * A connection with a wrong answer, or none within five seconds, is closed; others go on joining meanwhile.
 *
 * In a full group every pair connects while the group is created. A sparse group keeps its listener, the "door", for
 * life: addresses and one secret for all ranks come from its directory (rendezvous_tree.c), the watcher answers, and a
 * pair connects when a collective or a send first needs it.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "net.h"

enum { MAGIC = 0x5a505441, NONCE_BYTES = 16, STRANGERS_MAX = 64, CALLS_MAX = 4 };
static const uint64_t STRANGER_NS = 5000000000u;
/* How long after a refusal the error of the group may still come, which the rank told before it left. */
static const uint64_t HEAR_NS = 1000000000u;

/* A rank's entry in the store. */
struct address_endpoint {
    uint32_t magic, rank, links, family;
    uint8_t address[16];
    uint16_t port, zero[3];
    uint8_t secret[ZPP_NET_SECRET_BYTES];
};

struct challenge {
    uint32_t magic, rank;
    uint8_t nonce[NONCE_BYTES];
};
struct handshake {
    uint32_t magic;
    uint16_t rank, slot;
    uint8_t nonce[NONCE_BYTES];
    uint64_t mac;
};
struct answer {
    uint32_t magic, zero;
    uint64_t mac;
};

/* The data that a MAC covers. */
struct proof {
    uint8_t who; /* 'C' or 'L' */
    uint8_t zero[3];
    uint16_t rank, slot; /* of the caller */
    uint8_t listener_nonce[NONCE_BYTES], caller_nonce[NONCE_BYTES];
};

/* A connection that has not proved anything yet. */
struct stranger {
    int fd; /* -1: free */
    uint64_t since_ns;
    uint8_t nonce[NONCE_BYTES];
    struct handshake handshake;
    size_t bytes;
};

struct zpp_door {
    struct zpp_comm *comm;
    struct zpp_net_address own;
    struct address_endpoint *endpoint;   /* [ranks], of a full group */
    struct zpp_directory *directory;     /* of a sparse one */
    int listener, links;
    int epoll; /* the listener and the strangers; -1 in a full group */
    struct stranger stranger[STRANGERS_MAX];
};

/* Who calls another rank, and how long it may wait for an answer. */
struct caller {
    struct zpp_door *door;
    struct zpp_wait_ctx *wait_ctx;
    bool *ended; /* set where nobody listens any more, or the listener hangs up; may be NULL */
};

static struct address_endpoint endpoint_of(const struct zpp_door *door, int rank) {
    if (door->endpoint) return door->endpoint[rank];
    const struct zpp_directory *directory = door->directory;
    const struct zpp_directory_entry *entry = &directory->entry[rank];
    const uint8_t *addresses = (const uint8_t *)&directory->entry[door->comm->ranks];
    struct address_endpoint endpoint = {.magic = MAGIC,
                                        .rank = (uint32_t)rank,
                                        .links = directory->links,
                                        .family = directory->family,
                                        .port = entry->port};
    memcpy(endpoint.address, addresses + 16 * (size_t)entry->address, 16);
    memcpy(endpoint.secret, directory->secret, sizeof endpoint.secret);
    return endpoint;
}

static uint64_t prove(const struct address_endpoint *listener, uint8_t who, const struct handshake *handshake,
                      const uint8_t *listener_nonce) {
    struct proof proof = {.who = who, .rank = handshake->rank, .slot = handshake->slot};
    memcpy(proof.listener_nonce, listener_nonce, NONCE_BYTES);
    memcpy(proof.caller_nonce, handshake->nonce, NONCE_BYTES);
    return zpp_net_mac(listener->secret, &proof, sizeof proof);
}

static zpp_status random_bytes(void *out, size_t bytes, struct zpp_err *err) {
    if (getrandom(out, bytes, 0) == (ssize_t)bytes) return ZPP_OK;
    return zpp_fail_os(err, errno, "comm: no random bytes for the connections of the group");
}

static void describe_joining(const void *ctx, char *text, size_t capacity) {
    (void)ctx;
    snprintf(text, capacity, "the rendezvous between hosts");
}

static void tune(int fd) {
    const int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

/* --- addresses --------------------------------------------------------------------------------------------------- */

static zpp_status listen_here(struct zpp_door *door, struct address_endpoint *endpoint, struct zpp_err *err) {
    struct zpp_net_address bound = door->own;
    char address_text[80];
    zpp_net_describe(&bound.address, address_text, sizeof address_text);
    door->listener = socket(bound.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (door->listener < 0 ||
        bind(door->listener, (const struct sockaddr *)&bound.address, bound.length) != 0 ||
        listen(door->listener, 512) != 0 ||
        getsockname(door->listener, (struct sockaddr *)&bound.address, &bound.length) != 0)
        return zpp_fail_os(err, errno, "comm: rank %d cannot listen on %s", door->comm->rank, address_text);
    endpoint->family = bound.address.ss_family == AF_INET6 ? 6 : 4;
    endpoint->links = (uint32_t)door->links;
    if (endpoint->family == 6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)&bound.address;
        memcpy(endpoint->address, &six->sin6_addr, 16);
        endpoint->port = ntohs(six->sin6_port);
    } else {
        const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)&bound.address;
        memcpy(endpoint->address, &four->sin_addr, 4);
        endpoint->port = ntohs(four->sin_port);
    }
    return ZPP_OK;
}

static zpp_status publish(struct zpp_door *door, const struct zpp_store *store, struct zpp_err *err) {
    struct zpp_comm *comm = door->comm;
    struct address_endpoint *endpoint = &door->endpoint[comm->rank];
    endpoint->magic = MAGIC;
    endpoint->rank = (uint32_t)comm->rank;
    zpp_status status = random_bytes(endpoint->secret, sizeof endpoint->secret, err);
    if (status == ZPP_OK) status = listen_here(door, endpoint, err);
    if (status != ZPP_OK) return status;
    return zpp_store_publish(comm, store, "address", endpoint, sizeof *endpoint, err);
}

static zpp_status read_address(struct zpp_door *door, const struct zpp_store *store, int rank, struct zpp_err *err) {
    struct zpp_comm *comm = door->comm;
    struct address_endpoint *endpoint = &door->endpoint[rank];
    const struct address_endpoint *own = &door->endpoint[comm->rank];
    size_t bytes = sizeof *endpoint;
    const zpp_status status = zpp_store_read(comm, store, "address", rank, endpoint, &bytes, err);
    if (status != ZPP_OK) return status;
    if (bytes != sizeof *endpoint || endpoint->magic != MAGIC || endpoint->rank != (uint32_t)rank ||
        endpoint->links < 1 || endpoint->links > ZPP_NET_DATA_MAX)
        return zpp_fail_rank(err, ZPP_PEER, rank,
                             "comm: the store holds an address of %zu bytes for rank %d that this version of zeropp "
                             "does not know (wanted %zu); run the same zeropp on all ranks",
                             bytes, rank, sizeof *endpoint);
    if (endpoint->family != own->family)
        return zpp_fail_rank(err, ZPP_PEER, rank,
                             "comm: rank %d has an IPv%u address and rank %d an IPv%u one; set ZEROPP_IFNAME or "
                             "ZEROPP_IP_FAMILY so that they agree",
                             rank, endpoint->family, comm->rank, own->family);
    comm->net->peer[rank].data_links = (int)(endpoint->links < own->links ? endpoint->links : own->links);
    return ZPP_OK;
}

static socklen_t address_of(const struct zpp_door *door, int rank, struct sockaddr_storage *out) {
    const struct address_endpoint endpoint = endpoint_of(door, rank);
    memset(out, 0, sizeof *out);
    if (endpoint.family == 6) {
        struct sockaddr_in6 *six = (struct sockaddr_in6 *)(void *)out;
        six->sin6_family = AF_INET6;
        six->sin6_port = htons(endpoint.port);
        memcpy(&six->sin6_addr, endpoint.address, 16);
        /* Complete a link-local address with its link: the one that this rank uses. */
        six->sin6_scope_id = ((const struct sockaddr_in6 *)(const void *)&door->own.address)->sin6_scope_id;
        return sizeof *six;
    }
    struct sockaddr_in *four = (struct sockaddr_in *)(void *)out;
    four->sin_family = AF_INET;
    four->sin_port = htons(endpoint.port);
    memcpy(&four->sin_addr, endpoint.address, 4);
    return sizeof *four;
}

/* --- connecting to a lower rank ---------------------------------------------------------------------------------- */

/* Wait until the socket can be read or written, or about 100 ms; then run the checks of a wait. */
static zpp_status pause_for(const struct caller *caller, int fd, short events, int rank, struct zpp_err *err) {
    struct pollfd polled = {fd, events, 0};
    const int ready = poll(&polled, 1, 100);
    return ready > 0 ? ZPP_OK : zpp_wait_check(caller->wait_ctx, rank, false, err);
}

static zpp_status unreachable(const struct caller *caller, int rank, int os_errno, struct zpp_err *err) {
    const struct zpp_door *door = caller->door;
    struct sockaddr_storage there;
    if (caller->ended && (os_errno == ECONNREFUSED || os_errno == ECONNRESET || os_errno == EPIPE))
        *caller->ended = true;
    char from[80], to[80];
    (void)address_of(door, rank, &there);
    zpp_net_describe(&door->own.address, from, sizeof from);
    zpp_net_describe(&there, to, sizeof to);
    return zpp_fail_rank(err, ZPP_PEER, rank,
                         "comm: rank %d cannot connect from %s to rank %d at %s: %s; if that is the wrong network, set "
                         "ZEROPP_IFNAME",
                         door->comm->rank, from, rank, to, strerror(os_errno));
}

static zpp_status dial(const struct caller *caller, int rank, int *out, struct zpp_err *err) {
    const struct zpp_door *door = caller->door;
    struct sockaddr_storage there;
    const socklen_t length = address_of(door, rank, &there);
    int failed = 0;
    socklen_t failed_bytes = sizeof failed;
    const int fd = socket(there.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return zpp_fail_os(err, errno, "comm: no socket for rank %d", rank);
    *out = fd;
    if (bind(fd, (const struct sockaddr *)&door->own.address, door->own.length) != 0)
        return zpp_fail_os(err, errno, "comm: rank %d cannot use its own address", door->comm->rank);
    if (connect(fd, (const struct sockaddr *)&there, length) == 0) return ZPP_OK;
    if (errno != EINPROGRESS) return unreachable(caller, rank, errno, err);
    for (;;) {
        struct pollfd writable = {fd, POLLOUT, 0};
        if (poll(&writable, 1, 100) > 0) break;
        const zpp_status status = zpp_wait_check(caller->wait_ctx, rank, false, err);
        if (status != ZPP_OK) return status;
    }
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &failed_bytes) != 0) failed = errno;
    return failed ? unreachable(caller, rank, failed, err) : ZPP_OK;
}

static zpp_status hung_up(const struct caller *caller, int rank, int os_errno, struct zpp_err *err) {
    const struct zpp_comm *comm = caller->door->comm;
    if (caller->ended) *caller->ended = true;
    return zpp_fail_rank(err, ZPP_PEER, rank, "comm: rank %d ended, or refused rank %d, while joining group \"%s\"%s%s",
                         rank, comm->rank, comm->name, os_errno ? ": " : "", os_errno ? strerror(os_errno) : "");
}

static zpp_status receive_all(const struct caller *caller, int fd, void *out, size_t bytes, int rank,
                              struct zpp_err *err) {
    size_t got = 0;
    while (got < bytes) {
        const ssize_t more = recv(fd, (uint8_t *)out + got, bytes - got, MSG_DONTWAIT);
        if (more > 0) {
            got += (size_t)more;
            continue;
        }
        if (more == 0 || (errno != EAGAIN && errno != EINTR))
            return hung_up(caller, rank, more ? errno : 0, err);
        const zpp_status status = pause_for(caller, fd, POLLIN, rank, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

/* Make one link to a rank that listens. `fd` is the caller's, whatever is returned. */
static zpp_status call(const struct caller *caller, int rank, int slot, int *fd, struct zpp_err *err) {
    const struct zpp_comm *comm = caller->door->comm;
    const struct address_endpoint endpoint = endpoint_of(caller->door, rank);
    struct challenge challenge;
    struct handshake handshake = {.magic = MAGIC, .rank = (uint16_t)comm->rank, .slot = (uint16_t)slot};
    struct answer answer;
    zpp_status status = dial(caller, rank, fd, err);
    if (status == ZPP_OK) status = receive_all(caller, *fd, &challenge, sizeof challenge, rank, err);
    if (status == ZPP_OK) status = random_bytes(handshake.nonce, sizeof handshake.nonce, err);
    if (status != ZPP_OK) return status;
    handshake.mac = prove(&endpoint, 'C', &handshake, challenge.nonce);
    if (send(*fd, &handshake, sizeof handshake, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof handshake)
        return unreachable(caller, rank, errno, err);
    status = receive_all(caller, *fd, &answer, sizeof answer, rank, err);
    if (status != ZPP_OK) return status;
    if (challenge.magic != MAGIC || challenge.rank != (uint32_t)rank || answer.magic != MAGIC ||
        !zpp_net_same_mac(answer.mac, prove(&endpoint, 'L', &handshake, challenge.nonce)))
        return zpp_fail_rank(err, ZPP_PEER, rank,
                             "comm: the process that answers for rank %d does not know the secret of group \"%s\"",
                             rank, comm->name);
    tune(*fd);
    return ZPP_OK;
}

/* A rank that is busy turns this one away after STRANGER_NS, and may have time for it now. */
static bool worth_another(const struct caller *caller, zpp_status status, int rank) {
    return status == ZPP_PEER && caller->door->directory && !zpp_net_died(caller->door->comm, rank);
}

static zpp_status make_link(const struct caller *caller, int rank, int slot, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (int tried = 0; tried < CALLS_MAX; tried++) {
        int fd = -1;
        status = call(caller, rank, slot, &fd, err);
        if (status == ZPP_OK) return zpp_net_attach(caller->door->comm, rank, slot, false, fd, err);
        if (fd >= 0) close(fd);
        if (!worth_another(caller, status, rank)) return status;
    }
    return status;
}

/* --- being called ------------------------------------------------------------------------------------------------ */

static void reject(struct stranger *stranger) {
    if (stranger->fd >= 0) close(stranger->fd); /* this ends its watch, too */
    stranger->fd = -1;
}

/* Return a free place, or that of the oldest connection. */
static struct stranger *place_for_one(struct zpp_door *door) {
    struct stranger *oldest = &door->stranger[0];
    for (int i = 0; i < STRANGERS_MAX; i++) {
        struct stranger *stranger = &door->stranger[i];
        if (stranger->fd < 0) return stranger;
        if (stranger->since_ns < oldest->since_ns) oldest = stranger;
    }
    reject(oldest);
    return oldest;
}

static bool listen_for(const struct zpp_door *door, int fd, const struct stranger *stranger) {
    struct epoll_event event = {.events = EPOLLIN,
                                .data.u64 = stranger ? (uint64_t)(stranger - door->stranger) : STRANGERS_MAX};
    return door->epoll < 0 || epoll_ctl(door->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static void greet(struct zpp_door *door, int fd) {
    struct stranger *stranger = place_for_one(door);
    struct challenge challenge = {.magic = MAGIC, .rank = (uint32_t)door->comm->rank};
    *stranger = (struct stranger){.fd = fd, .since_ns = zpp_now_ns()};
    if (getrandom(stranger->nonce, NONCE_BYTES, 0) != NONCE_BYTES || !listen_for(door, fd, stranger)) {
        reject(stranger);
        return;
    }
    memcpy(challenge.nonce, stranger->nonce, NONCE_BYTES);
    if (send(fd, &challenge, sizeof challenge, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof challenge)
        reject(stranger);
}

/* Return true if nobody has taken this slot yet, and it is one that the rank may make. */
static bool is_free(const struct zpp_door *door, const struct handshake *handshake) {
    const struct zpp_comm *comm = door->comm;
    const struct zpp_net_peer *peer = &comm->net->peer[handshake->rank];
    if (handshake->slot >= ZPP_NET_DATA + peer->data_links) return false;
    if (door->directory && handshake->slot == ZPP_NET_P2P) return peer->p2p_in < 0;
    return handshake->rank > comm->rank && peer->link[handshake->slot] < 0;
}

/* Return true if this handshake may take a slot. None of its fields is trusted before the MAC is checked. */
static bool is_member(const struct zpp_door *door, const struct stranger *stranger) {
    const struct zpp_comm *comm = door->comm;
    const struct handshake *handshake = &stranger->handshake;
    if (handshake->magic != MAGIC || handshake->rank >= comm->ranks) return false;
    if (atomic_load(&comm->closed)) return false; /* a link that is made after the farewell would never hear of it */
    if (!zpp_net_elsewhere(comm, handshake->rank) || !is_free(door, handshake)) return false;
    const struct address_endpoint own = endpoint_of(door, comm->rank);
    return zpp_net_same_mac(handshake->mac, prove(&own, 'C', handshake, stranger->nonce));
}

/* Read bytes of an unverified handshake. */
static void listen_to(struct zpp_door *door, struct stranger *stranger) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    const ssize_t got = recv(stranger->fd, (uint8_t *)&stranger->handshake + stranger->bytes,
                             sizeof stranger->handshake - stranger->bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0) stranger->bytes += (size_t)got;
    if (got > 0 && stranger->bytes < sizeof stranger->handshake) return;
    if (got <= 0 || !is_member(door, stranger)) {
        reject(stranger);
        return;
    }
    const struct handshake *handshake = &stranger->handshake;
    const struct address_endpoint own = endpoint_of(door, door->comm->rank);
    const struct answer answer = {.magic = MAGIC, .mac = prove(&own, 'L', handshake, stranger->nonce)};
    if (send(stranger->fd, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof answer) {
        reject(stranger);
        return;
    }
    tune(stranger->fd);
    if (door->epoll >= 0) (void)epoll_ctl(door->epoll, EPOLL_CTL_DEL, stranger->fd, NULL);
    /* Without memory for the link, the peer's wait for it ends with the group's timeout. */
    (void)zpp_net_attach(door->comm, handshake->rank, handshake->slot, true, stranger->fd, &ignored);
    stranger->fd = -1;
}

static void accept_strangers(struct zpp_door *door) {
    int fd;
    while ((fd = accept4(door->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) greet(door, fd);
}

static void refuse_the_slow(struct zpp_door *door) {
    const uint64_t now_ns = zpp_now_ns();
    for (int i = 0; i < STRANGERS_MAX; i++)
        if (door->stranger[i].fd >= 0 && now_ns - door->stranger[i].since_ns > STRANGER_NS)
            reject(&door->stranger[i]);
}

/* --- a full group: all links at once ------------------------------------------------------------------------------ */

static int lowest_missing(const struct zpp_comm *comm) {
    for (int r = comm->rank + 1; r < comm->ranks; r++) {
        if (!zpp_net_elsewhere(comm, r)) continue;
        const struct zpp_net_peer *peer = &comm->net->peer[r];
        for (int slot = 0; slot < ZPP_NET_DATA + peer->data_links; slot++)
            if (peer->link[slot] < 0) return r;
    }
    return comm->ranks;
}

static int poll_all(struct zpp_door *door, struct pollfd *polled) {
    polled[0] = (struct pollfd){door->listener, POLLIN, 0};
    for (int i = 0; i < STRANGERS_MAX; i++) polled[i + 1] = (struct pollfd){door->stranger[i].fd, POLLIN, 0};
    return poll(polled, STRANGERS_MAX + 1, 100);
}

static zpp_status await_higher(const struct caller *caller, struct zpp_err *err) {
    struct zpp_door *door = caller->door;
    struct zpp_comm *comm = door->comm;
    struct pollfd polled[STRANGERS_MAX + 1];
    for (int missing = lowest_missing(comm); missing < comm->ranks; missing = lowest_missing(comm)) {
        const int ready = poll_all(door, polled);
        for (int i = 0; i < STRANGERS_MAX; i++)
            if (door->stranger[i].fd >= 0 && ready > 0 && polled[i + 1].revents) listen_to(door, &door->stranger[i]);
        refuse_the_slow(door);
        if (ready > 0 && polled[0].revents) accept_strangers(door);
        /* After every poll: strangers, or a listener without a free descriptor, make it return at once again and
         * again. */
        const zpp_status status = zpp_wait_check(caller->wait_ctx, missing, false, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

static zpp_status connect_all(const struct caller *caller, const struct zpp_store *store, struct zpp_err *err) {
    struct zpp_door *door = caller->door;
    struct zpp_comm *comm = door->comm;
    zpp_status status = publish(door, store, err);
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++)
        if (zpp_net_elsewhere(comm, r)) status = read_address(door, store, r, err);
    for (int r = 0; status == ZPP_OK && r < comm->rank; r++) {
        if (!zpp_net_elsewhere(comm, r)) continue;
        for (int slot = 0; status == ZPP_OK && slot < ZPP_NET_DATA + comm->net->peer[r].data_links; slot++)
            status = make_link(caller, r, slot, err);
    }
    return status == ZPP_OK ? await_higher(caller, err) : status;
}

/* --- the door ---------------------------------------------------------------------------------------------------- */

static void close_door(struct zpp_door *door) {
    if (!door) return;
    for (int i = 0; i < STRANGERS_MAX; i++) reject(&door->stranger[i]);
    if (door->listener >= 0) close(door->listener);
    if (door->epoll >= 0) close(door->epoll);
    free(door->endpoint);
    free(door->directory);
    free(door);
}

static zpp_status make_door(struct zpp_comm *comm, const struct zpp_network_options *options, struct zpp_door **out,
                            struct zpp_err *err) {
    const int links = options->connections ? options->connections : ZPP_NET_DATA_DEFAULT;
    if (links < 1 || links > ZPP_NET_DATA_MAX)
        return zpp_fail(err, ZPP_INVALID, "comm: ZEROPP_TCP_CONNECTIONS is %d, wanted 1 to %d", links,
                        (int)ZPP_NET_DATA_MAX);
    struct zpp_door *door = calloc(1, sizeof *door);
    if (!door) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for the rendezvous between hosts");
    door->comm = comm;
    door->links = links;
    door->listener = door->epoll = -1;
    for (int i = 0; i < STRANGERS_MAX; i++) door->stranger[i].fd = -1;
    const zpp_status status = zpp_net_choose(options, &door->own, err);
    if (status == ZPP_OK) *out = door;
    else close_door(door);
    return status;
}

zpp_status zpp_door_open(struct zpp_comm *comm, const struct zpp_network_options *options, struct zpp_door_address *out,
                         struct zpp_err *err) {
    struct address_endpoint endpoint = {0};
    zpp_status status = make_door(comm, options, &comm->door, err);
    if (status == ZPP_OK) status = listen_here(comm->door, &endpoint, err);
    if (status != ZPP_OK) return status;
    comm->door->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (comm->door->epoll < 0 || !listen_for(comm->door, comm->door->listener, NULL))
        return zpp_fail_os(err, errno, "comm: rank %d cannot watch its listener (epoll)", comm->rank);
    *out = (struct zpp_door_address){.family = endpoint.family, .links = endpoint.links, .port = endpoint.port};
    memcpy(out->address, endpoint.address, sizeof out->address);
    return ZPP_OK;
}

void zpp_door_close(struct zpp_comm *comm) {
    close_door(comm->door);
    comm->door = NULL;
}

void zpp_door_direct(struct zpp_comm *comm, struct zpp_directory *directory) { comm->door->directory = directory; }

int zpp_door_epoll(const struct zpp_comm *comm) { return comm->door->epoll; }
int zpp_door_links(const struct zpp_comm *comm) { return (int)comm->door->directory->links; }

void zpp_door_serve(struct zpp_comm *comm) {
    struct zpp_door *door = comm->door;
    struct epoll_event event[STRANGERS_MAX];
    const int count = epoll_wait(door->epoll, event, STRANGERS_MAX, 0);
    bool called = false;
    for (int i = 0; i < count; i++) {
        const uint64_t who = event[i].data.u64;
        if (who == STRANGERS_MAX) called = true; /* last: it may give a place here to somebody else */
        else if (door->stranger[who].fd >= 0) listen_to(door, &door->stranger[who]);
    }
    if (called) accept_strangers(door);
    refuse_the_slow(door);
}

/* --- a sparse group: links when they are needed ------------------------------------------------------------------ */

/* Return true if `rank` is at the place of `of` on a host whose distance before or after is a power of two. A host with
 * fewer ranks has its places again. */
static bool is_near(const struct zpp_hosts *hosts, int of, int rank) {
    const int distance = (hosts->host_of[rank] - hosts->host_of[of] + hosts->hosts) % hosts->hosts;
    const int back = hosts->hosts - distance, count = hosts->count[hosts->host_of[rank]];
    if (distance == 0 || hosts->index_of[rank] != hosts->index_of[of] % count) return false;
    return (distance & (distance - 1)) == 0 || (back & (back - 1)) == 0;
}

static bool has_control(const struct zpp_comm *comm, int rank) {
    const struct zpp_hosts *hosts = &comm->net->hosts;
    return is_near(hosts, comm->rank, rank) || is_near(hosts, rank, comm->rank);
}

/* Wait until all control links are there, which the watcher takes in. */
static zpp_status await_callers(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct zpp_counter *doorbell = &zpp_control(comm, comm->rank)->doorbell.counter;
    for (int r = comm->rank + 1; r < comm->ranks; r++) {
        if (!has_control(comm, r)) continue;
        for (;;) {
            const uint32_t rung = atomic_load(&doorbell->value);
            if (comm->net->peer[r].link[ZPP_NET_CONTROL] >= 0) break;
            (void)zpp_counter_sleep(wait_ctx, doorbell, rung + 1, 100000000u);
            const zpp_status status = zpp_wait_check(wait_ctx, r, false, err);
            if (status != ZPP_OK) return status;
        }
    }
    return ZPP_OK;
}

static zpp_status connect_near(const struct caller *caller, struct zpp_err *err) {
    struct zpp_comm *comm = caller->door->comm;
    zpp_status status = ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < comm->rank; r++)
        if (has_control(comm, r)) status = make_link(caller, r, ZPP_NET_CONTROL, err);
    return status == ZPP_OK ? await_callers(caller->wait_ctx, err) : status;
}

static bool calls(const struct zpp_comm *comm, int rank, int slot) {
    return (slot == ZPP_NET_P2P || comm->rank > rank) && comm->net->peer[rank].link[slot] < 0;
}

/* A rank takes no link. One that leaves because calls diverged tells the error of the group first, and it has both
 * calls; it may come here a few hosts later than the refusal. Else the rank left, or died, before this rank's call. */
static zpp_status refused(struct zpp_wait_ctx *wait_ctx, int rank, bool ended, const struct zpp_err *reason,
                          struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const struct timespec pause = {0, 10000000};
    const uint64_t until_ns = zpp_now_ns() + HEAR_NS;
    char doing[256] = "a call";
    while (ended && zpp_now_ns() < until_ns) {
        const zpp_status status = zpp_wait_check(wait_ctx, rank, false, err);
        if (status != ZPP_OK) return status;
        nanosleep(&pause, NULL);
    }
    if (!ended) return zpp_comm_fail(comm, ZPP_PEER, rank, err, "%s", reason->text);
    if (wait_ctx->describe) wait_ctx->describe(wait_ctx->ctx, doing, sizeof doing);
    return zpp_comm_fail(comm, ZPP_PEER, rank, err,
                         "comm: rank %d left group \"%s\", or died, before rank %d had a link to it, which it needs in "
                         "%s; every rank has to make the same calls before it leaves",
                         zpp_label(comm, rank), comm->name, zpp_label(comm, comm->rank), doing);
}

zpp_status zpp_net_reach(struct zpp_wait_ctx *wait_ctx, int rank, int first_slot, int end_slot, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    bool ended = false;
    const struct caller caller = {comm->door, wait_ctx, &ended};
    for (int slot = first_slot; slot < end_slot; slot++) {
        struct zpp_err reason = ZPP_ERR_INIT;
        if (!calls(comm, rank, slot)) continue;
        const zpp_status status = make_link(&caller, rank, slot, &reason);
        if (status == ZPP_PEER) return refused(wait_ctx, rank, ended, &reason, err);
        if (status != ZPP_OK && err) *err = reason;
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

zpp_status zpp_net_connect(struct zpp_comm *comm, const struct zpp_network_options *options,
                           const struct zpp_store *store, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_wait_ctx wait_ctx = {.comm = comm, .wait = wait, .own_timeout = true, .describe = describe_joining};
    struct caller caller = {comm->door, &wait_ctx, NULL};
    if (comm->door) return connect_near(&caller, err);
    zpp_status status = make_door(comm, options, &caller.door, err);
    if (status != ZPP_OK) return status;
    caller.door->endpoint = calloc((size_t)comm->ranks, sizeof *caller.door->endpoint);
    status = caller.door->endpoint ? connect_all(&caller, store, err)
                                   : zpp_fail(err, ZPP_NOMEM, "comm: no memory for %d addresses", comm->ranks);
    close_door(caller.door);
    return status;
}
