/* SPDX-License-Identifier: Apache-2.0
 *
 * Phases of rows in host memory (rows.h): descriptors of one ring, with published memory in arenas of any size.
 *
 * What is published alternates between two blocks. Waiting for a block is rare: a rank posts phase s + 2 after it has
 * read all peers' s + 1, which a peer posts after it has acknowledged s.
 */
#include <stdio.h>
#include <string.h>

#include "rows_internal.h"

/* --- one caller at a time ----------------------------------------------------------------------------------------- */

zpp_status zpp_rows_enter(struct zpp_rows *rows, struct zpp_err *err) {
    if (atomic_exchange_explicit(&rows->busy, true, memory_order_acquire))
        return zpp_fail(err, ZPP_STATE,
                        "moe: two threads are in one exchange of rows; use one exchange for each thread");
    const zpp_status status = rows->comm ? zpp_comm_health(rows->comm, err) : ZPP_OK;
    if (status != ZPP_OK) atomic_store_explicit(&rows->busy, false, memory_order_release);
    return status;
}

zpp_status zpp_rows_enter_phase(struct zpp_rows *rows, struct zpp_err *err) {
    const zpp_status status = zpp_rows_enter(rows, err);
    if (status != ZPP_OK || !rows->broken) return status;
    atomic_store_explicit(&rows->busy, false, memory_order_release);
    return zpp_fail(err, ZPP_STATE,
                    "moe: an earlier exchange of rows failed on this rank, so the ranks are no longer at "
                    "the same one; make a new exchange on all ranks");
}

zpp_status zpp_rows_leave(struct zpp_rows *rows, zpp_status status) {
    atomic_store_explicit(&rows->busy, false, memory_order_release);
    return status;
}

/* --- a phase ------------------------------------------------------------------------------------------------------ */

/* What a rank published, in the mask of its descriptor: rows first, and a second array behind them. */
struct published {
    uint64_t arena; /* 0: nothing */
    uint64_t count; /* rows of the first array */
    uint64_t second_offset_bytes, bytes;
};
_Static_assert(sizeof(struct published) <= ZPP_LANE_MASK_BYTES, "fits into a descriptor");

