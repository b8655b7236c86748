/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/sparse_attention: blocks of rows of q, k, v and their gradients as fp32 tiles, and the units of
 * work that threads take.
 */
#ifndef ZPP_OPS_SPARSE_ATTENTION_TILES_H
#define ZPP_OPS_SPARSE_ATTENTION_TILES_H

#include <stdatomic.h>
#include "kernels.h"

/* What follows from the sizes. */
struct zpp_sparse_shape {
    const struct zpp_sparse_attention *at;
    const struct zpp_sparse_kernels *kernels;
    size_t block, blocks, width; /* width: dim in whole sixteens */
    size_t tile_elems;           /* block * width */
};
struct zpp_sparse_shape zpp_sparse_shape_of(const struct zpp_sparse_attention *at);

struct zpp_sparse_rows {
    const float *at;
    size_t ld;
};
/* Rows of block `index` of head `head` (of all batches) of a tensor shaped as q: where they are, if they can be used
 * so, or else converted into `scratch` [block][width], with zeros beyond seq and dim. */
struct zpp_sparse_rows zpp_sparse_load(const struct zpp_sparse_shape *shape, const void *tensor, size_t head,
                                       size_t index, float *scratch);
/* The tile's part inside seq and dim, to the tensor. */
void zpp_sparse_store(const struct zpp_sparse_shape *shape, const float *tile, void *tensor, size_t head,
                      size_t index);
/* to [width][block] = the transposed tile. */
void zpp_sparse_transpose(const struct zpp_sparse_shape *shape, struct zpp_sparse_rows from, float *to);

/* Columns of a row of a head's layout. */
struct zpp_sparse_span {
    const int32_t *begin, *end;
};
struct zpp_sparse_span zpp_sparse_row(const struct zpp_sparse_shape *shape, size_t head, size_t row);

/* Scores of keys that are not seen become -inf: s(i, j) = s[i * query + j * key] for queries of block `row` and keys of
 * block `column`. */
void zpp_sparse_hide(const struct zpp_sparse_shape *shape, size_t head, size_t row, size_t column, float *s,
                     size_t query, size_t key);

/* Units of work that threads take one after another, each thread with memory of its own. */
typedef void (*zpp_sparse_unit_fn)(void *job, size_t unit, float *scratch);
zpp_status zpp_sparse_run(zpp_pool *pool, size_t units, size_t scratch_elems, zpp_sparse_unit_fn unit, void *job,
                          struct zpp_err *err);

#endif
