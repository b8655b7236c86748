/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange of DeepSpeed-Ulysses (arXiv 2309.14509): a sequence is cut over the ranks, attention needs all of it.
 * Before attention each rank gives its tokens of some heads to the rank that computes these heads; after it the tokens
 * go back. All tensors of a call (q, k and v, or the output) travel in one exchange:
 *
 *   cut     (batch, heads, lengths[me], width): all heads of this rank's tokens
 *   whole   (batch, end[me] - begin[me], sum of lengths, width): this rank's heads of all tokens
 *
 * Each rank packs what its peers read into one block of its arena, one strided copy, and reads their blocks in place
 * into the result, one more copy. Its own part goes straight to the result, while the peers arrive. No rank waits until
 * the peers have read its block: the group keeps the block until its next exchange of heads has ended, by which time
 * all of them are in that exchange.
 *
 * Bytes that a rank reads from its peers: to heads (T - t) * own heads * width, to tokens t * (the others' heads) *
 * width, times batch and element, each tensor. Heads of key and value may belong to several ranks; on the way back
 * their parts are added, in fp32 for 16-bit elements, with one rounding.
 */
#ifndef ZPP_COMM_HEADS_H
#define ZPP_COMM_HEADS_H

#include "../base/pool.h"
#include "comm.h"

enum { ZPP_HEADS_TENSORS = 4 };

/* Where a tensor lies. The elements of `width` are contiguous; the strides are in bytes. */
struct zpp_heads_place {
    void *data;
    size_t batch_stride, head_stride, token_stride;
};

struct zpp_heads_tensor {
    struct zpp_heads_place cut, whole;
    size_t heads, width_bytes;
    size_t begin[ZPP_RANKS_MAX], end[ZPP_RANKS_MAX]; /* the heads of each rank, neither falling with the rank */
};

struct zpp_heads_job {
    bool to_tokens; /* from whole to cut; else from cut to whole */
    zpp_dtype dtype;
    size_t batch, lengths[ZPP_RANKS_MAX]; /* tokens of each rank */
    int tensors;
    struct zpp_heads_tensor tensor[ZPP_HEADS_TENSORS];
};

/* Collective: every rank gives the same job but for its places. Ranks whose batch, lengths or heads differ in bytes
 * get PEER, with the rank. The source is read, the destination written; they do not overlap. `pool` may be NULL. */
zpp_status zpp_heads_exchange(zpp_comm *comm, const struct zpp_heads_job *job, zpp_pool *pool,
                              const struct zpp_wait *wait, struct zpp_err *err);

#endif
