/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention, forward: a unit of work is a block of queries. Scores stand transposed, keys by queries, so
 * that the softmax runs down the columns of a tile and needs no sums across lanes, and only q is transposed, once.
 */
#include "sparse_attention.h"

#include <math.h>
#include <string.h>

#include "tiles.h"

enum { STEP_KEYS = 64 }; /* the softmax takes so many keys at once, where blocks are smaller */

struct forward {
    struct zpp_sparse_shape shape;
    void *out;
    float *lse;
};

/* A thread's memory. */
struct scratch {
    float *q, *row, *out, *scores; /* q transposed; a tile for whatever is converted; the sums; STEP_KEYS or a block */
    float *keep;                   /* factors of dropout, of one block */
    float *most, *sum, *factor;    /* of each query */
};

static size_t step_blocks(size_t block) { return block < STEP_KEYS ? STEP_KEYS / block : 1; }

static size_t scratch_elems(const struct zpp_sparse_shape *shape) {
    return 3 * shape->tile_elems + (step_blocks(shape->block) + 1) * shape->block * shape->block + 3 * shape->block;
}

static struct scratch scratch_of(const struct zpp_sparse_shape *shape, float *at) {
    struct scratch scratch;
    scratch.q = at;
    scratch.row = scratch.q + shape->tile_elems;
    scratch.out = scratch.row + shape->tile_elems;
    scratch.scores = scratch.out + shape->tile_elems;
    scratch.keep = scratch.scores + step_blocks(shape->block) * shape->block * shape->block;
    scratch.most = scratch.keep + shape->block * shape->block;
    scratch.sum = scratch.most + shape->block;
    scratch.factor = scratch.sum + shape->block;
    return scratch;
}

/* A row of the layout, of one head. */
struct row {
    size_t head;
    struct zpp_sparse_part queries;
    struct zpp_sparse_span span;
};

/* The step's block `column` in `at`. */
static struct zpp_sparse_scores scores_of(const struct zpp_sparse_shape *shape, const struct row *row, int32_t column,
                                          float *at) {
    const struct zpp_sparse_part keys = zpp_sparse_keys(shape, row->head, (size_t)column);
    return (struct zpp_sparse_scores){at, 1, row->queries.lanes, row->queries, keys};
}

/* Blocks from *next on, as many as a step takes: their scores, the softmax, their part of the sums. */
static void step(const struct zpp_sparse_shape *shape, const struct row *row, const int32_t **next,
                 const struct scratch *scratch) {
    const struct zpp_sparse_attention *at = shape->at;
    const struct zpp_sparse_kernels *kernels = shape->kernels;
    const size_t block = shape->block, width = shape->width, lanes = row->queries.lanes, square = block * lanes;
    const int32_t *first = *next;
    size_t count = 0, step_keys = 0; /* only a sequence's last block is shorter: the keys of a step stand together */
    for (; *next < row->span.end && count < step_blocks(block); ++*next, ++count) {
        const struct zpp_sparse_scores scores = scores_of(shape, row, **next, scratch->scores + count * square);
        const struct zpp_sparse_rows k = zpp_sparse_load(shape, at->k, scores.keys, scratch->row);
        const struct zpp_sparse_sizes sizes = {scores.keys.lanes, lanes, width};
        kernels->matmul(scores.at, lanes, (struct zpp_sparse_tile){k.at, k.ld, 1}, scratch->q, lanes, sizes, false);
        zpp_sparse_hide(shape, row->head, &scores);
        step_keys += scores.keys.lanes;
    }
    kernels->softmax(scratch->scores, step_keys, lanes, at->scale, scratch->most, scratch->sum, scratch->factor);
    if (first != row->span.begin) kernels->scale_rows(scratch->out, lanes, width, scratch->factor);
    for (size_t c = 0; c < count; ++c) {
        struct zpp_sparse_scores weights = scores_of(shape, row, first[c], scratch->keep);
        if (at->dropout > 0.0f) {
            zpp_sparse_keep(shape, row->head, &weights);
            zpp_sparse_drop(scratch->scores + c * square, scratch->keep, weights.keys.lanes * lanes);
        }
        const struct zpp_sparse_rows v = zpp_sparse_load(shape, at->v, weights.keys, scratch->row);
        const struct zpp_sparse_sizes sizes = {lanes, width, weights.keys.lanes};
        kernels->matmul(scratch->out, width, (struct zpp_sparse_tile){scratch->scores + c * square, 1, lanes}, v.at,
                        v.ld, sizes, true);
    }
}

static void finish(const struct forward *job, const struct row *row, const struct scratch *scratch) {
    const struct zpp_sparse_shape *shape = &job->shape;
    const struct zpp_sparse_part *queries = &row->queries;
    for (size_t i = 0; i < queries->lanes; ++i) {
        const float sum = scratch->sum[i], lse = sum == 0.0f ? -INFINITY : scratch->most[i] + logf(sum);
        scratch->factor[i] = sum == 0.0f ? 0.0f : 1.0f / sum; /* a query that sees nothing; a NaN stays one */
        if (i < queries->rows) job->lse[queries->begin + i] = lse;
    }
    shape->kernels->scale_rows(scratch->out, queries->lanes, shape->width, scratch->factor);
    zpp_sparse_store(shape, scratch->out, job->out, *queries);
}

static void forward_row(void *arg, size_t unit, float *memory) {
    const struct forward *job = arg;
    const struct zpp_sparse_shape *shape = &job->shape;
    const size_t head = unit / shape->rows, at = shape->first_row + unit % shape->rows;
    struct row row = {head, zpp_sparse_queries(shape, head, at), zpp_sparse_row(shape, head, at)};
    const struct scratch scratch = scratch_of(shape, memory);
    const struct zpp_sparse_rows q = zpp_sparse_load(shape, shape->at->q, row.queries, scratch.row);
    zpp_sparse_transpose(shape, q, row.queries.lanes, scratch.q);
    memset(scratch.out, 0, row.queries.lanes * shape->width * sizeof *scratch.out);
    for (size_t i = 0; i < row.queries.lanes; ++i) scratch.most[i] = -INFINITY, scratch.sum[i] = 0.0f;
    if (shape->at->causal) {
        while (row.span.end > row.span.begin && (size_t)row.span.end[-1] > at) --row.span.end;
    }
    for (const int32_t *next = row.span.begin; next < row.span.end;) step(shape, &row, &next, &scratch);
    finish(job, &row, &scratch);
}

zpp_status zpp_sparse_attention_forward(const struct zpp_sparse_attention *at, void *out, float *lse, zpp_pool *pool,
                                        struct zpp_err *err) {
    struct forward job = { zpp_sparse_shape_of(at), out, lse };
    return zpp_sparse_run(pool, at->batch * at->heads * job.shape.rows, scratch_elems(&job.shape), forward_row, &job,
                          err);
}
