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
    size_t group;                /* heads of q that look at one head of k and v */
    size_t first_row, rows;      /* of the layout, that have queries */
};
struct zpp_sparse_shape zpp_sparse_shape_of(const struct zpp_sparse_attention *at);

/* Rows of one block of a tensor that lie inside of it. */
struct zpp_sparse_part {
    size_t begin;    /* the first one's number among the rows of all heads of the tensor */
    size_t position; /* and its position in the sequence */
    size_t rows;     /* at most a block */
    size_t lanes;    /* rows in whole sixteens: of the tile */
};
/* Of a tensor shaped as q, for row `row` of the layout; of one shaped as k, for column `column`. Heads are those of q,
 * of all batches. */
struct zpp_sparse_part zpp_sparse_queries(const struct zpp_sparse_shape *shape, size_t head, size_t row);
struct zpp_sparse_part zpp_sparse_keys(const struct zpp_sparse_shape *shape, size_t head, size_t column);

struct zpp_sparse_rows {
    const float *at;
    size_t ld;
};
/* A part: where it is, if it can be used so, or else converted into `scratch` [lanes][width], with zeros beyond rows
 * and dim. */
struct zpp_sparse_rows zpp_sparse_load(const struct zpp_sparse_shape *shape, const void *tensor,
                                       struct zpp_sparse_part part, float *scratch);
/* The tile's part inside rows and dim, to the tensor. */
void zpp_sparse_store(const struct zpp_sparse_shape *shape, const float *tile, void *tensor,
                      struct zpp_sparse_part part);
/* to [width][lanes] = the transposed tile. */
void zpp_sparse_transpose(const struct zpp_sparse_shape *shape, struct zpp_sparse_rows from, size_t lanes, float *to);

/* Columns of a row of a head's layout. */
struct zpp_sparse_span {
    const int32_t *begin, *end;
};
struct zpp_sparse_span zpp_sparse_row(const struct zpp_sparse_shape *shape, size_t head, size_t row);

/* A block of scores: the element of query i and key j is at[i * query + j * key]. */
struct zpp_sparse_scores {
    float *at;
    size_t query, key;
    struct zpp_sparse_part queries, keys;
};
/* Scores of keys that are not seen become -inf. */
void zpp_sparse_hide(const struct zpp_sparse_shape *shape, size_t head, const struct zpp_sparse_scores *scores);
/* Factors of dropout: 0, or what makes up for those. */
void zpp_sparse_keep(const struct zpp_sparse_shape *shape, size_t head, const struct zpp_sparse_scores *keep);
/* at *= keep, 0 where keep is 0, whatever stands there. */
void zpp_sparse_drop(float *at, const float *keep, size_t elems);

/* Units of work that threads take one after another, each thread with memory of its own. */
typedef void (*zpp_sparse_unit_fn)(void *job, size_t unit, float *scratch);
zpp_status zpp_sparse_run(zpp_pool *pool, size_t units, size_t scratch_elems, zpp_sparse_unit_fn unit, void *job,
                          struct zpp_err *err);

#endif
