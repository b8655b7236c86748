/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzz target: what a rank reads while it joins a group, the endpoints in the store and the handshakes with their
 * descriptors, from either side of a pair. Whatever they hold, joining fails with a sentence or gives a peer whose
 * memory is mapped whole, and no descriptor is lost.
 */
#include "../../csrc/comm/rendezvous.c"

#include "fuzz.h"

struct endpoint_store {
    struct fuzz_input *input;
    const struct zpp_endpoint *own;
    size_t bytes;
};

static zpp_status endpoint_get(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns,
                               struct zpp_err *err) {
    struct endpoint_store *store = ctx;
    struct zpp_endpoint endpoint = *store->own; /* the right one, with bytes of the input laid over it */
    (void)key, (void)timeout_ns, (void)err;
    endpoint.rank = 1;
    for (int i = fuzz_byte(store->input) % 8; i > 0; i--) {
        const size_t at = fuzz_byte(store->input) * sizeof endpoint / 256;
        ((uint8_t *)&endpoint)[at] = fuzz_byte(store->input);
    }
    if (fuzz_byte(store->input) % 16 == 0) fuzz_take(store->input, &endpoint, sizeof endpoint);
    memcpy(value, &endpoint, *bytes < sizeof endpoint ? *bytes : sizeof endpoint);
    *bytes = fuzz_byte(store->input) % 8 ? sizeof endpoint : store->bytes;
    return ZPP_OK;
}

static void endpoints(struct rendezvous *rendezvous, struct fuzz_input *input) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct endpoint_store ctx = {input, &rendezvous->endpoint[0], input->bytes};
    const struct zpp_store store = {&ctx, NULL, endpoint_get};
    const zpp_status status = read_endpoint(rendezvous, &store, 1, &err);
    struct sockaddr_un address;
    fuzz_need((status == ZPP_OK) == (err.text[0] == '\0') && strnlen(err.text, sizeof err.text) < sizeof err.text);
    fuzz_need(abstract_address(&address, rendezvous->endpoint[1].socket_name) <= sizeof address);
}

static void send_something_like_a_handshake(const struct rendezvous *rendezvous, struct fuzz_input *input,
                                            int socket_fd, const uint8_t *secret) {
    const uint8_t choice = fuzz_byte(input);
    struct handshake handshake = {ZPP_ENDPOINT_MAGIC, 1, {0}};
    size_t bytes = sizeof handshake;
    memcpy(handshake.secret, secret, ZPP_SECRET_BYTES);
    if (choice & 1) handshake.rank = fuzz_byte(input);
    if (choice & 2) handshake.secret[fuzz_byte(input) % ZPP_SECRET_BYTES] ^= fuzz_byte(input);
    if (choice & 4) fuzz_take(input, &handshake, sizeof handshake);
    if (choice & 8) bytes = fuzz_byte(input) % (sizeof handshake + 1);
    const size_t memory_bytes = choice & 16 ? fuzz_byte(input) * 64u : rendezvous->comm->base_bytes;
    const int memory = fuzz_memfd(input, memory_bytes, !(choice & 32)), other = fuzz_memfd(input, 0, false);
    const int fd[4] = {choice & 64 ? other : memory, other, memory, other};
    fuzz_send(socket_fd, &handshake, bytes, fd, fuzz_byte(input) % 5);
    close(memory);
    close(other);
}

static void handshakes(struct rendezvous *rendezvous, struct fuzz_input *input, int other_end, bool as_listener) {
    struct zpp_comm *comm = rendezvous->comm;
    struct zpp_err err = ZPP_ERR_INIT;
    const int socket_fd = comm->peer[1].socket;
    int fd[FDS];
    struct handshake handshake;
    bool joined = false;
    zpp_status status;
    comm->peer[1].socket = -1;
    free(comm->base[1]);
    comm->base[1] = NULL;
    send_something_like_a_handshake(rendezvous, input, other_end, rendezvous->endpoint[0].secret);
    shutdown(other_end, SHUT_WR);
    if (as_listener) {
        status = admit(rendezvous, socket_fd, &joined, &err);
    } else {
        status = await_handshake(rendezvous, socket_fd, 1, &handshake, fd, &err);
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
    struct rendezvous *rendezvous = calloc(1, sizeof *rendezvous);
    fuzz_need(rendezvous != NULL);
    rendezvous->comm = fuzz_comm(2, &other_end);
    rendezvous->endpoint = calloc(2, sizeof *rendezvous->endpoint);
    fuzz_need(rendezvous->endpoint != NULL);
    rendezvous->comm->joined = false;
    rendezvous->fd[0] = rendezvous->fd[1] = rendezvous->listener = -1;
    rendezvous->wait_ctx =
        (struct zpp_wait_ctx){.comm = rendezvous->comm, .own_timeout = true, .describe = describe_joining};
    rendezvous->endpoint[0] = (struct zpp_endpoint){.magic = ZPP_ENDPOINT_MAGIC, .ranks = 2,
                                                    .base_bytes = rendezvous->comm->base_bytes};
    rendezvous->fd[0] = fuzz_memfd(&input, 64, true); /* what admit() answers with */
    if (kind == 0)
        endpoints(rendezvous, &input);
    else
        handshakes(rendezvous, &input, other_end, kind == 1);
    close(rendezvous->fd[0]);
    fuzz_comm_free(rendezvous->comm, other_end);
    free(rendezvous->endpoint);
    free(rendezvous);
    fuzz_need(fuzz_open_fds() == before);
    return 0;
}
