/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzz target: control messages between two ranks (control_message.c) and what is made of them: the descriptors of
 * regions and the places of tensors in arenas. Whatever a peer sends, a region is mapped whole or refused with a
 * sentence, a place lies inside its arena, and no descriptor is lost.
 */
#include "../../csrc/comm/shm/memfd.h"

#include "fuzz.h"

static void send_message(struct fuzz_input *input, int socket_fd) {
    const uint8_t choice = fuzz_byte(input);
    struct zpp_message content = {fuzz_byte(input) % 5, fuzz_byte(input) % 4, fuzz_byte(input) % 3, 4096};
    size_t bytes = sizeof content;
    if (choice & 1) fuzz_take(input, &content.a, sizeof content.a);
    if (choice & 2) fuzz_take(input, &content.b, sizeof content.b);
    if (choice & 4) bytes = fuzz_byte(input) % 64;
    if (choice & 8) content.a = 4096; /* as an arena of one page */
    const int memory = fuzz_memfd(input, choice & 16 ? fuzz_byte(input) * 256u : 4096, !(choice & 32));
    const int fd[4] = {memory, memory, memory, memory};
    uint8_t packet[64] = {0};
    memcpy(packet, &content, sizeof content);
    fuzz_send(socket_fd, packet, bytes, fd, choice >> 6 ? fuzz_byte(input) % 5 : 1);
    close(memory);
}

static void make_region(struct zpp_comm *comm, enum zpp_region_kind kind) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_region *region = NULL;
    const zpp_status status = zpp_region_create(comm, kind, 4096, &region, &err);
    fuzz_need((status == ZPP_OK) == (region != NULL) && (status == ZPP_OK || err.text[0]));
    if (status == ZPP_OK)
        for (int r = 0; r < comm->ranks; r++) ((volatile uint8_t *)zpp_region_base(region, r))[4095] = 1;
    zpp_region_destroy(region);
}

static void find_tensor(struct zpp_comm *comm, struct fuzz_input *input) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait_ctx wait_ctx = {.comm = comm, .own_timeout = true};
    struct zpp_place place = {.arena = fuzz_byte(input) % 4, .offset_bytes = fuzz_byte(input) * 64u};
    const uint8_t *data = NULL;
    uint64_t bytes = fuzz_byte(input) * 32u;
    if (fuzz_byte(input) & 1) fuzz_take(input, &place.offset_bytes, sizeof place.offset_bytes);
    if (fuzz_byte(input) & 1) fuzz_take(input, &bytes, sizeof bytes);
    const zpp_status status = zpp_arena_at(&wait_ctx, 1, &place, bytes, &data, &err);
    fuzz_need(status == ZPP_OK || err.text[0]);
    if (status == ZPP_OK && bytes) fuzz_need(data[0] + data[bytes - 1] >= 0);
}

FUZZ_TARGET(control_message) {
    struct fuzz_input input = {data, bytes};
    const int before = fuzz_open_fds(), kind = fuzz_byte(&input);
    int other_end, fd;
    struct zpp_comm *comm = fuzz_comm(2, &other_end);
    for (int i = kind >> 4; i >= 0; i--) send_message(&input, other_end);
    shutdown(other_end, SHUT_WR); /* a rank that ended: whoever waits for more hears it at once */
    switch (kind % 4) {
    case 0: make_region(comm, ZPP_REGION_PER_RANK); break;
    case 1: make_region(comm, ZPP_REGION_ONE); break;
    case 2: find_tensor(comm, &input); break;
    default: {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_message content;
        if (zpp_message_try(comm, 1, fuzz_byte(&input) % 5, fuzz_byte(&input) % 4, &content, &fd, &err) == ZPP_OK
            && fd >= 0)
            close(fd);
    }
    }
    fuzz_comm_free(comm, other_end);
    fuzz_need(fuzz_open_fds() == before);
    return 0;
}
