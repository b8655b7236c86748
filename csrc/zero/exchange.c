/* SPDX-License-Identifier: Apache-2.0
 *
 * See exchange.h. The operation runs on the reduce stream, which alone uses the descriptor ring; on cpu it is asked
 * again and again, so it remembers whether it has posted.
 */
#include "exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "internode.h"

zpp_status zpp_exchange_init(zpp_zero *zero, size_t board_offset_bytes, size_t board_bytes, struct zpp_err *err) {
    zero->exchange = (struct zpp_exchange){ .zero = zero,
                                            .board_offset_bytes = board_offset_bytes,
                                            .board_bytes = board_bytes,
                                            .all = calloc((size_t)zero->ranks + 1, board_bytes) };
    if (!zero->exchange.all)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %zu bytes of each of %d ranks", board_bytes, zero->ranks);
    return zpp_event_create(zero->options.device, &zero->exchange.done, err);
}

void zpp_exchange_fini(zpp_zero *zero) {
    zpp_event_destroy(zero->exchange.done);
    free(zero->exchange.all);
    zero->exchange = (struct zpp_exchange){ 0 };
}

static unsigned char *board_of(const struct zpp_exchange *exchange, int rank) {
    return (unsigned char *)zpp_region_base(exchange->zero->grads, rank) + exchange->board_offset_bytes;
}

static zpp_status run_exchange(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    struct zpp_exchange *exchange = *(struct zpp_exchange **)arg;
    zpp_zero *zero = exchange->zero;
    unsigned char *mine = exchange->all + (size_t)zero->rank * exchange->bytes;
    const struct zpp_desc desc = { .kind = exchange->kind, .step = exchange->pass, .elems = exchange->bytes };
    zpp_status status = ZPP_OK;
    if (!exchange->posted) {
        /* the board is free */
        if (exchange->seq) status = zpp_desc_ring_wait_acked(zero->ring, exchange->seq, wait, err);
        if (status != ZPP_OK) return status;
        memcpy(board_of(exchange, zero->rank), mine, exchange->bytes);
        status = zpp_desc_ring_post(zero->ring, &desc, wait, &exchange->seq, err);
        if (status != ZPP_OK) return status;
        exchange->posted = true;
    }
    for (int rank = 0; rank < zero->ranks; rank++) {
        status = zpp_desc_ring_read(zero->ring, rank, exchange->seq, &desc, wait, NULL, err);
        if (status != ZPP_OK) return status;
        if (rank == zero->rank) continue;
        memcpy(exchange->all + (size_t)rank * exchange->bytes, board_of(exchange, rank), exchange->bytes);
    }
    zpp_desc_ring_ack(zero->ring, exchange->seq);
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER, exchange->bytes * (size_t)(zero->ranks - 1));
    return ZPP_OK;
}

zpp_status zpp_zero_exchange(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                             const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_exchange *exchange = &zero->exchange;
    if (zero->ranks == 1) {
        memcpy(all, mine, bytes);
        return ZPP_OK;
    }
    if (zpp_internode(zero->options.comm)) return zpp_internode_exchange(zero, kind, mine, bytes, all, wait, err);
    /* Nothing is trainable, so nothing is reduced. */
    if (!zero->ring) return zpp_all_gather(zero->options.comm, all, mine, bytes, wait, err);
    if (bytes > exchange->board_bytes)
        return zpp_fail(err, ZPP_INVALID, "zero: %zu bytes to exchange, %zu fit", bytes, exchange->board_bytes);
    zpp_status status = zpp_event_sync(exchange->done, wait, err); /* one that its caller did not wait for */
    if (status != ZPP_OK) return status;
    exchange->kind = kind;
    exchange->pass = zero->pass;
    exchange->bytes = bytes;
    exchange->posted = false;
    memcpy(exchange->all + (size_t)zero->rank * bytes, mine, bytes);
    status = zpp_stream_launch(zero->reduce, run_exchange, &exchange, sizeof(struct zpp_exchange *), err);
    if (status == ZPP_OK) status = zpp_event_record(exchange->done, zero->reduce, err);
    if (status == ZPP_OK) status = zpp_event_sync(exchange->done, wait, err);
    if (status == ZPP_OK) memcpy(all, exchange->all, bytes * (size_t)zero->ranks);
    return status;
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

void zpp_exchange_describe(void *ctx, const struct zpp_desc *desc, char *text, size_t capacity) {
    const zpp_zero *zero = ctx;
    const unsigned long long step = desc->step;
    const char *plural = step == 1 ? "" : "s";
    char words[ZPP_UNIT_WORDS] = "an unknown module";
    if (desc->kind == ZPP_DESC_NORM)
        snprintf(text, capacity, "the norm of the gradients after %llu backward%s", step, plural);
    else if (desc->kind == ZPP_DESC_STEP)
        snprintf(text, capacity, "a step after %llu backward%s", step, plural);
    else if (desc->kind == ZPP_DESC_BUFFERS)
        snprintf(text, capacity, "the model's buffers at the start of a forward (message %llu)", step);
    else {
        if (desc->object < (uint64_t)zero->units_count)
            zpp_unit_words(zero->units[desc->object], words, sizeof words);
        snprintf(text, capacity, "the %s of the gradient of %s in backward %llu",
                 desc->kind == ZPP_DESC_COPY ? "copy" : "reduction", words, step + 1);
    }
}
