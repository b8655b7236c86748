/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention (Child et al. 2019, "Sparse Transformers"; DeepSpeed Sparse Attention; Longformer, Beltagy et
 * al. 2020; BigBird, Zaheer et al. 2020), forward and backward: attention that looks only at chosen blocks of the
 * matrix of scores, and neither computes nor stores the others.
 *
 *   s_ij = scale <q_i, k_j>       for j in the blocks of i's row, where the mask lets j be seen
 *   p_ij = e^(s_ij - lse_i),  lse_i = log sum_j e^s_ij
 *   o_i  = sum_j m_ij p_ij v_j    0 where i sees nothing; m_ij: dropout, 1 without it (dropout.h)
 *
 *   dv_j = sum_i m_ij p_ij do_i,  ds_ij = p_ij (m_ij <do_i, v_j> - <do_i, o_i>)
 *   dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i
 *
 * Grouped heads (Ainslie et al. 2023, "GQA"): several heads of q look at one head of k and v, which is read where it
 * lies; dk and dv add these heads. Queries may be the last few positions of a longer sequence of keys, as in decoding
 * with a cache: position i has the same bits as when all queries are given.
 *
 * Cost: a block of B x B takes two products of B B D multiply-adds forward and five backward (seven where threads
 * outnumber heads of keys), so time is linear in the number of blocks; memory: a few tiles a thread, and in backward dq
 * of the heads of one group. The maximum and sum of a row are kept while its blocks go by (online softmax, as in
 * FlashAttention).
 *
 * Every result is the same bits for every CPU level and number of threads (a NaN is a NaN): products are chains of
 * fused multiply-adds in rising order of their inner index, and blocks are added in rising order, for dk and dv head
 * after head.
 */
#ifndef ZPP_OPS_SPARSE_ATTENTION_H
#define ZPP_OPS_SPARSE_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"

enum {
    ZPP_SPARSE_ATTENTION_LEAST_BLOCK = 16,
    ZPP_SPARSE_ATTENTION_MOST_BLOCK = 128,
    ZPP_SPARSE_ATTENTION_MOST_DIM = 512,
};

/* Which blocks are looked at: rows of a compressed sparse matrix, for each head or one for all. A row's columns stand
 * in rising order; row r of head h has columns[starts[h (blocks + 1) + r]] to before the next start. */
struct zpp_sparse_layout {
    const int32_t *starts;  /* [heads][blocks + 1], going on from head to head */
    const int32_t *columns; /* [entries], each in [0, blocks) */
    size_t heads;           /* 1, or as many as the tensors have */
    size_t blocks;          /* ceil(seq / block), of queries as of keys */
    size_t entries;
    size_t block_elems;     /* 16, 32, 64 or 128 */
};

struct zpp_sparse_attention {
    const void *q;            /* [batch][heads][queries][dim] */
    const void *k, *v;        /* [batch][kv_heads][seq][dim] */
    const uint8_t *key_mask;  /* [batch][seq], 0: that key is not seen; NULL: all are */
    zpp_dtype dtype;          /* F32, BF16 or F16; sums are in fp32 */
    size_t batch, heads, seq, dim;
    size_t kv_heads;       /* divides heads; head h looks at h / (heads / kv_heads) */
    size_t first, queries; /* queries are positions first ... first + queries - 1 of seq */
    struct zpp_sparse_layout layout;
    float scale;
    bool causal; /* i sees j <= i only; blocks above the diagonal are skipped */
    float dropout;       /* the share of weights dropped, 0 <= dropout < 1, in steps of 2^-16 (dropout.h) */
    const int64_t *seed; /* what they are drawn from; not read where dropout is 0. On CUDA: device memory */
};

/* INVALID, with the sentence, for a layout that is not as said above. One walk over its numbers. */
zpp_status zpp_sparse_layout_check(const struct zpp_sparse_layout *layout, size_t heads, size_t seq,
                                   struct zpp_err *err);

/* out [batch][heads][queries][dim] of dtype, lse [batch][heads][queries], -inf where a row sees nothing. NOMEM: nothing
 * was written. */
zpp_status zpp_sparse_attention_forward(const struct zpp_sparse_attention *at, void *out, float *lse, zpp_pool *pool,
                                        struct zpp_err *err);

/* Gradients, shaped and typed as q, k and v, from the forward's results; seed as it was then. NOMEM: they may be
 * written in part. */
struct zpp_sparse_attention_grads {
    const void *out, *grad_out;
    const float *lse;
    void *grad_q, *grad_k, *grad_v;
};
zpp_status zpp_sparse_attention_backward(const struct zpp_sparse_attention *at,
                                         const struct zpp_sparse_attention_grads *grads, zpp_pool *pool,
                                         struct zpp_err *err);

/* The same on CUDA, where all pointers in the structs and beside them, the layout's too, are device memory: enqueued on
 * `native` (torch's current stream). The same bits on every run, and the CPU's but for rounding. The layout is not
 * checked, which would wait for the device: entries that are out of range are left out. NOT_BUILT without the kernels,
 * DEVICE if a launch fails. delta: device memory, [batch][heads][queries]. */
zpp_status zpp_sparse_attention_cuda(zpp_device *device, void *native, const struct zpp_sparse_attention *at, void *out,
                                     float *lse, struct zpp_err *err);
zpp_status zpp_sparse_attention_backward_cuda(zpp_device *device, void *native, const struct zpp_sparse_attention *at,
                                              const struct zpp_sparse_attention_grads *grads, float *delta,
                                              struct zpp_err *err);
uint32_t zpp_sparse_cuda_rows(unsigned int tiles, size_t dim); /* of a strip: tiles_cuda.h; for the test */

#endif
