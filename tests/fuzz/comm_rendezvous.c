/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzz target: what a rank reads while it joins a group, the cards in the store and the hellos with their descriptors,
 * from either side of a pair. Whatever they hold, joining fails with a sentence or gives a peer whose memory is mapped
 * whole, and no descriptor is lost.
 */
#include "../../csrc/comm/rendezvous.c"

#include "fuzz.h"

struct card_store {
    struct fuzz_input *input;
    const struct card *own;
    size_t bytes;
};

static zpp_status card_get(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns,
                           struct zpp_err *err) {
    struct card_store *store = ctx;
    struct card card = *store->own; /* the right one, with bytes of the input laid over it */
    (void)key, (void)timeout_ns, (void)err;
    card.rank = 1;
    for (int i = fuzz_byte(store->input) % 8; i > 0; i--) {
        const size_t at = fuzz_byte(store->input) * sizeof card / 256;
        ((uint8_t *)&card)[at] = fuzz_byte(store->input);
    }
    if (fuzz_byte(store->input) % 16 == 0) fuzz_take(store->input, &card, sizeof card);
    memcpy(value, &card, *bytes < sizeof card ? *bytes : sizeof card);
    *bytes = fuzz_byte(store->input) % 8 ? sizeof card : store->bytes;
    return ZPP_OK;
}

static void cards(struct meeting *meeting, struct fuzz_input *input) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct card_store ctx = {input, &meeting->card[0], input->bytes};
    const struct zpp_store store = {&ctx, NULL, card_get};
    const zpp_status status = read_card(meeting, &store, 1, &err);
    struct sockaddr_un address;
    fuzz_need((status == ZPP_OK) == (err.text[0] == '\0') && strnlen(err.text, sizeof err.text) < sizeof err.text);
    fuzz_need(abstract_address(&address, meeting->card[1].socket_name) <= sizeof address);
}

static void send_something_like_a_hello(const struct meeting *meeting, struct fuzz_input *input, int socket_fd,
                                        const uint8_t *secret) {
    const uint8_t choice = fuzz_byte(input);
    struct hello hello = {CARD_MAGIC, 1, {0}};
    size_t bytes = sizeof hello;
    memcpy(hello.secret, secret, SECRET_BYTES);
    if (choice & 1) hello.rank = fuzz_byte(input);
    if (choice & 2) hello.secret[fuzz_byte(input) % SECRET_BYTES] ^= fuzz_byte(input);
    if (choice & 4) fuzz_take(input, &hello, sizeof hello);
    if (choice & 8) bytes = fuzz_byte(input) % (sizeof hello + 1);
    const size_t memory_bytes = choice & 16 ? fuzz_byte(input) * 64u : meeting->comm->base_bytes;
    const int memory = fuzz_memfd(input, memory_bytes, !(choice & 32)), other = fuzz_memfd(input, 0, false);
    const int fd[4] = {choice & 64 ? other : memory, other, memory, other};
    fuzz_send(socket_fd, &hello, bytes, fd, fuzz_byte(input) % 5);
    close(memory);
    close(other);
}

static void hellos(struct meeting *meeting, struct fuzz_input *input, int other_end, bool as_listener) {
    struct zpp_comm *comm = meeting->comm;
    struct zpp_err err = ZPP_ERR_INIT;
    const int socket_fd = comm->peer[1].socket;
    int fd[FDS];
    struct hello hello;
    bool joined = false;
    zpp_status status;
    comm->peer[1].socket = -1;
    free(comm->base[1]);
    comm->base[1] = NULL;
    send_something_like_a_hello(meeting, input, other_end, meeting->card[0].secret);
    shutdown(other_end, SHUT_WR);
    if (as_listener) {
        status = admit(meeting, socket_fd, &joined, &err);
    } else {
        status = await_hello(meeting, socket_fd, 1, &hello, fd, &err);
        if (status == ZPP_OK)
            status = take_peer(comm, 1, socket_fd, fd, &err);
        else
            close(socket_fd);
        joined = status == ZPP_OK;
    }
    if (joined && status == ZPP_OK) /* whole: its last byte is there */
        ((volatile uint8_t *)comm->base[1])[comm->base_bytes - 1] = 1;
    zpp_memfd_unmap(comm->base[1], comm->base_bytes);
    comm->base[1] = NULL;
    if (comm->peer[1].pidfd >= 0) close(comm->peer[1].pidfd);
}

FUZZ_TARGET(rendezvous) {
    struct fuzz_input input = {data, bytes};
    const int before = fuzz_open_fds(), kind = fuzz_byte(&input) % 3;
    int other_end;
    struct meeting *meeting = calloc(1, sizeof *meeting);
    fuzz_need(meeting != NULL);
    meeting->comm = fuzz_comm(2, &other_end);
    meeting->comm->joined = false;
    meeting->fd[0] = meeting->fd[1] = meeting->listener = -1;
    meeting->turn =
        (struct zpp_turn){.comm = meeting->comm, .own_timeout = true, .describe = describe_joining};
    meeting->card[0] = (struct card){.magic = CARD_MAGIC, .ranks = 2, .base_bytes = meeting->comm->base_bytes};
    meeting->fd[0] = fuzz_memfd(&input, 64, true); /* what admit() answers with */
    if (kind == 0)
        cards(meeting, &input);
    else
        hellos(meeting, &input, other_end, kind == 1);
    close(meeting->fd[0]);
    fuzz_comm_free(meeting->comm, other_end);
    free(meeting);
    fuzz_need(fuzz_open_fds() == before);
    return 0;
}
