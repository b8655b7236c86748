/* SPDX-License-Identifier: Apache-2.0
 *
 * Who may touch the memory that ranks of a host share: its owner alone, nobody by a name, and of the owner's processes
 * those that know the secret. (Strangers at the door of another host: test_comm_hier.c.)
 */
#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "../../csrc/comm/rendezvous.h"
#include "../../csrc/comm/shm/memfd.h"
#include "strangers.h"

static void shared_memory_is_the_owners_alone(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct stat info;
    int fd = -1;
    CHECK_OK(zpp_memfd_create("test", 8192, &fd, &err));
    CHECK(fstat(fd, &info) == 0);
    CHECK_EQUAL(info.st_mode & 0777, 0600);
    CHECK_EQUAL(info.st_nlink, 0); /* no name in any file system */
    CHECK_EQUAL(info.st_uid, geteuid());
    close(fd);
}

/* --- the Unix socket --------------------------------------------------------------------------------------------- */

struct handshake {
    uint32_t magic, rank;
    uint8_t secret[16];
};

enum { WRONG_SECRET, RIGHT_SECRET_WRONG_RANK, NO_DESCRIPTOR, SILENT_AND_GONE, STRANGERS };

static int connect_to(const struct zpp_endpoint *endpoint) {
    struct sockaddr_un there = {.sun_family = AF_UNIX};
    const size_t length = strlen(endpoint->socket_name);
    memcpy(there.sun_path + 1, endpoint->socket_name, length);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    const socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
    CHECK(connect(fd, (const struct sockaddr *)&there, bytes) == 0);
    return fd;
}

static void send_handshake(int to, const struct zpp_endpoint *endpoint, int kind) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct handshake handshake = {endpoint->magic, kind == RIGHT_SECRET_WRONG_RANK ? 2 : 1, {0}};
    int memory = -1;
    if (kind != WRONG_SECRET) memcpy(handshake.secret, endpoint->secret, sizeof handshake.secret);
    CHECK_OK(zpp_memfd_create("stranger", (size_t)endpoint->base_bytes, &memory, &err));
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    memset(&control, 0, sizeof control);
    struct iovec part = {&handshake, sizeof handshake};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (kind != NO_DESCRIPTOR) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &memory, sizeof(int));
    }
    CHECK(sendmsg(to, &message, MSG_NOSIGNAL) == (ssize_t)sizeof handshake);
    close(memory);
}

static void *be_strangers(void *arg) {
    struct watched_store *watched = arg;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_endpoint endpoint;
    size_t bytes = sizeof endpoint;
    CHECK_OK(store_table_get(&watched->table, "zpp/rank/0", &endpoint, &bytes, 60 * TEST_SECOND_NS, &err));
    CHECK_EQUAL(bytes, sizeof endpoint);
    for (int kind = 0; kind < STRANGERS; kind++) {
        const int fd = connect_to(&endpoint);
        char answer[256];
        if (kind != SILENT_AND_GONE) {
            send_handshake(fd, &endpoint, kind);
            CHECK(recv(fd, answer, sizeof answer, 0) <= 0); /* no memory, no secret: nothing comes back */
        }
        close(fd);
        atomic_fetch_add(&watched->refused, 1);
    }
    return NULL;
}

static void strangers_are_turned_away(void) { run_with_strangers("zpp/rank/0", STRANGERS, NULL, be_strangers); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(shared_memory_is_the_owners_alone), TEST(strangers_are_turned_away), {0}};
    return test_main(argc, argv, cases);
}
