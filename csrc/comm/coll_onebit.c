/* SPDX-License-Identifier: Apache-2.0
 *
 * The compressed all-reduce of onebit.h, over two collectives of comm.h: an all-to-all of the workers' messages and an
 * all-gather of the servers'. Those two detect ranks that disagree: the sizes of all messages follow from the length
 * and the chunks, and an all-gather compares its length.
 *
 * scratch   | message for shard 0 | shard 1 | ... || message of rank 0 for this rank's shard | rank 1 | ... |
 *           each message_bytes long; this rank's message for its own shard is read where it was made
 */
#include "onebit.h"

#include "../base/mem.h"
#include "../ops/onebit/onebit.h"
#include "internal.h"

enum { SHARD_ALIGN_ELEMS = 16, MESSAGE_ALIGN_BYTES = 4 };

static size_t scales_bytes(size_t chunk_elems, size_t elems) {
    return zpp_onebit_chunks(chunk_elems, elems) * sizeof(float);
}

/* --- layout ------------------------------------------------------------------------------------------------------ */

size_t zpp_onebit_message_bytes(size_t chunk_elems, size_t shard_elems) {
    return zpp_round_up(scales_bytes(chunk_elems, shard_elems) + zpp_onebit_bytes(shard_elems), MESSAGE_ALIGN_BYTES);
}

zpp_status zpp_onebit_layout_make(int ranks, size_t elems, size_t chunk_elems, struct zpp_onebit_layout *out,
                                  struct zpp_err *err) {
    if (chunk_elems < 16 || chunk_elems % 16 != 0)
        return zpp_fail(err, ZPP_INVALID, "comm: chunk_elems is %zu, wanted a multiple of 16, at least 16",
                        chunk_elems);
    if (elems > SIZE_MAX / 64) return zpp_fail(err, ZPP_INVALID, "comm: %zu elements exceed the address space", elems);
    const size_t shard = zpp_round_up((elems + (size_t)ranks - 1) / (size_t)ranks, SHARD_ALIGN_ELEMS);
    *out = (struct zpp_onebit_layout){.elems = elems,
                                      .chunk_elems = chunk_elems,
                                      .shard_elems = shard,
                                      .message_bytes = zpp_onebit_message_bytes(chunk_elems, shard),
                                      .ranks = ranks};
    return ZPP_OK;
}

size_t zpp_onebit_shard_begin(const struct zpp_onebit_layout *layout, int rank) {
    const size_t begin = (size_t)rank * layout->shard_elems;
    return begin < layout->elems ? begin : layout->elems;
}

size_t zpp_onebit_shard_elems(const struct zpp_onebit_layout *layout, int rank) {
    const size_t left = layout->elems - zpp_onebit_shard_begin(layout, rank);
    return left < layout->shard_elems ? left : layout->shard_elems;
}

size_t zpp_onebit_scratch_bytes(const struct zpp_onebit_layout *layout) {
    return 2 * (size_t)layout->ranks * layout->message_bytes;
}

size_t zpp_onebit_result_bytes(const struct zpp_onebit_layout *layout) {
    return (size_t)layout->ranks * layout->message_bytes;
}

/* --- messages ---------------------------------------------------------------------------------------------------- */

static uint8_t *message_at(void *messages, const struct zpp_onebit_layout *layout, int rank) {
    return (uint8_t *)messages + (size_t)rank * layout->message_bytes;
}

static float *scales_of(uint8_t *message) { return (float *)(void *)message; }

static uint8_t *bits_of(uint8_t *message, const struct zpp_onebit_layout *layout, size_t shard_elems) {
    return message + scales_bytes(layout->chunk_elems, shard_elems);
}

/* Clear up to three bytes at the end of a message, so that its bytes are a function of the values. */
static void clear_padding(uint8_t *message, const struct zpp_onebit_layout *layout, size_t shard_elems) {
    uint8_t *end = message + zpp_onebit_message_bytes(layout->chunk_elems, shard_elems);
    for (uint8_t *at = bits_of(message, layout, shard_elems) + zpp_onebit_bytes(shard_elems); at < end; at++) *at = 0;
}

static void compress(const struct zpp_onebit_job *job, zpp_pool *pool) {
    const struct zpp_onebit_layout *layout = &job->layout;
    for (int r = 0; r < layout->ranks; r++) {
        const size_t begin = zpp_onebit_shard_begin(layout, r), elems = zpp_onebit_shard_elems(layout, r);
        uint8_t *message = message_at(job->scratch, layout, r);
        zpp_onebit_compress(layout->chunk_elems, (const uint8_t *)job->src + begin * zpp_dtype_bytes(job->src_dtype),
                            job->src_dtype, job->worker_error + begin, elems, bits_of(message, layout, elems),
                            scales_of(message), pool);
        clear_padding(message, layout, elems);
    }
}

