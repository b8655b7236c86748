/* SPDX-License-Identifier: Apache-2.0
 *
 * A few bytes of every rank for every rank, on the descriptor ring that reductions use: the votes that begin a step,
 * the norms of shards. So a rank that steps while another still reduces is noticed at once, by both, with both sides in
 * the message; a collective of its own would wait there until the timeout. It is a barrier too: it needs every rank's
 * bytes.
 */
#ifndef ZPP_ZERO_EXCHANGE_H
#define ZPP_ZERO_EXCHANGE_H

#include "zero.h"

/* What the descriptor ring's descriptors say. */
enum { ZPP_DESC_REDUCE = 1, ZPP_DESC_COPY, ZPP_DESC_NORM, ZPP_DESC_STEP, ZPP_DESC_BUFFERS };

/* The exchange under way; one at a time. Its bytes are its own, because a caller that is interrupted does not wait. */
struct zpp_exchange {
    zpp_zero *zero;
    size_t board_offset_bytes; /* my place in the gradients' region, read by the peers */
    size_t board_bytes;        /* its capacity */
    unsigned char *all;        /* [ranks * bytes] */
    uint64_t kind, pass, seq;
    size_t bytes;
    bool posted;
    zpp_event *done;
};

/* Part of seal and destroy. */
zpp_status zpp_exchange_init(zpp_zero *zero, size_t board_offset_bytes, size_t board_bytes, struct zpp_err *err);
void zpp_exchange_fini(zpp_zero *zero);

/* What ranks tell each other, for messages; `ctx` is the zpp_zero. */
void zpp_exchange_describe(void *ctx, const struct zpp_desc *desc, char *text, size_t capacity);

/* Collective: all[ranks * bytes] = every rank's `mine`, in rank order. `wait` must not be NULL. */
zpp_status zpp_zero_exchange(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                             const struct zpp_wait *wait, struct zpp_err *err);

/* --- the model's buffers (buffers.c) ------------------------------------------------------------------------------ */
struct zpp_buffers_board {
    zpp_zero *zero;
    zpp_region *region;    /* one host */
    unsigned char *memory; /* several hosts, or nothing is reduced; else NULL */
    size_t bytes;
    uint64_t count, seq;   /* of messages; the last descriptor of mine */
    bool posted;
    zpp_event *done;
};

/* Part of destroy. */
void zpp_buffers_fini(zpp_zero *zero);

#endif
