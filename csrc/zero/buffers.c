/* SPDX-License-Identifier: Apache-2.0
 *
 * The model's buffers (running statistics, ...) from rank 0 to all, at the start of a forward, as
 * DistributedDataParallel does it: all of them in one message. A board of fixed layout, made once:
 *
 *   one host       rank 0's part of a region: rank 0 writes it and goes on, the others read it in place, on the
 *                  descriptor ring that reductions use, so that a rank in another forward than its peers is noticed
 *   several hosts  memory of each rank, and a broadcast of it
 *
 * What differs is written over; what is equal is only read. Operations on the ring run on the reduce stream, as in
 * exchange.c.
 */
#include "exchange.h"

#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { ALIGN_BYTES = 16 }; /* of each buffer on the board */

static size_t aligned(size_t bytes) {
    return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

zpp_status zpp_zero_make_buffers(zpp_zero *zero, const size_t *bytes, size_t count, struct zpp_err *err) {
    struct zpp_buffers_board *board = &zero->board;
    if (board->zero) return zpp_fail(err, ZPP_STATE, "zero: the board of the buffers was made already");
    *board = (struct zpp_buffers_board){ .zero = zero };
    for (size_t i = 0; i < count; i++) board->bytes += aligned(bytes[i]);
    if (!zero->ring) {
        board->memory = malloc(board->bytes + 1);
        if (board->memory) return ZPP_OK;
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %zu bytes of buffers on their way", board->bytes);
    }
    const zpp_status status = zpp_event_create(zero->options.device, &board->done, err);
    if (status != ZPP_OK) return status;
    return zpp_region_create(zero->options.comm, ZPP_REGION_PER_RANK, board->bytes + 1, &board->region, err);
}

void zpp_buffers_fini(zpp_zero *zero) {
    zpp_event_destroy(zero->board.done);
    zpp_region_destroy(zero->board.region);
    free(zero->board.memory);
    zero->board = (struct zpp_buffers_board){ 0 };
}

static void pack(unsigned char *to, const struct zpp_buffer *buffers, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (buffers[i].data) memcpy(to, buffers[i].data, buffers[i].bytes);
        to += aligned(buffers[i].bytes);
    }
}

static void unpack(const unsigned char *from, const struct zpp_buffer *buffers, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (buffers[i].data && memcmp(buffers[i].data, from, buffers[i].bytes))
            memcpy(buffers[i].data, from, buffers[i].bytes);
        from += aligned(buffers[i].bytes);
    }
}

/* --- one host ----------------------------------------------------------------------------------------------------- */

static zpp_status await_readers(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    const struct zpp_buffers_board *board = *(struct zpp_buffers_board **)arg;
    return board->seq ? zpp_desc_ring_wait_acked(board->zero->ring, board->seq, wait, err) : ZPP_OK;
}

/* Rank 0 says that its board is written; the others wait until it is. */
static zpp_status pass_on(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    struct zpp_buffers_board *board = *(struct zpp_buffers_board **)arg;
    zpp_desc_ring *ring = board->zero->ring;
    const struct zpp_desc desc = { .kind = ZPP_DESC_BUFFERS, .step = board->count, .elems = board->bytes };
    if (!board->posted) {
        const zpp_status status = zpp_desc_ring_post(ring, &desc, wait, &board->seq, err);
        if (status != ZPP_OK) return status;
        board->posted = true;
    }
    return board->zero->rank == 0 ? ZPP_OK : zpp_desc_ring_read(ring, 0, board->seq, &desc, wait, NULL, err);
}

typedef zpp_status (*operation)(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err);

static zpp_status run(struct zpp_buffers_board *board, operation work, const struct zpp_wait *wait,
                      struct zpp_err *err) {
    zpp_stream *stream = board->zero->reduce;
    zpp_status status = zpp_stream_launch(stream, work, &board, sizeof board, err);
    if (status == ZPP_OK) status = zpp_event_record(board->done, stream, err);
    return status == ZPP_OK ? zpp_event_sync(board->done, wait, err) : status;
}

static zpp_status sync_here(struct zpp_buffers_board *board, const struct zpp_buffer *buffers, size_t count,
                            const struct zpp_wait *wait, struct zpp_err *err) {
    unsigned char *memory = zpp_region_base(board->region, 0);
    const bool writes = board->zero->rank == 0;
    zpp_status status = zpp_event_sync(board->done, wait, err); /* one that its caller did not wait for */
    if (status == ZPP_OK && writes) status = run(board, await_readers, wait, err);
    if (status != ZPP_OK) return status;
    if (writes) pack(memory, buffers, count);
    board->posted = false;
    board->count++;
    status = run(board, pass_on, wait, err);
    if (status != ZPP_OK) return status;
    if (!writes) unpack(memory, buffers, count);
    zpp_desc_ring_ack(board->zero->ring, board->seq);
    if (!writes) zpp_comm_count(board->zero->options.comm, ZPP_TRAFFIC_BROADCAST, board->bytes);
    return ZPP_OK;
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

zpp_status zpp_zero_sync_buffers(zpp_zero *zero, const struct zpp_buffer *buffers, size_t count,
                                 const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_buffers_board *board = &zero->board;
    if (zero->ranks == 1 || !board->zero) return ZPP_OK;
    if (board->region) return sync_here(board, buffers, count, wait, err);
    if (zero->rank == 0) pack(board->memory, buffers, count);
    const zpp_status status = zpp_broadcast(zero->options.comm, board->memory, board->bytes, 0, wait, err);
    if (status == ZPP_OK && zero->rank) unpack(board->memory, buffers, count);
    return status;
}
