/* SPDX-License-Identifier: Apache-2.0
 *
 * Rendezvous: the ranks of one host find each other and exchange their control memory; every rank learns the host of
 * every rank.
 *
 *   1. Each rank listens on a Unix socket of abstract, random name (nothing in the file system) and puts its endpoint
 *      into the store: host, process, socket name, and a random secret.
 *   2. It reads all endpoints. An endpoint with another identity (net_address.c) belongs to a rank on another host;
 *      net_join.c connects to it.
 *   3. Each pair of this host connects, higher rank to lower. Both check the user id that the kernel reports for the
 *      other end. The connecting rank sends the listener's secret and receives its own (both can read the store, so
 *      both belong to the job), and both send their control memory and a pidfd of themselves, by SCM_RIGHTS. A pidfd
 *      that was sent is valid in every pid namespace.
 *
 * A sparse group (more than ZPP_FULL_RANKS ranks) replaces 2 by rendezvous_tree.c.
 *
 * The boot id names the running kernel, so containers of one machine agree on it, whatever their host names are.
 * Network namespaces do separate abstract names, so the identity has the namespace in it.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "rendezvous.h"
#include "shm/memfd.h"

enum { FDS = 2 };

struct handshake {
    uint32_t magic, rank;
    uint8_t secret[ZPP_SECRET_BYTES];
};

struct rendezvous {
    struct zpp_comm *comm;
    struct zpp_wait_ctx wait_ctx;
    struct zpp_endpoint *endpoint; /* [ranks]; of a sparse group, those of this host */
    int fd[FDS]; /* my control memory, my pidfd (or -1) */
    int listener;
    struct zpp_hosts *hosts;
    bool here[ZPP_RANKS_MAX]; /* of a sparse group, while `hosts` is not known */
    bool elsewhere[ZPP_RANKS_MAX];
};

static zpp_status random_bytes(void *out, size_t bytes, struct zpp_err *err) {
    if (getrandom(out, bytes, 0) == (ssize_t)bytes) return ZPP_OK;
    return zpp_fail_os(err, errno, "comm: no random bytes for the secret of the group");
}

static socklen_t abstract_address(struct sockaddr_un *address, const char *name) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    const size_t length = strnlen(name, sizeof((struct zpp_endpoint *)0)->socket_name - 1);
    memcpy(address->sun_path + 1, name, length); /* a leading zero byte makes the name abstract */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

static zpp_status listen_here(struct rendezvous *rendezvous, struct zpp_endpoint *endpoint, struct zpp_err *err) {
    uint8_t name[16];
    zpp_status status = random_bytes(name, sizeof name, err);
    if (status == ZPP_OK) status = random_bytes(endpoint->secret, sizeof endpoint->secret, err);
    if (status != ZPP_OK) return status;
    size_t used = (size_t)snprintf(endpoint->socket_name, sizeof endpoint->socket_name, "zeropp-");
    for (size_t i = 0; i < sizeof name; i++)
        used += (size_t)snprintf(endpoint->socket_name + used, sizeof endpoint->socket_name - used, "%02x", name[i]);
    struct sockaddr_un address;
    const socklen_t length = abstract_address(&address, endpoint->socket_name);
    rendezvous->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (rendezvous->listener < 0 || bind(rendezvous->listener, (const struct sockaddr *)&address, length) != 0 ||
        listen(rendezvous->listener, ZPP_RANKS_MAX) != 0)
        return zpp_fail_os(err, errno, "comm: rank %d cannot listen for its peers (Unix socket)",
                           rendezvous->comm->rank);
    return ZPP_OK;
}

static int full_ranks(const struct zpp_network_options *network) {
    return network->full_ranks ? network->full_ranks : ZPP_FULL_RANKS;
}

