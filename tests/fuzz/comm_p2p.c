/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzz target: what a receiver makes of a channel that its peer may have written anything into: message headers, bytes,
 * and both counters of the ring. Whatever it holds, transfers stay within the receivers' memory, and end with OK or a
 * sentence.
 */
#include "../../csrc/comm/shm/channel.c"

#include "fuzz.h"

enum { RECEIVES = 4, ROOM_BYTES = 512 };

/* A channel as the peer fills it: a few messages, honest or not, then perhaps counters that cannot be. */
static struct zpp_channel *peer_writes(struct fuzz_input *input, int socket_fd) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_message content = {ZPP_MESSAGE_CHANNEL, 0, sizeof(struct zpp_channel), 0};
    struct zpp_channel *channel = NULL;
    uint8_t bytes[ROOM_BYTES];
    int fd = -1;
    fuzz_need(zpp_memfd_create("fuzz", sizeof *channel, &fd, &err) == ZPP_OK && map(fd, &channel, &err) == ZPP_OK);
    fuzz_send(socket_fd, &content, sizeof content, &fd, 1);
    close(fd);
    const uint64_t start = fuzz_byte(input) & 1 ? RING_BYTES - fuzz_byte(input) : 0; /* messages across the end */
    atomic_store(&channel->written, start);
    atomic_store(&channel->read, start);
    for (int i = fuzz_byte(input) % 6; i > 0; i--) {
        const uint8_t choice = fuzz_byte(input);
        uint64_t header[2] = {choice % 3, fuzz_byte(input) * 2u};
        if (choice & 64) fuzz_take(input, &header[1], sizeof header[1]);
        if (header[1] > RING_BYTES) header[1] |= (uint64_t)1 << 63; /* what could be real memory costs a tool its own */
        fuzz_take(input, bytes, sizeof bytes);
        channel_write(channel, header, sizeof header);
        channel_write(channel, bytes, choice & 128 ? fuzz_byte(input) : header[1] % sizeof bytes);
    }
    const uint8_t damage = fuzz_byte(input);
    uint64_t counter;
    fuzz_take(input, &counter, sizeof counter);
    if (damage % 8 == 1) atomic_store(&channel->written, counter);
    if (damage % 8 == 2) atomic_store(&channel->read, counter);
    return channel;
}

FUZZ_TARGET(p2p) {
    struct fuzz_input input = {data, bytes};
    const int before = fuzz_open_fds();
    int other_end;
    struct zpp_comm *comm = fuzz_comm(2, &other_end);
    struct zpp_channel *channel = peer_writes(&input, other_end);
    zpp_transfer *transfer[RECEIVES] = {0};
    uint8_t *room[RECEIVES];
    for (int i = 0; i < RECEIVES; i++) {
        struct zpp_err err = ZPP_ERR_INIT;
        const size_t wanted = fuzz_byte(&input) * 2u;
        room[i] = malloc(wanted + 1); /* of the exact size, so that AddressSanitizer sees the byte after */
        fuzz_need(room[i] != NULL);
        const int from = fuzz_byte(&input) & 1 ? 1 : ZPP_NO_RANK;
        const zpp_status status = zpp_comm_recv(comm, room[i], wanted, from, (uint64_t)i % 3, &transfer[i], &err);
        fuzz_need(status == ZPP_OK || err.text[0]);
    }
    for (int i = 0; i < RECEIVES; i++)
        if (transfer[i] && zpp_transfer_finished(transfer[i])) fuzz_need(zpp_transfer_peer(transfer[i]) <= 1);
    zpp_p2p_destroy(comm);
    for (int i = 0; i < RECEIVES; i++) {
        zpp_transfer_free(transfer[i]);
        free(room[i]);
    }
    channel_close(channel);
    fuzz_comm_free(comm, other_end);
    fuzz_need(fuzz_open_fds() == before);
    return 0;
}
