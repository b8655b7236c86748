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
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "net.h"

enum { MAGIC = 0x5a505441, NONCE_BYTES = 16, STRANGERS_MAX = 64 };
static const uint64_t STRANGER_NS = 5000000000u;

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

struct joining {
    struct zpp_comm *comm;
    struct zpp_wait_ctx wait_ctx;
    struct zpp_net_address own;
    struct address_endpoint endpoint[ZPP_RANKS_MAX];
    int listener;
    struct stranger stranger[STRANGERS_MAX];
};

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

static zpp_status listen_here(struct joining *joining, struct zpp_err *err) {
    struct zpp_net_address bound = joining->own;
    struct address_endpoint *endpoint = &joining->endpoint[joining->comm->rank];
    char address_text[80];
    zpp_net_describe(&bound.address, address_text, sizeof address_text);
    joining->listener = socket(bound.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (joining->listener < 0 ||
        bind(joining->listener, (const struct sockaddr *)&bound.address, bound.length) != 0 ||
        listen(joining->listener, 512) != 0 ||
        getsockname(joining->listener, (struct sockaddr *)&bound.address, &bound.length) != 0)
        return zpp_fail_os(err, errno, "comm: rank %d cannot listen on %s", joining->comm->rank, address_text);
    endpoint->family = bound.address.ss_family == AF_INET6 ? 6 : 4;
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

static zpp_status publish(struct joining *joining, int links, const struct zpp_store *store, struct zpp_err *err) {
    struct zpp_comm *comm = joining->comm;
    struct address_endpoint *endpoint = &joining->endpoint[comm->rank];
    endpoint->magic = MAGIC;
    endpoint->rank = (uint32_t)comm->rank;
    endpoint->links = (uint32_t)links;
    zpp_status status = random_bytes(endpoint->secret, sizeof endpoint->secret, err);
    if (status == ZPP_OK) status = listen_here(joining, err);
    if (status != ZPP_OK) return status;
    return zpp_store_publish(comm, store, "address", endpoint, sizeof *endpoint, err);
}

static zpp_status read_address(struct joining *joining, const struct zpp_store *store, int rank, struct zpp_err *err) {
    struct zpp_comm *comm = joining->comm;
    struct address_endpoint *endpoint = &joining->endpoint[rank];
    const struct address_endpoint *own = &joining->endpoint[comm->rank];
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

static socklen_t address_of(const struct joining *joining, int rank, struct sockaddr_storage *out) {
    const struct address_endpoint *endpoint = &joining->endpoint[rank];
    memset(out, 0, sizeof *out);
    if (endpoint->family == 6) {
        struct sockaddr_in6 *six = (struct sockaddr_in6 *)(void *)out;
        six->sin6_family = AF_INET6;
        six->sin6_port = htons(endpoint->port);
        memcpy(&six->sin6_addr, endpoint->address, 16);
        /* Complete a link-local address with its link: the one that this rank uses. */
        six->sin6_scope_id = ((const struct sockaddr_in6 *)(const void *)&joining->own.address)->sin6_scope_id;
        return sizeof *six;
    }
    struct sockaddr_in *four = (struct sockaddr_in *)(void *)out;
    four->sin_family = AF_INET;
    four->sin_port = htons(endpoint->port);
    memcpy(&four->sin_addr, endpoint->address, 4);
    return sizeof *four;
}

/* --- connecting to a lower rank ---------------------------------------------------------------------------------- */

/* Wait until the socket can be read or written, or about 100 ms; then run the checks of a wait. */
static zpp_status pause_for(struct joining *joining, int fd, short events, int rank, struct zpp_err *err) {
    struct pollfd polled = {fd, events, 0};
    const int ready = poll(&polled, 1, 100);
    return ready > 0 ? ZPP_OK : zpp_wait_check(&joining->wait_ctx, rank, false, err);
}

static zpp_status unreachable(const struct joining *joining, int rank, int os_errno, struct zpp_err *err) {
    struct sockaddr_storage there;
    char from[80], to[80];
    (void)address_of(joining, rank, &there);
    zpp_net_describe(&joining->own.address, from, sizeof from);
    zpp_net_describe(&there, to, sizeof to);
    return zpp_fail_rank(err, ZPP_PEER, rank,
                         "comm: rank %d cannot connect from %s to rank %d at %s: %s; if that is the wrong network, set "
                         "ZEROPP_IFNAME",
                         joining->comm->rank, from, rank, to, strerror(os_errno));
}

static zpp_status dial(struct joining *joining, int rank, int *out, struct zpp_err *err) {
    struct sockaddr_storage there;
    const socklen_t length = address_of(joining, rank, &there);
    int failed = 0;
    socklen_t failed_bytes = sizeof failed;
    const int fd = socket(there.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return zpp_fail_os(err, errno, "comm: no socket for rank %d", rank);
    *out = fd;
    if (bind(fd, (const struct sockaddr *)&joining->own.address, joining->own.length) != 0)
        return zpp_fail_os(err, errno, "comm: rank %d cannot use its own address", joining->comm->rank);
    if (connect(fd, (const struct sockaddr *)&there, length) == 0) return ZPP_OK;
    if (errno != EINPROGRESS) return unreachable(joining, rank, errno, err);
    for (;;) {
        struct pollfd writable = {fd, POLLOUT, 0};
        if (poll(&writable, 1, 100) > 0) break;
        const zpp_status status = zpp_wait_check(&joining->wait_ctx, rank, false, err);
        if (status != ZPP_OK) return status;
    }
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &failed_bytes) != 0) failed = errno;
    return failed ? unreachable(joining, rank, failed, err) : ZPP_OK;
}

static zpp_status receive_all(struct joining *joining, int fd, void *out, size_t bytes, int rank, struct zpp_err *err) {
    size_t got = 0;
    while (got < bytes) {
        const ssize_t more = recv(fd, (uint8_t *)out + got, bytes - got, MSG_DONTWAIT);
        if (more > 0) {
            got += (size_t)more;
            continue;
        }
        if (more == 0 || (errno != EAGAIN && errno != EINTR))
            return zpp_fail_rank(
                err, ZPP_PEER, rank, "comm: rank %d ended, or refused rank %d, while joining group \"%s\"%s%s", rank,
                joining->comm->rank, joining->comm->name, more ? ": " : "", more ? strerror(errno) : "");
        const zpp_status status = pause_for(joining, fd, POLLIN, rank, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

static zpp_status call(struct joining *joining, int rank, int slot, struct zpp_err *err) {
    const struct address_endpoint *endpoint = &joining->endpoint[rank];
    struct challenge challenge;
    struct handshake handshake = {.magic = MAGIC, .rank = (uint16_t)joining->comm->rank, .slot = (uint16_t)slot};
    struct answer answer;
    int *fd = &joining->comm->net->peer[rank].link[slot];
    zpp_status status = dial(joining, rank, fd, err);
    if (status == ZPP_OK) status = receive_all(joining, *fd, &challenge, sizeof challenge, rank, err);
    if (status == ZPP_OK) status = random_bytes(handshake.nonce, sizeof handshake.nonce, err);
    if (status != ZPP_OK) return status;
    handshake.mac = prove(endpoint, 'C', &handshake, challenge.nonce);
    if (send(*fd, &handshake, sizeof handshake, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof handshake)
        return unreachable(joining, rank, errno, err);
    status = receive_all(joining, *fd, &answer, sizeof answer, rank, err);
    if (status != ZPP_OK) return status;
    if (challenge.magic != MAGIC || challenge.rank != (uint32_t)rank || answer.magic != MAGIC ||
        !zpp_net_same_mac(answer.mac, prove(endpoint, 'L', &handshake, challenge.nonce)))
        return zpp_fail_rank(err, ZPP_PEER, rank,
                             "comm: the process that answers for rank %d does not know the secret of group \"%s\"",
                             rank, joining->comm->name);
    tune(*fd);
    return ZPP_OK;
}

/* --- being called by a higher one -------------------------------------------------------------------------------- */

static void reject(struct stranger *stranger) {
    if (stranger->fd >= 0) close(stranger->fd);
    stranger->fd = -1;
}

/* Return a free place, or that of the oldest connection. */
static struct stranger *place_for_one(struct joining *joining) {
    struct stranger *oldest = &joining->stranger[0];
    for (int i = 0; i < STRANGERS_MAX; i++) {
        struct stranger *stranger = &joining->stranger[i];
        if (stranger->fd < 0) return stranger;
        if (stranger->since_ns < oldest->since_ns) oldest = stranger;
    }
    reject(oldest);
    return oldest;
}

static void greet(struct joining *joining, int fd) {
    struct stranger *stranger = place_for_one(joining);
    struct challenge challenge = {.magic = MAGIC, .rank = (uint32_t)joining->comm->rank};
    *stranger = (struct stranger){.fd = fd, .since_ns = zpp_now_ns()};
    if (getrandom(stranger->nonce, NONCE_BYTES, 0) != NONCE_BYTES) {
        reject(stranger);
        return;
    }
    memcpy(challenge.nonce, stranger->nonce, NONCE_BYTES);
    if (send(fd, &challenge, sizeof challenge, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof challenge)
        reject(stranger);
}

/* Return true if this handshake may take a slot. None of its fields is trusted before the MAC is checked. */
static bool is_member(const struct joining *joining, const struct stranger *stranger) {
    const struct zpp_comm *comm = joining->comm;
    const struct handshake *handshake = &stranger->handshake;
    if (handshake->magic != MAGIC || handshake->rank <= comm->rank || handshake->rank >= comm->ranks) return false;
    if (!zpp_net_elsewhere(comm, handshake->rank)) return false;
    const struct zpp_net_peer *peer = &comm->net->peer[handshake->rank];
    if (handshake->slot >= ZPP_NET_DATA + peer->data_links || peer->link[handshake->slot] >= 0) return false;
    return zpp_net_same_mac(handshake->mac, prove(&joining->endpoint[comm->rank], 'C', handshake, stranger->nonce));
}

/* Read bytes of an unverified handshake. */
static void listen_to(struct joining *joining, struct stranger *stranger) {
    const ssize_t got = recv(stranger->fd, (uint8_t *)&stranger->handshake + stranger->bytes,
                             sizeof stranger->handshake - stranger->bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0) stranger->bytes += (size_t)got;
    if (got > 0 && stranger->bytes < sizeof stranger->handshake) return;
    if (got <= 0 || !is_member(joining, stranger)) {
        reject(stranger);
        return;
    }
    const struct handshake *handshake = &stranger->handshake;
    const struct answer answer = {
        .magic = MAGIC, .mac = prove(&joining->endpoint[joining->comm->rank], 'L', handshake, stranger->nonce)};
    if (send(stranger->fd, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof answer) {
        reject(stranger);
        return;
    }
    tune(stranger->fd);
    joining->comm->net->peer[handshake->rank].link[handshake->slot] = stranger->fd;
    stranger->fd = -1;
}

static int lowest_missing(const struct zpp_comm *comm) {
    for (int r = comm->rank + 1; r < comm->ranks; r++) {
        if (!zpp_net_elsewhere(comm, r)) continue;
        const struct zpp_net_peer *peer = &comm->net->peer[r];
        for (int slot = 0; slot < ZPP_NET_DATA + peer->data_links; slot++)
            if (peer->link[slot] < 0) return r;
    }
    return comm->ranks;
}

static int poll_all(struct joining *joining, struct pollfd *polled) {
    polled[0] = (struct pollfd){joining->listener, POLLIN, 0};
    for (int i = 0; i < STRANGERS_MAX; i++) polled[i + 1] = (struct pollfd){joining->stranger[i].fd, POLLIN, 0};
    return poll(polled, STRANGERS_MAX + 1, 100);
}

static void accept_strangers(struct joining *joining) {
    int fd;
    while ((fd = accept4(joining->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) greet(joining, fd);
}

static zpp_status await_higher(struct joining *joining, struct zpp_err *err) {
    struct zpp_comm *comm = joining->comm;
    struct pollfd polled[STRANGERS_MAX + 1];
    for (int missing = lowest_missing(comm); missing < comm->ranks; missing = lowest_missing(comm)) {
        const int ready = poll_all(joining, polled);
        const uint64_t now_ns = zpp_now_ns();
        for (int i = 0; i < STRANGERS_MAX; i++) {
            struct stranger *stranger = &joining->stranger[i];
            if (stranger->fd < 0) continue;
            if (ready > 0 && polled[i + 1].revents)
                listen_to(joining, stranger);
            else if (now_ns - stranger->since_ns > STRANGER_NS)
                reject(stranger);
        }
        if (ready > 0 && polled[0].revents) accept_strangers(joining);
        /* After every poll: strangers, or a listener without a free descriptor, make it return at once again and
         * again. */
        const zpp_status status = zpp_wait_check(&joining->wait_ctx, missing, false, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

/* --- all of it --------------------------------------------------------------------------------------------------- */

static zpp_status connect_all(struct joining *joining, int links, const struct zpp_store *store, struct zpp_err *err) {
    struct zpp_comm *comm = joining->comm;
    zpp_status status = publish(joining, links, store, err);
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++)
        if (zpp_net_elsewhere(comm, r)) status = read_address(joining, store, r, err);
    for (int r = 0; status == ZPP_OK && r < comm->rank; r++) {
        if (!zpp_net_elsewhere(comm, r)) continue;
        for (int slot = 0; status == ZPP_OK && slot < ZPP_NET_DATA + comm->net->peer[r].data_links; slot++)
            status = call(joining, r, slot, err);
    }
    return status == ZPP_OK ? await_higher(joining, err) : status;
}

zpp_status zpp_net_connect(struct zpp_comm *comm, const struct zpp_network_options *options,
                           const struct zpp_store *store, const struct zpp_wait *wait, struct zpp_err *err) {
    const int links = options->connections ? options->connections : ZPP_NET_DATA_DEFAULT;
    if (links < 1 || links > ZPP_NET_DATA_MAX)
        return zpp_fail(err, ZPP_INVALID, "comm: ZEROPP_TCP_CONNECTIONS is %d, wanted 1 to %d", links,
                        (int)ZPP_NET_DATA_MAX);
    struct joining *joining = calloc(1, sizeof *joining);
    if (!joining) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for the rendezvous between hosts");
    joining->comm = comm;
    joining->listener = -1;
    joining->wait_ctx = (struct zpp_wait_ctx){.comm = comm, .wait = wait, .own_timeout = true,
                                              .describe = describe_joining};
    for (int i = 0; i < STRANGERS_MAX; i++) joining->stranger[i].fd = -1;
    zpp_status status = zpp_net_choose(options, &joining->own, err);
    if (status == ZPP_OK) status = connect_all(joining, links, store, err);
    for (int i = 0; i < STRANGERS_MAX; i++) reject(&joining->stranger[i]);
    if (joining->listener >= 0) close(joining->listener);
    free(joining);
    return status;
}