static zpp_status make_endpoint(struct rendezvous *rendezvous, const struct zpp_network_options *network,
                                struct zpp_err *err) {
    struct zpp_comm *comm = rendezvous->comm;
    struct zpp_endpoint *endpoint = &rendezvous->endpoint[comm->rank];
    endpoint->magic = ZPP_ENDPOINT_MAGIC;
    endpoint->rank = (uint32_t)comm->rank;
    endpoint->ranks = (uint32_t)comm->ranks;
    endpoint->pid = (uint32_t)getpid();
    endpoint->base_bytes = comm->base_bytes;
    zpp_net_identity(network, endpoint->identity, sizeof endpoint->identity);
    if (gethostname(endpoint->host, sizeof endpoint->host - 1) != 0) snprintf(endpoint->host, sizeof endpoint->host,
                                                                              "?");
    endpoint->full_ranks = (uint32_t)full_ranks(network);
    return listen_here(rendezvous, endpoint, err);
}

static zpp_status read_endpoint(struct rendezvous *rendezvous, const struct zpp_store *store, int rank,
                                struct zpp_err *err) {
    struct zpp_comm *comm = rendezvous->comm;
    struct zpp_endpoint *endpoint = &rendezvous->endpoint[rank];
    const struct zpp_endpoint *own = &rendezvous->endpoint[comm->rank];
    size_t bytes = sizeof *endpoint;
    zpp_status status = zpp_store_read(comm, store, "rank", rank, endpoint, &bytes, err);
    if (status == ZPP_OK) status = zpp_endpoint_check(comm, own, endpoint, bytes, rank, err);
    if (status == ZPP_OK) comm->peer[rank].pid = (int32_t)endpoint->pid;
    return status;
}

/* --- one pair ---------------------------------------------------------------------------------------------------- */

static zpp_status check_user(int socket_fd, int rank, struct zpp_err *err) {
    struct ucred user;
    socklen_t length = sizeof user;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &user, &length) != 0)
        return zpp_fail_os(err, errno, "comm: the user behind rank %d is unknown (SO_PEERCRED)", rank);
    if (user.uid == geteuid()) return ZPP_OK;
    return zpp_fail_rank(err, ZPP_PEER, rank,
                         "comm: rank %d runs as user %u, this rank as user %u; ranks of a group share memory, so start "
                         "them as one user",
                         rank, (unsigned)user.uid, (unsigned)geteuid());
}

static zpp_status send_handshake(const struct rendezvous *rendezvous, int socket_fd, int rank, const uint8_t *secret,
                                 struct zpp_err *err) {
    struct handshake handshake = {ZPP_ENDPOINT_MAGIC, (uint32_t)rendezvous->comm->rank, {0}};
    memcpy(handshake.secret, secret, ZPP_SECRET_BYTES);
    union {
        char bytes[CMSG_SPACE(sizeof(int) * FDS)];
        struct cmsghdr align;
    } control;
    struct iovec part = {&handshake, sizeof handshake};
    const size_t fds = rendezvous->fd[1] >= 0 ? 2 : 1;
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = CMSG_SPACE(sizeof(int) * fds)};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * fds);
    memcpy(CMSG_DATA(head), rendezvous->fd, sizeof(int) * fds);
    if (sendmsg(socket_fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof handshake) return ZPP_OK;
    return zpp_fail_os(err, errno, "comm: rank %d cannot be written to while joining", rank);
}

/* Take the descriptors of a packet; an empty packet may carry some, too. */
static void read_descriptors(struct msghdr *message, int *fd) {
    struct cmsghdr *head = CMSG_FIRSTHDR(message);
    if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) return;
    const size_t bytes = head->cmsg_len - CMSG_LEN(0);
    memcpy(fd, CMSG_DATA(head), bytes < sizeof(int) * FDS ? bytes : sizeof(int) * FDS);
}

/* Receive a packet. AGAIN: none is there yet. The caller closes the descriptors in `fd`, whatever is returned with
 * OK. */
