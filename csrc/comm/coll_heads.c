/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange of heads for tokens (heads.h) on the CPU, over the all-to-all of comm.h. A group whose arenas are mapped
 * reads messages there; where bytes are staged or cross a network, they come into private memory first and are read
 * from that. heads_pieces.c says what is copied.
 */
#include "heads_pieces.h"

#include <stdlib.h>
#include <string.h>

#include "../base/mem.h"
#include "internal.h"

struct exchange {
    const struct zpp_heads_plan *plan;
    bool own_taken, taken;
};

/* --- copies ------------------------------------------------------------------------------------------------------ */

static uint8_t *place_of(const struct zpp_heads_box *box, size_t batch, size_t token, size_t head) {
    return (uint8_t *)(uintptr_t)box->data + zpp_heads_offset(box, batch, token, head);
}

/* Copy `pieces` of `bytes` each. Heads are some hundred bytes wide: a call of memcpy for each would take longer than
 * the copy, so whole lines are copied by code that is known to the compiler. The processor does not foresee the jumps
 * between pieces, so lines are fetched some pieces ahead: 1.4 times faster out of memory, 1.8 times out of a cache. */
static void copy_pieces(uint8_t *restrict dst, size_t dst_stride, const uint8_t *restrict src, size_t src_stride,
                        size_t pieces, size_t bytes) {
    enum { LINE_BYTES = 64, INLINE_BYTES = 1024, AHEAD = 4 };
    if (bytes % LINE_BYTES || bytes > INLINE_BYTES) {
        for (size_t i = 0; i < pieces; i++) memcpy(dst + i * dst_stride, src + i * src_stride, bytes);
        return;
    }
    for (size_t i = 0; i < pieces; i++)
        for (size_t at = 0; at < bytes; at += LINE_BYTES) {
            __builtin_prefetch(src + (i + AHEAD) * src_stride + at);
            memcpy(dst + i * dst_stride + at, src + i * src_stride + at, LINE_BYTES);
        }
}

/* Copy `tokens` of one batch from the only source. */
static void copy_tokens(const struct zpp_heads_extent *extent, uint8_t *dst, const struct zpp_heads_box *to,
                        const uint8_t *src, const struct zpp_heads_box *from, size_t tokens) {
    const size_t width = extent->width_bytes, token_bytes = width * extent->heads;
    const bool joined = extent->heads == 1 || (to->head_stride == width && from->head_stride == width);
    if (joined && to->token_stride == token_bytes && from->token_stride == token_bytes)
        memcpy(dst, src, tokens * token_bytes);
    else if (joined)
        copy_pieces(dst, to->token_stride, src, from->token_stride, tokens, token_bytes);
    else
        for (size_t t = 0; t < tokens; t++)
            copy_pieces(dst + t * to->token_stride, to->head_stride, src + t * from->token_stride, from->head_stride,
                        extent->heads, width);
}

/* Add up what the sources have of one head of one token, or of all heads where these lie side by side everywhere. */
static void add_heads(const struct zpp_heads_copy *copy, size_t batch, size_t token, size_t head, size_t bytes) {
    const void *src[ZPP_RANKS_MAX];
    for (int s = 0; s < copy->sources; s++)
        src[s] = copy->src[s].data + zpp_heads_offset(&copy->src[s], batch, token, head);
    (void)zpp_reduce_sources(place_of(&copy->dst, batch, token, head), copy->dtype, false, src, copy->sources,
                             copy->dtype, bytes / zpp_dtype_bytes(copy->dtype), 1.0);
}

static void add_token(const struct zpp_heads_copy *copy, size_t batch, size_t token) {
    const size_t width = copy->extent.width_bytes;
    bool joined = copy->dst.head_stride == width;
    for (int s = 0; s < copy->sources; s++) joined = joined && copy->src[s].head_stride == width;
    for (size_t head = 0; head < (joined ? 1 : copy->extent.heads); head++)
        add_heads(copy, batch, token, head, joined ? width * copy->extent.heads : width);
}

/* Rows [begin, end) of batch * tokens. */
static void copy_rows(size_t begin, size_t end, void *arg) {
    const struct zpp_heads_copy *copy = arg;
    const struct zpp_heads_extent *extent = &copy->extent;
    for (size_t row = begin, tokens; row < end; row += tokens) {
        const size_t batch = row / extent->tokens, token = row % extent->tokens;
        tokens = extent->tokens - token < end - row ? extent->tokens - token : end - row;
        if (copy->sources == 1)
            copy_tokens(extent, place_of(&copy->dst, batch, token, 0), &copy->dst,
                        copy->src[0].data + zpp_heads_offset(&copy->src[0], batch, token, 0), &copy->src[0], tokens);
        else
            for (size_t t = token; t < token + tokens; t++) add_token(copy, batch, t);
    }
}

enum { GRAIN_BYTES = 64 * 1024 };

