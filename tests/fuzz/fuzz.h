/* SPDX-License-Identifier: Apache-2.0
 *
 * What the fuzz targets share. A target is one function over bytes: LLVMFuzzerTestOneInput under clang's libFuzzer
 * (`python tests/c/run.py --fuzz 20`), or one of several under FUZZ_DRIVER, in tests/c/test_comm_fuzz.c, whose
 * deterministic driver needs no libFuzzer and runs with every flavor.
 */
#ifndef ZPP_TESTS_FUZZ_H
#define ZPP_TESTS_FUZZ_H

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../csrc/comm/internal.h"

/* Before a target's function: which name it gets. */
#ifdef FUZZ_DRIVER
#define FUZZ_TARGET(name) static int fuzz_##name(const uint8_t *data, size_t bytes)
#else
#define FUZZ_TARGET(name)                                         \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes); \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
#endif

/* The input, taken from its front; zeros once it is used up. */
struct fuzz_input {
    const uint8_t *data;
    size_t bytes;
};

static inline void fuzz_take(struct fuzz_input *input, void *out, size_t bytes) {
    const size_t there = bytes < input->bytes ? bytes : input->bytes;
    memset(out, 0, bytes);
    if (there) memcpy(out, input->data, there);
    input->data += there;
    input->bytes -= there;
}

static inline uint8_t fuzz_byte(struct fuzz_input *input) {
    uint8_t value;
    fuzz_take(input, &value, 1);
    return value;
}

static inline void fuzz_need(bool condition) {
    if (!condition) abort();
}

/* Shared memory as a peer would send it: of `bytes`, sealed or not, holding the front of the input. */
static inline int fuzz_memfd(struct fuzz_input *input, size_t bytes, bool sealed) {
    const int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    uint8_t content[256];
    fuzz_need(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    fuzz_take(input, content, sizeof content);
    if (bytes) fuzz_need(pwrite(fd, content, bytes < sizeof content ? bytes : sizeof content, 0) > 0);
    if (sealed) fuzz_need(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    return fd;
}

/* One packet with up to four descriptors. */
static inline void fuzz_send(int socket_fd, const void *packet, size_t bytes, const int *fd, size_t fds) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * 4)];
        struct cmsghdr align;
    } room;
    char copy[512];
    memcpy(copy, packet, bytes < sizeof copy ? bytes : sizeof copy);
    struct iovec part = {copy, bytes < sizeof copy ? bytes : sizeof copy};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fds) {
        memset(&room, 0, sizeof room);
        message.msg_control = room.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fds);
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int) * fds);
        memcpy(CMSG_DATA(head), fd, sizeof(int) * fds);
    }
    (void)sendmsg(socket_fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Descriptors open in this process, so that a target can tell whether it lost one. */
static inline int fuzz_open_fds(void) {
    int count = 0;
    for (int fd = 0; fd < 256; fd++) count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* Rank 0 of a group of `ranks` without any rendezvous: own and peers' control memory are plain memory, the socket of
 * rank 1 is one end of a pair, whose other end is returned. */
static inline struct zpp_comm *fuzz_comm(int ranks, int *other_end) {
    struct zpp_comm *comm = calloc(1, sizeof *comm);
    int pair[2];
    fuzz_need(comm != NULL);
    comm->ranks = ranks;
    comm->joined = true;
    comm->timeout_ns = 1;
    comm->base_bytes = sizeof(struct zpp_control);
    memcpy(comm->name, "fuzz", 5);
    pthread_mutex_init(&comm->message_lock, NULL);
    pthread_mutex_init(&comm->comm_error_lock, NULL);
    pthread_mutex_init(&comm->arena_lock, NULL);
    pthread_mutex_init(&comm->side_lock, NULL);
    for (int r = 0; r < ranks; r++) {
        comm->base[r] = aligned_alloc(4096, (sizeof(struct zpp_control) + 4095) & ~(size_t)4095);
        fuzz_need(comm->base[r] != NULL);
        memset(comm->base[r], 0, sizeof(struct zpp_control));
        comm->peer[r].socket = comm->peer[r].pidfd = -1;
    }
    fuzz_need(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    comm->peer[1].socket = pair[0];
    *other_end = pair[1];
    return comm;
}

static inline void fuzz_comm_free(struct zpp_comm *comm, int other_end) {
    zpp_p2p_destroy(comm);
    zpp_arena_clear(comm);
    zpp_message_clear(comm);
    if (comm->peer[1].socket >= 0) close(comm->peer[1].socket);
    if (other_end >= 0) close(other_end);
    for (int r = 0; r < comm->ranks; r++) free(comm->base[r]);
    free(comm);
}

#endif