static zpp_status receive_handshake(int socket_fd, struct handshake *handshake, int *fd, int *os_errno) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * FDS)];
        struct cmsghdr align;
    } control;
    struct iovec part = {handshake, sizeof *handshake};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    fd[0] = fd[1] = -1;
    const ssize_t got = recvmsg(socket_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    *os_errno = got < 0 ? errno : 0;
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return ZPP_AGAIN;
    if (got >= 0) read_descriptors(&message, fd);
    if (got == (ssize_t)sizeof *handshake && handshake->magic == ZPP_ENDPOINT_MAGIC && fd[0] >= 0) return ZPP_OK;
    for (int i = 0; i < FDS; i++) {
        if (fd[i] >= 0) close(fd[i]);
        fd[i] = -1;
    }
    return ZPP_PEER;
}

static bool same_secret(const uint8_t *a, const uint8_t *b) {
    uint8_t difference = 0; /* in constant time, as for any secret */
    for (int i = 0; i < ZPP_SECRET_BYTES; i++) difference |= (uint8_t)(a[i] ^ b[i]);
    return difference == 0;
}

static zpp_status take_peer(struct zpp_comm *comm, int rank, int socket_fd, const int *fd, struct zpp_err *err) {
    zpp_status status = zpp_memfd_map(fd[0], comm->base_bytes, &comm->base[rank], err);
    close(fd[0]);
    comm->peer[rank].socket = socket_fd;
    comm->peer[rank].pidfd = fd[1];
    if (status == ZPP_OK && zpp_control(comm, rank)->rank != (uint32_t)rank)
        status = zpp_fail_rank(err, ZPP_PEER, rank, "comm: rank %d sent the memory of rank %u", rank,
                               zpp_control(comm, rank)->rank);
    return status;
}

static zpp_status await_handshake(struct rendezvous *rendezvous, int socket_fd, int rank, struct handshake *handshake,
                                  int *fd, struct zpp_err *err) {
    for (;;) {
        int os_errno = 0;
        const zpp_status status = receive_handshake(socket_fd, handshake, fd, &os_errno);
        if (status == ZPP_OK) return ZPP_OK;
        if (status != ZPP_AGAIN)
            return zpp_fail_rank(err, ZPP_PEER, rank,
                                 "comm: rank %d (process %u) closed its connection while joining group \"%s\"%s%s",
                                 rank, rendezvous->endpoint[rank].pid, rendezvous->comm->name, os_errno ? ": " : "",
                                 os_errno ? strerror(os_errno) : "");
        struct pollfd readable = {socket_fd, POLLIN, 0};
        (void)poll(&readable, 1, 100);
        const zpp_status late = zpp_wait_check(&rendezvous->wait_ctx, rank, false, err);
        if (late != ZPP_OK) return late;
    }
}

static zpp_status connect_to(struct rendezvous *rendezvous, int rank, int *socket_fd, struct zpp_err *err) {
    struct sockaddr_un address;
    const struct zpp_endpoint *endpoint = &rendezvous->endpoint[rank];
    const socklen_t length = abstract_address(&address, endpoint->socket_name);
    *socket_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*socket_fd < 0) return zpp_fail_os(err, errno, "comm: no socket for rank %d", rank);
    while (connect(*socket_fd, (const struct sockaddr *)&address, length) != 0) {
        if (errno == EAGAIN || errno == EINTR) { /* the listener's queue is full */
            const struct timespec pause = {0, 1000000};
            nanosleep(&pause, NULL);
            const zpp_status late = zpp_wait_check(&rendezvous->wait_ctx, rank, false, err);
            if (late != ZPP_OK) return late;
            continue;
        }
        if (errno == ECONNREFUSED)
            return zpp_fail_rank(
                err, ZPP_PEER, rank,
                "comm: rank %d (process %u on \"%.63s\") does not listen: it ended while joining group "
                "\"%s\", or it runs in another network namespace (containers of one host need a common one)",
                rank, endpoint->pid, endpoint->host, rendezvous->comm->name);
        return zpp_fail_os(err, errno, "comm: rank %d cannot be connected to", rank);
    }
    return ZPP_OK;
}