static zpp_status copy_on_cpu(void *pool, const struct zpp_heads_copy *copy, struct zpp_err *err) {
    (void)err;
    const size_t row_bytes = copy->extent.heads * copy->extent.width_bytes;
    zpp_pool_run(pool, copy->extent.batch * copy->extent.tokens, GRAIN_BYTES / row_bytes + 1, copy_rows,
                 (void *)(uintptr_t)copy);
    return ZPP_OK;
}

/* --- the call ---------------------------------------------------------------------------------------------------- */

static void read_pieces(const struct exchange *exchange, const void *const *pieces) {
    struct zpp_err none = ZPP_ERR_INIT;
    (void)zpp_heads_read(exchange->plan, pieces, &none); /* copies on the CPU do not fail */
}

static void take_own(void *ctx) {
    struct exchange *exchange = ctx;
    read_pieces(exchange, NULL);
    exchange->own_taken = true;
}

static void take(void *ctx, const void *const *pieces) {
    struct exchange *exchange = ctx;
    if (!exchange->own_taken) take_own(exchange);
    read_pieces(exchange, pieces);
    exchange->taken = true;
}

/* The results are new memory, whose page faults would take longer than the copies. */
static void expect_results(const struct zpp_heads_job *job, int me, int ranks) {
    const size_t tokens = job->to_tokens ? job->lengths[me] : zpp_heads_tokens_before(job, ranks);
    for (int i = 0; i < job->tensors; i++) {
        const struct zpp_heads_tensor *tensor = &job->tensor[i];
        const struct zpp_heads_place *place = job->to_tokens ? &tensor->cut : &tensor->whole;
        const size_t heads = job->to_tokens ? tensor->heads : tensor->end[me] - tensor->begin[me];
        if (job->batch && tokens && heads)
            zpp_mem_expect(place->data, (job->batch - 1) * place->batch_stride + (tokens - 1) * place->token_stride +
                                            (heads - 1) * place->head_stride + tensor->width_bytes);
    }
}

/* Send what `sent` holds, packed, and have it read; `came` is for what cannot be read where the peer has it. */
static zpp_status send_packed(zpp_comm *comm, struct exchange *exchange, uint8_t *sent, uint8_t *came,
                              const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_heads_job *job = exchange->plan->job;
    void *dsts[ZPP_RANKS_MAX];
    const void *srcs[ZPP_RANKS_MAX];
    size_t dst_bytes[ZPP_RANKS_MAX], src_bytes[ZPP_RANKS_MAX]; /* not cleared: groups are smaller than the most */
    for (int r = 0; r < comm->ranks; r++) {
        src_bytes[r] = r == comm->rank ? 0 : zpp_heads_message_bytes(job, comm->rank, r);
        dst_bytes[r] = r == comm->rank ? 0 : zpp_heads_message_bytes(job, r, comm->rank);
        srcs[r] = sent;
        dsts[r] = came;
        sent += src_bytes[r];
        came += dst_bytes[r];
    }
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL,
                                  .dtype = job->dtype,
                                  .dsts = dsts,
                                  .srcs = srcs,
                                  .dst_bytes = dst_bytes,
                                  .src_bytes = src_bytes,
                                  .take = take,
                                  .meanwhile = take_own,
                                  .take_ctx = exchange,
                                  .stays = true};
    const zpp_status status = zpp_comm_call(comm, &call, wait, err);
    if (status == ZPP_OK && !exchange->taken) take(exchange, (const void *const *)dsts);
    return status;
}

zpp_status zpp_heads_exchange(zpp_comm *comm, const struct zpp_heads_job *job, zpp_pool *pool,
                              const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_heads_plan plan = {job, comm->rank, comm->ranks, copy_on_cpu, pool};
    struct exchange exchange = {&plan, false, false};
    size_t sent_bytes = 0, came_bytes = 0;
    zpp_block *block = NULL;
    zpp_status status = zpp_comm_check(comm, err);
    if (status == ZPP_OK) status = zpp_heads_check(job, comm->ranks, err);
    if (status != ZPP_OK) return status;
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank) continue;
        sent_bytes += zpp_heads_message_bytes(job, comm->rank, r);
        came_bytes += zpp_heads_message_bytes(job, r, comm->rank);
    }
    status = zpp_comm_alloc(comm, sent_bytes, &block, err);
    if (status != ZPP_OK) return status;
    uint8_t *came = malloc(came_bytes + 1); /* untouched, so not resident, where the peers' blocks are read in place */
    if (!came) {
        status = zpp_fail(err, ZPP_NOMEM, "comm: no memory for %zu bytes of heads", came_bytes);
    } else {
        expect_results(job, comm->rank, comm->ranks);
        (void)zpp_heads_pack(&plan, zpp_block_data(block), err);
        status = send_packed(comm, &exchange, zpp_block_data(block), came, wait, err);
    }
    free(came);
    if (status == ZPP_OK) { /* all ranks are in this exchange, so they have read the block of the one before */
        zpp_block *read = comm->kept;
        comm->kept = block;
        block = read;
    }
    zpp_block_free(block);
    return status;
}
