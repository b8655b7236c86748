/* SPDX-License-Identifier: Apache-2.0
 *
 * What ranks tell each other besides gathers and reductions: the votes that begin a step, the norms of shards, and the
 * model's buffers.
 *
 * Votes and norms are a few bytes of every rank for every rank, on the descriptor ring that reductions use. So a rank
 * that steps while another still reduces is noticed at once, by both, with both sides in the message; a collective of
 * its own would wait there until the timeout. It is a barrier too: it needs every rank's bytes. The operation runs on
 * the reduce stream, which alone uses the descriptor ring; on cpu it is asked again and again, so it remembers whether
 * it has posted.
 *
 * Between step_begin and step_end, the only time when shards are written, each rank writes its own and no rank reads;
 * everywhere else all ranks read and none writes. That is why gathers need no synchronisation at all.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "placement.h"

/* --- bytes of every rank ------------------------------------------------------------------------------------------ */

zpp_status zpp_exchange_init(zpp_zero *zero, size_t board_offset_bytes, size_t board_bytes, struct zpp_err *err) {
    zero->exchange = (struct zpp_exchange){ .zero = zero,
                                            .board_offset_bytes = board_offset_bytes,
                                            .board_bytes = board_bytes,
                                            .all = calloc((size_t)zero->ranks + 1, board_bytes) };
    if (!zero->exchange.all)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %zu bytes of each of %d ranks", board_bytes, zero->ranks);
    return zpp_event_create(zpp_zero_host(zero), &zero->exchange.done, err);
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

/* Collective: all[ranks * bytes] = every data rank's `mine`, in rank order. `wait` must not be NULL. */
static zpp_status exchange_all(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                             const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_exchange *exchange = &zero->exchange;
    if (zero->ranks == 1) {
        memcpy(all, mine, bytes);
        return ZPP_OK;
    }
    if (zpp_internode(zero->options.comm) || zpp_zero_by_nccl(zero))
        return zpp_internode_exchange(zero, kind, mine, bytes, all, wait, err);
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

/* Collective over the job: the same of all its ranks. The data ranks exchange it first, because their ring notices
 * ranks that differ, with both sides; a collective of the job alone would wait there until the timeout. */
static zpp_status exchange_job(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                               const struct zpp_wait *wait, struct zpp_err *err) {
    if (!zpp_zero_has_job(zero)) return exchange_all(zero, kind, mine, bytes, all, wait, err);
    void *data_ranks = malloc((size_t)zero->ranks * bytes + 1);
    if (!data_ranks) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %zu bytes of %d ranks", bytes, zero->ranks);
    zpp_status status = exchange_all(zero, kind, mine, bytes, data_ranks, wait, err);
    free(data_ranks);
    const uint64_t began_ns = zpp_span_begin();
    if (status == ZPP_OK) status = zpp_all_gather(zero->options.job, all, mine, bytes, wait, err);
    if (status == ZPP_OK) zpp_span_end(began_ns, ZPP_SPAN_WAIT, "for the other ranks", 0);
    return status;
}

int zpp_zero_job_ranks(const zpp_zero *zero) {
    return zpp_zero_has_job(zero) ? zpp_comm_ranks(zero->options.job) : zero->ranks;
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

static zpp_status step_begin(zpp_zero *zero, uint64_t vote, uint64_t *votes, const struct zpp_wait *wait,
                             struct zpp_err *err) {
    zpp_status status = zpp_zero_release_all(zero, err);
    if (status == ZPP_OK && zero->placement->settle) status = zero->placement->settle(zero, wait, err);
    if (status != ZPP_OK) return status;
    const uint64_t began_ns = zpp_span_begin();
    const int ranks = zpp_zero_job_ranks(zero);
    uint64_t *all = votes ? votes : calloc((size_t)ranks, sizeof *all);
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the votes of %d ranks", ranks);
    status = exchange_job(zero, ZPP_DESC_STEP, &vote, sizeof vote, all, wait, err);
    if (!votes) free(all);
    if (status == ZPP_OK) zpp_span_end(began_ns, ZPP_SPAN_WAIT, "until all ranks step", 0);
    if (status == ZPP_OK && zero->placement->begin_writes) status = zero->placement->begin_writes(zero, err);
    zero->step_ns = zpp_span_begin();
    zero->stepping = status == ZPP_OK;
    return status;
}

zpp_status zpp_zero_step_begin(zpp_zero *zero, uint64_t vote, uint64_t *votes, const struct zpp_wait *wait,
                               struct zpp_err *err) {
    return zpp_unit_noticed(NULL, "the step", step_begin(zero, vote, votes, wait, err), err);
}

zpp_status zpp_zero_agree(zpp_zero *zero, const void *mine, size_t bytes, void *all, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    return exchange_job(zero, ZPP_DESC_AGREE, mine, bytes, all, wait, err);
}

zpp_status zpp_zero_gather_norms(zpp_zero *zero, const void *mine, size_t bytes, void *all, const struct zpp_wait *wait,
                                 struct zpp_err *err) {
    const uint64_t began_ns = zpp_span_begin();
    const zpp_status status = exchange_all(zero, ZPP_DESC_NORM, mine, bytes, all, wait, err);
    if (status == ZPP_OK) zpp_span_end(began_ns, ZPP_SPAN_WAIT, "for the other ranks", 0);
    return status;
}

/* A step inside the backward has dropped the gradients by now. */
static bool had_grad(struct zpp_unit_grad *grad) {
    const bool had = grad->has || grad->dropped;
    grad->dropped = false;
    return had;
}

static zpp_status collect(zpp_zero *zero, bool by_grads, const struct zpp_wait *wait, struct zpp_err *err) {
    for (int i = 0; i < zero->units_count; i++) {
        struct zpp_unit *unit = zero->units[i];
        if (!unit->placement->collect || !unit->trainable) continue;
        if (unit->grad && !had_grad(unit->grad) && by_grads) continue;
        const zpp_status status = unit->placement->collect(zero, unit, wait, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

static zpp_status step_end(zpp_zero *zero, bool by_grads, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_span_end(zero->step_ns, ZPP_SPAN_STEP, "step", 0);
    zero->step_ns = 0;
    zero->stepping = false;
    if (zpp_zero_keeps_local_grads(zero)) return ZPP_OK;
    const uint64_t began_ns = zpp_span_begin();
    const struct zpp_placement *placement = zero->placement;
    zpp_status status = placement->end_writes ? placement->end_writes(zero, err) : zpp_zero_publish(zero, err);
    if (status == ZPP_OK && zero->ranks > 1) status = zpp_barrier(zero->options.comm, wait, err);
    if (status == ZPP_OK) zpp_span_end(began_ns, ZPP_SPAN_WAIT, "until all ranks have stepped", 0);
    if (status != ZPP_OK || zero->options.stage == 0) return status;
    return collect(zero, by_grads, wait, err);
}

zpp_status zpp_zero_step_end(zpp_zero *zero, bool by_grads, const struct zpp_wait *wait, struct zpp_err *err) {
    return zpp_unit_noticed(NULL, "the step", step_end(zero, by_grads, wait, err), err);
}

/* --- the model's buffers ------------------------------------------------------------------------------------------ */

/* Running statistics and the like go from rank 0 to all at the start of a forward, as DistributedDataParallel does it,
 * all of them in one message. A board of fixed layout is made once:
 *
 *   one host       rank 0's part of a region: rank 0 writes it and goes on, the others read it in place, on the
 *                  descriptor ring that reductions use, so that a rank in another forward than its peers is noticed
 *   several hosts  memory of each rank, and a broadcast of it
 *
 * What differs is written over; what is equal is only read. */

enum { ALIGN_BYTES = 16 }; /* of each buffer on the board */

zpp_status zpp_zero_make_buffers(zpp_zero *zero, const size_t *bytes, size_t count, struct zpp_err *err) {
    struct zpp_buffers_board *board = &zero->board;
    if (board->zero) return zpp_fail(err, ZPP_STATE, "zero: the board of the buffers was made already");
    *board = (struct zpp_buffers_board){ .zero = zero };
    for (size_t i = 0; i < count; i++) board->bytes += zpp_round_up(bytes[i], ALIGN_BYTES);
    if (!zero->ring) {
        board->memory = malloc(board->bytes + 1);
        if (board->memory) return ZPP_OK;
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %zu bytes of buffers on their way", board->bytes);
    }
    const zpp_status status = zpp_event_create(zpp_zero_host(zero), &board->done, err);
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
        to += zpp_round_up(buffers[i].bytes, ALIGN_BYTES);
    }
}

static void unpack(const unsigned char *from, const struct zpp_buffer *buffers, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (buffers[i].data && memcmp(buffers[i].data, from, buffers[i].bytes))
            memcpy(buffers[i].data, from, buffers[i].bytes);
        from += zpp_round_up(buffers[i].bytes, ALIGN_BYTES);
    }
}

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
    else if (desc->kind == ZPP_DESC_AGREE)
        snprintf(text, capacity, "a question to all ranks after %llu backward%s", step, plural);
    else if (desc->kind == ZPP_DESC_BUFFERS)
        snprintf(text, capacity, "the model's buffers at the start of a forward (message %llu)", step);
    else {
        if (desc->object < (uint64_t)zero->units_count)
            zpp_unit_words(zero->units[desc->object], words, sizeof words);
        snprintf(text, capacity, "the %s of the gradient of %s in backward %llu",
                 desc->kind == ZPP_DESC_COPY ? "copy" : "reduction", words, step + 1);
    }
}