static zpp_status join_lower(struct rendezvous *rendezvous, int rank, struct zpp_err *err) {
    int socket_fd = -1, fd[FDS];
    struct handshake handshake;
    zpp_status status = connect_to(rendezvous, rank, &socket_fd, err);
    if (status == ZPP_OK) status = check_user(socket_fd, rank, err);
    if (status == ZPP_OK) status = send_handshake(rendezvous, socket_fd, rank, rendezvous->endpoint[rank].secret, err);
    if (status == ZPP_OK) status = await_handshake(rendezvous, socket_fd, rank, &handshake, fd, err);
    if (status == ZPP_OK &&
        (handshake.rank != (uint32_t)rank
         || !same_secret(handshake.secret, rendezvous->endpoint[rendezvous->comm->rank].secret))) {
        status = zpp_fail_rank(err, ZPP_PEER, rank,
                               "comm: the process that answers for rank %d does not know the secret of group \"%s\"",
                               rank, rendezvous->comm->name);
        for (int i = 0; i < FDS; i++)
            if (fd[i] >= 0) close(fd[i]);
    }
    if (status == ZPP_OK) return take_peer(rendezvous->comm, rank, socket_fd, fd, err);
    if (socket_fd >= 0) close(socket_fd);
    return status;
}

/* A connection comes from a higher rank of the job, or from a stranger, which is refused without ending the
 * rendezvous. */
static zpp_status admit(struct rendezvous *rendezvous, int socket_fd, bool *joined, struct zpp_err *err) {
    struct zpp_comm *comm = rendezvous->comm;
    struct zpp_err ignored = ZPP_ERR_INIT;
    struct handshake handshake;
    int fd[FDS] = {-1, -1}, os_errno;
    *joined = false;
    zpp_status status = check_user(socket_fd, ZPP_NO_RANK, &ignored);
    if (status == ZPP_OK) {
        struct pollfd readable = {socket_fd, POLLIN, 0};
        (void)poll(&readable, 1, 1000); /* peers write right after they connect */
        status = receive_handshake(socket_fd, &handshake, fd, &os_errno);
    }
    const bool known = status == ZPP_OK && handshake.rank > (uint32_t)comm->rank &&
        handshake.rank < (uint32_t)comm->ranks &&
                       !rendezvous->elsewhere[handshake.rank] && comm->peer[handshake.rank].socket < 0 &&
                       same_secret(handshake.secret, rendezvous->endpoint[comm->rank].secret);
    if (!known) {
        for (int i = 0; i < FDS; i++)
            if (fd[i] >= 0) close(fd[i]);
        close(socket_fd);
        return ZPP_OK;
    }
    const int rank = (int)handshake.rank;
    *joined = true;
    status = take_peer(comm, rank, socket_fd, fd, err); /* owns the descriptors from here on */
    if (status == ZPP_OK) status = send_handshake(rendezvous, socket_fd, rank, rendezvous->endpoint[rank].secret, err);
    return status;
}

static int lowest_missing(const struct rendezvous *rendezvous) {
    const struct zpp_comm *comm = rendezvous->comm;
    for (int r = comm->rank + 1; r < comm->ranks; r++)
        if (!rendezvous->elsewhere[r] && comm->peer[r].socket < 0) return r;
    return comm->ranks;
}

/* Detect a rank that ended: one that is still to connect listens, and the abstract name of one that ended is free
 * again. */
static bool no_longer_listens(const struct zpp_endpoint *endpoint) {
    struct sockaddr_un address;
    const socklen_t length = abstract_address(&address, endpoint->socket_name);
    const int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0) return false;
    const bool refused = connect(probe, (const struct sockaddr *)&address, length) != 0 && errno == ECONNREFUSED;
    close(probe);
    return refused;
}

