/* SPDX-License-Identifier: Apache-2.0
 *
 * What an exchange of heads for tokens (heads.h) copies: from the source into the messages for other ranks, and from
 * their messages into the result. What one rank sends to another is, tensor after tensor, a contiguous (batch, tokens,
 * heads, width). How a copy is made is the caller's: by threads of the CPU (coll_heads.c), or by a GPU (heads_cuda.c).
 */
#ifndef ZPP_COMM_HEADS_PIECES_H
#define ZPP_COMM_HEADS_PIECES_H

#include "heads.h"

/* A box of (batch, tokens, heads) in some memory, for as many of each as the caller says. */
struct zpp_heads_box {
    const uint8_t *data;
    size_t batch_stride, token_stride, head_stride;
};
struct zpp_heads_extent {
    size_t batch, tokens, heads, width_bytes;
};

/* dst = the sum of the sources, over an extent. */
struct zpp_heads_copy {
    struct zpp_heads_extent extent;
    struct zpp_heads_box dst;
    const struct zpp_heads_box *src; /* so many, in the order of ranks */
    int sources;
    zpp_dtype dtype;
};

struct zpp_heads_plan {
    const struct zpp_heads_job *job;
    int me, ranks;
    zpp_status (*copy)(void *ctx, const struct zpp_heads_copy *copy, struct zpp_err *err);
    void *ctx;
};

/* INVALID for a job that no exchange can do. */
zpp_status zpp_heads_check(const struct zpp_heads_job *job, int ranks, struct zpp_err *err);
size_t zpp_heads_message_bytes(const struct zpp_heads_job *job, int from, int to);
size_t zpp_heads_tokens_before(const struct zpp_heads_job *job, int rank);
static inline size_t zpp_heads_extent_bytes(const struct zpp_heads_extent *extent) {
    return extent->batch * extent->tokens * extent->heads * extent->width_bytes;
}
static inline size_t zpp_heads_offset(const struct zpp_heads_box *box, size_t batch, size_t token, size_t head) {
    return batch * box->batch_stride + token * box->token_stride + head * box->head_stride;
}

/* The messages for all other ranks, one behind the other at `block`. */
zpp_status zpp_heads_pack(const struct zpp_heads_plan *plan, uint8_t *block, struct zpp_err *err);
/* What others sent, pieces[rank], and sums with that; or, without `pieces`, what only this rank has for itself. */
zpp_status zpp_heads_read(const struct zpp_heads_plan *plan, const void *const *pieces, struct zpp_err *err);

#endif
