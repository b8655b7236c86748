/* SPDX-License-Identifier: Apache-2.0
 *
 * Who may touch the memory that ranks of a host share: its owner alone, nobody by a name, and of the owner's processes
 * those that know the secret. (Strangers at the door of another host: test_comm_hier.c.)
 */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "../../csrc/comm/shm/memfd.h"
#include "ranks.h"

static const uint64_t second = UINT64_C(1000000000);

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

/* What rank 0 put into the store, as rendezvous.c has it. */
struct endpoint {
    uint32_t magic, rank, ranks, pid;
    uint64_t base_bytes;
    uint8_t secret[16];
    char identity[80], host[64], socket_name[64];
};
struct handshake {
    uint32_t magic, rank;
    uint8_t secret[16];
};

/* Rank 1 hears of rank 0 only when the strangers have been turned away: until then rank 0 listens. */
struct watched_store {
    struct store_table table;
    pthread_t stranger;
    atomic_int turned_away;
};
enum { WRONG_SECRET, RIGHT_SECRET_WRONG_RANK, NO_DESCRIPTOR, SILENT_AND_GONE, STRANGERS };

static zpp_status get_after_strangers(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns,
                                      struct zpp_err *err) {
    struct watched_store *watched = ctx;
    const struct timespec pause = {0, 5000000};
    while (strcmp(key, "zpp/rank/0") == 0 && atomic_load(&watched->turned_away) < STRANGERS) nanosleep(&pause, NULL);
    return store_table_get(&watched->table, key, value, bytes, timeout_ns, err);
}

static zpp_status set_watched(void *ctx, const char *key, const void *value, size_t bytes, struct zpp_err *err) {
    struct watched_store *watched = ctx;
    return store_table_set(&watched->table, key, value, bytes, err);
}

static int connect_to(const struct endpoint *endpoint) {
    struct sockaddr_un there = {.sun_family = AF_UNIX};
    const size_t length = strlen(endpoint->socket_name);
    memcpy(there.sun_path + 1, endpoint->socket_name, length);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    const socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
    CHECK(connect(fd, (const struct sockaddr *)&there, bytes) == 0);
    return fd;
}

static void send_handshake(int to, const struct endpoint *endpoint, int kind) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct handshake handshake = {endpoint->magic, kind == RIGHT_SECRET_WRONG_RANK ? 2 : 1, {0}};
    int memory = -1;
    if (kind != WRONG_SECRET) memcpy(handshake.secret, endpoint->secret, sizeof handshake.secret);
    CHECK_OK(zpp_memfd_create("stranger", (size_t)endpoint->base_bytes, &memory, &err));
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } room;
    memset(&room, 0, sizeof room);
    struct iovec part = {&handshake, sizeof handshake};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (kind != NO_DESCRIPTOR) {
        message.msg_control = room.bytes;
        message.msg_controllen = sizeof room.bytes;
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
    struct endpoint endpoint;
    size_t bytes = sizeof endpoint;
    CHECK_OK(store_table_get(&watched->table, "zpp/rank/0", &endpoint, &bytes, 60 * second, &err));
    CHECK_EQUAL(bytes, sizeof endpoint);
    for (int kind = 0; kind < STRANGERS; kind++) {
        const int fd = connect_to(&endpoint);
        char answer[256];
        if (kind != SILENT_AND_GONE) {
            send_handshake(fd, &endpoint, kind);
            CHECK(recv(fd, answer, sizeof answer, 0) <= 0); /* no memory, no secret: nothing comes back */
        }
        close(fd);
        atomic_fetch_add(&watched->turned_away, 1);
    }
    return NULL;
}

static void guarded(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
}

static void strangers_are_turned_away(void) {
    struct watched_store watched;
    struct test_rank rank[2];
    pthread_t thread[2];
    store_table_init(&watched.table);
    atomic_init(&watched.turned_away, 0);
    const struct zpp_store store = {&watched, set_watched, get_after_strangers};
    for (int r = 0; r < 2; r++) {
        rank[r] = (struct test_rank){r, 2, NULL, NULL, 60 * second, &store, guarded, NULL};
        CHECK(pthread_create(&thread[r], NULL, test_rank_main, &rank[r]) == 0);
    }
    CHECK(pthread_create(&watched.stranger, NULL, be_strangers, &watched) == 0);
    for (int r = 0; r < 2; r++) CHECK(pthread_join(thread[r], NULL) == 0);
    CHECK(pthread_join(watched.stranger, NULL) == 0);
    CHECK_EQUAL(atomic_load(&watched.turned_away), STRANGERS);
    store_table_fini(&watched.table);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(shared_memory_is_the_owners_alone), TEST(strangers_are_turned_away), {0}};
    return test_main(argc, argv, cases);
}