/* Return the message of `rank` for this rank's shard. */
static uint8_t *received(const zpp_comm *comm, const struct zpp_onebit_job *job, int rank) {
    return message_at(job->scratch, &job->layout, rank == comm->rank ? rank : job->layout.ranks + rank);
}

static zpp_status send_to_servers(zpp_comm *comm, const struct zpp_onebit_job *job, const struct zpp_wait *wait,
                                  struct zpp_err *err) {
    const struct zpp_onebit_layout *layout = &job->layout;
    void *dsts[ZPP_RANKS_MAX];
    const void *srcs[ZPP_RANKS_MAX];
    size_t dst_bytes[ZPP_RANKS_MAX], src_bytes[ZPP_RANKS_MAX];
    const size_t mine = zpp_onebit_message_bytes(layout->chunk_elems, zpp_onebit_shard_elems(layout, comm->rank));
    for (int r = 0; r < layout->ranks; r++) {
        srcs[r] = message_at(job->scratch, layout, r);
        src_bytes[r] = zpp_onebit_message_bytes(layout->chunk_elems, zpp_onebit_shard_elems(layout, r));
        dsts[r] = received(comm, job, r);
        dst_bytes[r] = mine;
    }
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL,
                                  .dtype = ZPP_U8,
                                  .dsts = dsts,
                                  .srcs = srcs,
                                  .dst_bytes = dst_bytes,
                                  .src_bytes = src_bytes};
    return zpp_comm_call(comm, &call, wait, err);
}

static void average(const zpp_comm *comm, const struct zpp_onebit_job *job, zpp_pool *pool) {
    const struct zpp_onebit_layout *layout = &job->layout;
    const size_t elems = zpp_onebit_shard_elems(layout, comm->rank);
    struct zpp_onebit_source sources[ZPP_RANKS_MAX];
    uint8_t *message = message_at(job->result, layout, comm->rank);
    for (int r = 0; r < layout->ranks; r++)
        sources[r] = (struct zpp_onebit_source){bits_of(received(comm, job, r), layout, elems),
                                                scales_of(received(comm, job, r))};
    zpp_onebit_reduce(layout->chunk_elems, sources, (size_t)layout->ranks, 1.0f / (float)layout->ranks,
                      job->server_error, elems, bits_of(message, layout, elems), scales_of(message), pool);
    clear_padding(message, layout, elems);
}

zpp_status zpp_onebit_all_reduce(zpp_comm *comm, const struct zpp_onebit_job *job, zpp_pool *pool,
                                 const struct zpp_wait *wait, struct zpp_err *err) {
    if (job->layout.ranks != comm->ranks)
        return zpp_fail(err, ZPP_INVALID, "comm: a 1-bit layout of %d ranks for group \"%s\" of %d", job->layout.ranks,
                        comm->name, comm->ranks);
    if (job->src_dtype != ZPP_F32 && job->src_dtype != ZPP_BF16 && job->src_dtype != ZPP_F16)
        return zpp_fail(err, ZPP_INVALID, "comm: dtype %d at one bit, wanted fp32, bf16 or fp16", (int)job->src_dtype);
    zpp_status status = zpp_comm_check(comm, err); /* before the errors change */
    if (status != ZPP_OK) return status;
    compress(job, pool);
    status = send_to_servers(comm, job, wait, err);
    if (status != ZPP_OK) return status;
    average(comm, job, pool);
    if (!job->gather) return ZPP_OK;
    return zpp_all_gather(comm, job->result, message_at(job->result, &job->layout, comm->rank),
                          job->layout.message_bytes, wait, err);
}

void zpp_onebit_take(const struct zpp_onebit_layout *layout, const void *result, int rank, void *dst,
                     zpp_dtype dst_dtype, bool accumulate, zpp_pool *pool) {
    const size_t elems = zpp_onebit_shard_elems(layout, rank);
    uint8_t *message = message_at((void *)(uintptr_t)result, layout, rank);
    const struct zpp_onebit_source from = {bits_of(message, layout, elems), scales_of(message)};
    zpp_onebit_decode(layout->chunk_elems, &from, dst, dst_dtype, elems, accumulate, pool);
}