/* Memory for the next phase, which no peer reads any more. */
static zpp_status take_slot(struct zpp_rows *rows, size_t bytes, const struct zpp_wait *wait,
                            struct zpp_rows_slot **out, struct zpp_err *err) {
    struct zpp_rows_slot *slot = &rows->slots[(rows->seq + 1) % 2];
    zpp_status status = slot->seq ? zpp_desc_ring_wait_acked(rows->ring, slot->seq, wait, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    slot->seq = 0;
    if (!slot->block || zpp_block_bytes(slot->block) < bytes) {
        zpp_block_free(slot->block);
        slot->block = NULL;
        status = zpp_comm_alloc(rows->comm, bytes, &slot->block, err);
    }
    *out = slot;
    return status;
}

/* Bring this rank's memory to where peers can read it, and write that into the descriptor. */
static zpp_status place(struct zpp_rows *rows, struct zpp_row_phase *phase, const struct zpp_row_memory *memory,
                        zpp_pool *pool, const struct zpp_wait *wait, struct zpp_rows_slot **slot,
                        struct zpp_err *err) {
    const size_t first_bytes = memory->count * memory->first_item_bytes;
    const size_t second_bytes = memory->second ? memory->count * memory->second_item_bytes : 0;
    struct published published = {.count = memory->count, .second_offset_bytes = zpp_rows_whole_lines(first_bytes)};
    struct zpp_place at = {0};
    published.bytes = memory->second ? published.second_offset_bytes + second_bytes : first_bytes;
    phase->in_place = false;
    *slot = NULL;
    if (published.bytes == 0) {
        memcpy(phase->desc.mask, &published, sizeof published);
        return ZPP_OK;
    }
    if (!memory->second) phase->in_place = zpp_arena_find(rows->comm, memory->first, first_bytes, &at);
    if (!phase->in_place) {
        const zpp_status status = take_slot(rows, published.bytes, wait, slot, err);
        if (status != ZPP_OK) return status;
        uint8_t *to = zpp_block_data((*slot)->block);
        zpp_moe_peer_copy(to, memory->first, first_bytes, pool);
        if (memory->second) memcpy(to + published.second_offset_bytes, memory->second, second_bytes);
        (void)zpp_arena_find(rows->comm, to, published.bytes, &at);
    }
    published.arena = at.arena;
    phase->desc.offset_bytes = at.offset_bytes;
    memcpy(phase->desc.mask, &published, sizeof published);
    return ZPP_OK;
}

static void describe_phase(const void *ctx, char *text, size_t capacity) {
    snprintf(text, capacity, "an exchange of rows of group \"%s\"", ((const struct zpp_rows *)ctx)->comm->name);
}

static zpp_status read_peer(struct zpp_rows *rows, struct zpp_row_phase *phase, int rank, const struct zpp_wait *wait,
                            struct zpp_err *err) {
    struct zpp_wait_ctx wait_ctx = {.comm = rows->comm, .wait = wait, .describe = describe_phase, .ctx = rows};
    struct zpp_desc desc;
    struct published published;
    const uint8_t *data = NULL;
    zpp_status status = zpp_desc_ring_read(rows->ring, rank, phase->seq, &phase->desc, wait, &desc, err);
    if (status != ZPP_OK) return status;
    memcpy(&published, desc.mask, sizeof published);
    const struct zpp_place at = {.arena = published.arena, .offset_bytes = desc.offset_bytes};
    if (published.arena) status = zpp_arena_at(&wait_ctx, rank, &at, published.bytes, &data, err);
    if (status != ZPP_OK) return status;
    phase->count[rank] = published.count;
    phase->first[rank] = data;
    phase->second[rank] =
        data && published.second_offset_bytes <= published.bytes ? data + published.second_offset_bytes : NULL;
    return ZPP_OK;
}

static zpp_status post(struct zpp_rows *rows, struct zpp_row_phase *phase, struct zpp_rows_slot *slot,
                       const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = zpp_desc_ring_post(rows->ring, &phase->desc, wait, &phase->seq, err);
    if (status != ZPP_OK) return status;
    rows->seq = phase->seq;
    if (slot) slot->seq = phase->seq;
    for (int r = 0; status == ZPP_OK && r < (int)rows->ranks; r++)
        if (r != (int)rows->rank) status = read_peer(rows, phase, r, wait, err);
    return status;
}

zpp_status zpp_rows_tell(struct zpp_rows *rows, struct zpp_row_phase *phase, size_t count, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    const struct published published = {.count = count};
    memcpy(phase->desc.mask, &published, sizeof published);
    phase->count[rows->rank] = count;
    return post(rows, phase, NULL, wait, err);
}

zpp_status zpp_rows_host_begin(struct zpp_rows *rows, struct zpp_row_phase *phase, const struct zpp_row_memory *memory,
                               zpp_pool *pool, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_rows_slot *slot = NULL;
    phase->in_place = false;
    if (!rows->comm) return ZPP_OK;
    rows->broken = true; /* until the phase has ended well */
    const zpp_status status = place(rows, phase, memory, pool, wait, &slot, err);
    return status == ZPP_OK ? post(rows, phase, slot, wait, err) : status;
}

zpp_status zpp_rows_host_end(struct zpp_rows *rows, const struct zpp_row_phase *phase, const struct zpp_wait *wait,
                             struct zpp_err *err) {
    if (!rows->comm) return ZPP_OK;
    zpp_desc_ring_ack(rows->ring, phase->seq);
    const zpp_status status = phase->in_place ? zpp_desc_ring_wait_acked(rows->ring, phase->seq, wait, err) : ZPP_OK;
    rows->broken = status != ZPP_OK;
    return status;
}
