/* SPDX-License-Identifier: Apache-2.0
 *
 * Control messages between two ranks over their socket (SOCK_SEQPACKET, so a message arrives whole): they carry the
 * descriptors of new shared memory, which shared memory cannot carry. Messages that come before they are wanted are
 * kept in the peer's inbox. Any thread; message_lock guards sockets and inboxes and is held for system calls that do
 * not wait. The ranks of one host among several (net_local.c) use the sockets of the whole group.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../internal.h"

struct zpp_queued_message {
    struct zpp_queued_message *next;
    struct zpp_message content;
    int fd;
};

union fd_buffer {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
};

/* Return who has the sockets, and the number of `*rank` there. */
static struct zpp_comm *owner_of(struct zpp_comm *comm, int *rank) {
    *rank = zpp_outer_rank(comm, *rank);
    return comm->outer ? comm->outer : comm;
}

zpp_status zpp_message_send(struct zpp_comm *group, int rank, const struct zpp_message *content, int fd,
                            struct zpp_err *err) {
    struct zpp_comm *comm = owner_of(group, &rank);
    struct zpp_message copy = *content;
    struct iovec part = {&copy, sizeof copy};
    union fd_buffer control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    /* Sockets do not block. Control messages are few and short, so a full buffer means that a peer has ignored dozens
     * of them. */
    if (sendmsg(comm->peer[rank].socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof copy) return ZPP_OK;
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)
        return zpp_comm_fail(comm, ZPP_PEER, rank, err,
                             "comm: rank %d (process %d) of group \"%s\" %s; rank %d found its socket closed",
                             zpp_label(comm, rank), (int)comm->peer[rank].pid, comm->name,
                             atomic_load(&zpp_control(comm, rank)->left) ? "left the group" : "died",
                             zpp_label(comm, comm->rank));
    return zpp_fail_os(err, errno, "comm: rank %d of group \"%s\" cannot be written to", zpp_label(comm, rank),
                       comm->name);
}

/* Take one control message from the socket. AGAIN: none there, or the socket is closed (which the wait detects). */
static zpp_status receive(const struct zpp_peer *peer, struct zpp_queued_message *queued) {
    struct iovec part = {&queued->content, sizeof queued->content};
    union fd_buffer control;
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    const ssize_t got = recvmsg(peer->socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    queued->fd = -1;
    if (got < 0) return ZPP_AGAIN;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
        int fds[sizeof control.bytes / sizeof(int)]; /* alignment leaves space for more than one descriptor */
        const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(fds, CMSG_DATA(head), count * sizeof(int));
        for (size_t i = 1; i < count; i++) close(fds[i]);
        if (count) queued->fd = fds[0];
    }
    if (got == (ssize_t)sizeof queued->content && !(message.msg_flags & MSG_TRUNC)) return ZPP_OK;
    if (queued->fd >= 0) close(queued->fd);
    return ZPP_AGAIN; /* not a message of this format: ignore it */
}

/* Take the message from the inbox, or move messages from the socket to the inbox until it is there. */
zpp_status zpp_message_try(struct zpp_comm *group, int rank, uint64_t kind, uint64_t number,
                           struct zpp_message *content, int *fd, struct zpp_err *err) {
    struct zpp_comm *comm = owner_of(group, &rank);
    struct zpp_peer *peer = &comm->peer[rank];
    zpp_status status = ZPP_AGAIN;
    pthread_mutex_lock(&comm->message_lock);
    struct zpp_queued_message **at = &peer->inbox;
    while (status == ZPP_AGAIN) {
        if (!*at) {
            struct zpp_queued_message *queued = malloc(sizeof *queued);
            if (!queued)
                status = zpp_fail(err, ZPP_NOMEM, "comm: no memory for a message of rank %d", rank);
            else if (receive(peer, queued) != ZPP_OK) {
                free(queued);
                break;
            } else {
                queued->next = NULL;
                *at = queued;
            }
            continue;
        }
        struct zpp_queued_message *queued = *at;
        if (queued->content.kind != kind || queued->content.number != number) {
            at = &queued->next;
            continue;
        }
        *content = queued->content;
        *fd = queued->fd;
        *at = queued->next;
        free(queued);
        status = ZPP_OK;
    }
    pthread_mutex_unlock(&comm->message_lock);
    return status;
}

zpp_status zpp_message_wait(struct zpp_wait_ctx *wait_ctx, int rank, uint64_t kind, uint64_t number,
                            struct zpp_message *content, int *fd, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    int outer_rank = rank;
    const struct zpp_comm *owner = owner_of(comm, &outer_rank);
    for (;;) {
        const bool gone = zpp_peer_gone(comm, rank); /* checked first: it may have written before it left */
        zpp_status status = zpp_message_try(comm, rank, kind, number, content, fd, err);
        if (status != ZPP_AGAIN) return status;
        struct pollfd readable = {owner->peer[outer_rank].socket, POLLIN, 0};
        if (!gone && poll(&readable, 1, 100) > 0 && !(readable.revents & POLLIN)) poll(NULL, 0, 1); /* hung up */
        status = zpp_wait_check(wait_ctx, rank, gone, err);
        if (status != ZPP_OK) return status;
    }
}

void zpp_message_clear(struct zpp_comm *comm) {
    for (int r = 0; r < comm->ranks; r++)
        for (struct zpp_queued_message *queued = comm->peer[r].inbox, *next; queued; queued = next) {
            next = queued->next;
            if (queued->fd >= 0) close(queued->fd);
            free(queued);
        }
}
