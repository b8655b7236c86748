/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzz target: what a rank makes of bytes from another host, the control messages as they come in pieces of any size,
 * and the handshake of a stranger. Whatever they hold, nothing is written outside of what the caller lent, every answer
 * is a frame within its bounds or a sentence, and nobody takes a place without the proof.
 */
#include "../../csrc/comm/tcp/net_join.c"

#include "fuzz.h"

static void control(struct fuzz_input *input) {
    /* alone in its memory, so that a tool sees the byte after */
    struct zpp_control_link *stream = calloc(1, sizeof *stream);
    fuzz_need(stream != NULL);
    while (input->bytes) {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_frame frame = {0};
        void *at = NULL;
        const size_t capacity = zpp_control_link_space(stream, &at);
        fuzz_need(capacity > 0 && at != NULL);
        const size_t bytes = 1 + fuzz_byte(input) % capacity;
        if (stream->raw_bytes == 0 && bytes == ZPP_FRAME_BYTES && fuzz_byte(input) & 1) {
            frame = (struct zpp_frame){.magic = ZPP_FRAME_MAGIC,
                                       .kind = (uint16_t)(fuzz_byte(input) % 5),
                                       .what = fuzz_byte(input),
                                       .elems = fuzz_byte(input),
                                       .bytes = fuzz_byte(input) * 4u};
            memcpy(at, &frame, sizeof frame);
        } else {
            fuzz_take(input, at, bytes);
        }
        const zpp_status status = zpp_control_link_parse(stream, bytes, 4, &frame, &err);
        if (status == ZPP_PEER) {
            fuzz_need(err.text[0] != '\0');
            break;
        }
        if (status != ZPP_OK) continue;
        fuzz_need(frame.kind == ZPP_FRAME_ERROR || frame.kind == ZPP_FRAME_FAREWELL);
        fuzz_need(frame.bytes < ZPP_ERR_TEXT_BYTES && frame.elems <= 4);
        if (frame.kind == ZPP_FRAME_ERROR) fuzz_need(strlen(stream->text) <= frame.bytes);
    }
    free(stream);
}

static void handshake_of_a_stranger(struct fuzz_input *input) {
    int pair[2], other_end;
    struct zpp_door *door = calloc(1, sizeof *door);
    struct zpp_comm *comm = fuzz_comm(3, &other_end);
    struct zpp_net *net = calloc(1, sizeof *net);
    fuzz_need(door && net && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    door->comm = comm;
    door->epoll = -1;
    door->endpoint = calloc(3, sizeof *door->endpoint);
    fuzz_need(door->endpoint != NULL);
    comm->net = net;
    net->made = -1;
    for (int r = 0; r < 3; r++) {
        net->hosts.host_of[r] = r;
        net->peer[r].data_links = 2;
        net->peer[r].p2p_in = -1;
        net->peer[r].comm = comm;
        for (int slot = 0; slot < ZPP_NET_SLOTS_MAX; slot++) net->peer[r].link[slot] = -1;
    }
    for (int i = 0; i < STRANGERS_MAX; i++) door->stranger[i].fd = -1;
    fuzz_take(input, door->endpoint[0].secret, sizeof door->endpoint[0].secret);
    greet(door, pair[0]);
    struct stranger *stranger = &door->stranger[0];
    struct handshake handshake = {.magic = MAGIC};
    const uint8_t choice = fuzz_byte(input);
    handshake.rank = (uint16_t)(fuzz_byte(input) % 5);
    handshake.slot = (uint16_t)(fuzz_byte(input) % 12);
    if (choice & 1) fuzz_take(input, &handshake, sizeof handshake);
    const bool proves = choice & 2;
    if (proves) handshake.mac = prove(&door->endpoint[0], 'C', &handshake, stranger->nonce);
    const size_t bytes = choice & 4 ? fuzz_byte(input) % sizeof handshake : sizeof handshake;
    (void)!write(pair[1], &handshake, bytes);
    shutdown(pair[1], SHUT_WR);
    for (int turns = 0; stranger->fd >= 0 && turns < 4; turns++) listen_to(door, stranger);
    fuzz_need(stranger->fd < 0); /* in, or turned away */
    int taken = 0;
    for (int r = 0; r < 3; r++)
        for (int slot = 0; slot < ZPP_NET_SLOTS_MAX; slot++) {
            if (net->peer[r].link[slot] < 0) continue;
            taken++;
            close(net->peer[r].link[slot]);
            fuzz_need(proves && r == handshake.rank && r > 0 && slot == handshake.slot && slot < ZPP_NET_DATA + 2);
        }
    fuzz_need(taken <= 1);
    close(pair[1]);
    for (int r = 0; r < 3; r++) free(net->peer[r].control);
    comm->net = NULL;
    fuzz_comm_free(comm, other_end);
    free(net);
    free(door->endpoint);
    free(door);
}

FUZZ_TARGET(frame) {
    struct fuzz_input input = {data, bytes};
    const int before = fuzz_open_fds();
    if (fuzz_byte(&input) & 1)
        control(&input);
    else
        handshake_of_a_stranger(&input);
    fuzz_need(fuzz_open_fds() == before);
    return 0;
}