static zpp_status await_higher(struct rendezvous *rendezvous, struct zpp_err *err) {
    struct zpp_comm *comm = rendezvous->comm;
    int lost = -1, idle_rounds = 0;
    for (int missing = lowest_missing(rendezvous); missing < comm->ranks; missing = lowest_missing(rendezvous)) {
        struct pollfd readable = {rendezvous->listener, POLLIN, 0};
        (void)poll(&readable, 1, 100);
        const int socket_fd = accept4(rendezvous->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        bool joined = false;
        zpp_status status = ZPP_OK;
        if (socket_fd >= 0) status = admit(rendezvous, socket_fd, &joined, err);
        if (status == ZPP_OK && !joined) status = zpp_wait_check(&rendezvous->wait_ctx, missing, false, err);
        if (status != ZPP_OK) return status;
        if (joined || socket_fd >= 0) continue;
        if (lost == missing) /* refused before, and no packet from it came since */
            return zpp_fail_rank(err, ZPP_PEER, lost, "comm: rank %d (process %u) ended while joining group \"%s\"",
                                 lost, rendezvous->endpoint[lost].pid, comm->name);
        if (++idle_rounds % 10 == 0 && no_longer_listens(&rendezvous->endpoint[missing])) lost = missing;
    }
    return ZPP_OK;
}

static void describe_joining(const void *ctx, char *text, size_t capacity) {
    (void)ctx;
    snprintf(text, capacity, "the rendezvous");
}

static zpp_status make_own_memory(struct rendezvous *rendezvous, struct zpp_err *err) {
    struct zpp_comm *comm = rendezvous->comm;
    zpp_status status = zpp_memfd_create("zeropp-control", comm->base_bytes, &rendezvous->fd[0], err);
    if (status == ZPP_OK) status = zpp_memfd_map(rendezvous->fd[0], comm->base_bytes, &comm->base[comm->rank], err);
    if (status != ZPP_OK) return status;
    struct zpp_control *control = zpp_control(comm, comm->rank);
    control->magic = ZPP_ENDPOINT_MAGIC;
    control->rank = (uint32_t)comm->rank;
    control->ranks = (uint32_t)comm->ranks;
    control->pid = (int32_t)getpid();
#ifdef SYS_pidfd_open
    rendezvous->fd[1] =
        (int)syscall(SYS_pidfd_open, getpid(), 0); /* Linux 5.3; -1 otherwise, or under a strict seccomp filter */
#endif
    return ZPP_OK;
}

void zpp_hosts_count(struct zpp_hosts *hosts, int ranks, int rank) {
    for (int r = 0; r < ranks; r++) hosts->index_of[r] = hosts->count[hosts->host_of[r]]++;
    for (int h = 1; h < hosts->hosts; h++) hosts->first[h] = hosts->first[h - 1] + hosts->count[h - 1];
    for (int r = 0; r < ranks; r++) hosts->order[hosts->first[hosts->host_of[r]] + hosts->index_of[r]] = r;
    hosts->mine = hosts->host_of[rank];
    hosts->even = true;
    for (int h = 1; h < hosts->hosts; h++) hosts->even = hosts->even && hosts->count[h] == hosts->count[0];
}

/* Number the hosts by their lowest rank, equally on every rank. */
static void number_hosts(struct rendezvous *rendezvous) {
    struct zpp_hosts *hosts = rendezvous->hosts;
    for (int r = 0; r < rendezvous->comm->ranks; r++) {
        int like = 0;
        while (like < r && strncmp(rendezvous->endpoint[like].identity, rendezvous->endpoint[r].identity,
                                   sizeof rendezvous->endpoint[r].identity) != 0)
            like++;
        hosts->host_of[r] = like < r ? hosts->host_of[like] : hosts->hosts++;
    }
}

static zpp_status read_endpoints(struct rendezvous *rendezvous, const struct zpp_store *store, struct zpp_err *err) {
    const struct zpp_comm *comm = rendezvous->comm;
    const struct zpp_endpoint *own = &rendezvous->endpoint[comm->rank];
    zpp_status status = zpp_store_publish(comm, store, "rank", own, sizeof *own, err);
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++)
        if (r != comm->rank) status = read_endpoint(rendezvous, store, r, err);
    if (status == ZPP_OK) number_hosts(rendezvous);
    return status;
}

static zpp_status join_here(struct rendezvous *rendezvous, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < rendezvous->comm->rank; r++)
        if (!rendezvous->elsewhere[r]) status = join_lower(rendezvous, r, err);
    return status == ZPP_OK ? await_higher(rendezvous, err) : status;
}

static zpp_status find_all(struct rendezvous *rendezvous, const struct zpp_store *store, struct zpp_err *err) {
    const struct zpp_hosts *hosts = rendezvous->hosts;
    const int ranks = rendezvous->comm->ranks, mine = rendezvous->comm->rank;
    const zpp_status status = read_endpoints(rendezvous, store, err);
    for (int r = 0; r < ranks; r++) rendezvous->elsewhere[r] = hosts->host_of[r] != hosts->host_of[mine];
    return status == ZPP_OK ? join_here(rendezvous, err) : status;
}

static zpp_status find_sparse(struct rendezvous *rendezvous, const struct zpp_network_options *network,
                              const struct zpp_store *store, struct zpp_err *err) {
    struct zpp_comm *comm = rendezvous->comm;
    int first = comm->rank, locals = 0;
    zpp_status status = zpp_door_open(comm, network, &rendezvous->endpoint[comm->rank].door, err);
    if (status == ZPP_OK) status = zpp_gather_endpoints(comm, store, rendezvous->endpoint, rendezvous->here, err);
    for (int r = comm->ranks - 1; r >= 0; r--) {
        rendezvous->elsewhere[r] = !rendezvous->here[r];
        locals += rendezvous->here[r];
        if (rendezvous->here[r]) first = r;
    }
    if (status == ZPP_OK) status = join_here(rendezvous, err);
    if (status != ZPP_OK) return status;
    return zpp_share_directory(&rendezvous->wait_ctx, store, first, locals, rendezvous->hosts, err);
}

static zpp_status find_ranks(struct rendezvous *rendezvous, const struct zpp_network_options *network,
                             const struct zpp_store *store, struct zpp_err *err) {
    const zpp_status status = make_endpoint(rendezvous, network, err);
    if (status != ZPP_OK) return status;
    return rendezvous->comm->ranks > full_ranks(network) ? find_sparse(rendezvous, network, store, err)
                                                         : find_all(rendezvous, store, err);
}

zpp_status zpp_rendezvous(struct zpp_comm *comm, const struct zpp_network_options *network,
                          const struct zpp_store *store, const struct zpp_wait *wait, struct zpp_hosts *hosts,
                          struct zpp_err *err) {
    struct rendezvous *rendezvous = calloc(1, sizeof *rendezvous);
    struct zpp_endpoint *endpoint = calloc((size_t)comm->ranks, sizeof *endpoint);
    if (!rendezvous || !endpoint) {
        free(rendezvous);
        free(endpoint);
        return zpp_fail(err, ZPP_NOMEM, "comm: no memory for the rendezvous of %d ranks", comm->ranks);
    }
    memset(hosts, 0, sizeof *hosts);
    rendezvous->comm = comm;
    rendezvous->endpoint = endpoint;
    rendezvous->hosts = hosts;
    rendezvous->fd[0] = rendezvous->fd[1] = rendezvous->listener = -1;
    rendezvous->wait_ctx = (struct zpp_wait_ctx){.comm = comm, .wait = wait, .own_timeout = true,
                                                 .describe = describe_joining};
    zpp_status status = make_own_memory(rendezvous, err);
    if (status == ZPP_OK && comm->ranks > 1) status = find_ranks(rendezvous, network, store, err);
    if (comm->ranks == 1) hosts->hosts = 1;
    if (status == ZPP_OK) zpp_hosts_count(hosts, comm->ranks, comm->rank);
    if (rendezvous->listener >= 0) close(rendezvous->listener);
    for (int i = 0; i < FDS; i++)
        if (rendezvous->fd[i] >= 0) close(rendezvous->fd[i]);
    free(endpoint);
    free(rendezvous);
    return status;
}
