/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention, backward. Scores are computed again, block by block. Two ways, with the same bits:
 *
 *   by heads   a unit is a head of keys: for each of its blocks, over the heads of its group and the queries that see
 *              it: dk and dv in tiles, the group's dq in memory of the thread; five products a block
 *   by blocks  where threads outnumber heads of keys: one pass of units over blocks of queries gives dq, one over
 *              blocks of keys dk and dv; seven products a block, but any number of threads has work
 *
 * Either way dq_i adds blocks of keys in rising order, dk_j and dv_j head after head blocks of queries.
 */
#include "sparse_attention.h"

#include <stdlib.h>
#include <string.h>

#include "tiles.h"

struct backward {
    struct zpp_sparse_shape shape;
    const struct zpp_sparse_attention_grads *grads;
    int32_t *starts, *rows; /* the layout by columns: for each, the rows that have it */
    float *delta;           /* <do_i, o_i>, [batch][heads][rows][block] */
};

/* A thread's memory. */
struct scratch {
    float *q, *go, *k, *v, *kt, *vt, *dq, *dk, *dv; /* tiles */
    float *scores, *ds, *keep, *lse;
    float *group_dq; /* [group][rows] tiles; by heads only */
};

static size_t scratch_elems(const struct zpp_sparse_shape *shape, bool by_heads) {
    const size_t tiles = 9 + (by_heads ? shape->group * shape->rows : 0);
    return tiles * shape->tile_elems + 3 * shape->block * shape->block + shape->block;
}

static struct scratch scratch_of(const struct zpp_sparse_shape *shape, float *at) {
    struct scratch scratch;
    float **const tiles[] = { &scratch.q,  &scratch.go, &scratch.k,  &scratch.v, &scratch.kt,
                              &scratch.vt, &scratch.dq, &scratch.dk, &scratch.dv };
    for (size_t t = 0; t < sizeof tiles / sizeof tiles[0]; ++t, at += shape->tile_elems) *tiles[t] = at;
    scratch.scores = at;
    scratch.ds = scratch.scores + shape->block * shape->block;
    scratch.keep = scratch.ds + shape->block * shape->block;
    scratch.lse = scratch.keep + shape->block * shape->block;
    scratch.group_dq = scratch.lse + shape->block;
    return scratch;
}

/* --- one block ---------------------------------------------------------------------------------------------------- */
struct operands {
    struct zpp_sparse_part queries, keys;
    struct zpp_sparse_rows q, go, k, v;
};

static void load_row(const struct backward *job, size_t head, size_t row, const struct scratch *scratch,
                     struct operands *on) {
    on->queries = zpp_sparse_queries(&job->shape, head, row);
    on->q = zpp_sparse_load(&job->shape, job->shape.at->q, on->queries, scratch->q);
    on->go = zpp_sparse_load(&job->shape, job->grads->grad_out, on->queries, scratch->go);
}

static void load_column(const struct backward *job, size_t head, size_t column, const struct scratch *scratch,
                        struct operands *on) {
    on->keys = zpp_sparse_keys(&job->shape, head, column);
    on->k = zpp_sparse_load(&job->shape, job->shape.at->k, on->keys, scratch->k);
    on->v = zpp_sparse_load(&job->shape, job->shape.at->v, on->keys, scratch->v);
    zpp_sparse_transpose(&job->shape, on->k, on->keys.lanes, scratch->kt);
    zpp_sparse_transpose(&job->shape, on->v, on->keys.lanes, scratch->vt);
}

/* Where a tile of queries stands among those of all heads. */
static size_t tile_of(const struct zpp_sparse_shape *shape, size_t head, size_t row) {
    return head * shape->rows + row - shape->first_row;
}

/* p (dropped ones 0) and ds of a block, into scratch->scores and scratch->ds. */
static void weigh(const struct backward *job, size_t head, size_t row, const struct operands *on,
                  const struct scratch *scratch) {
    const struct zpp_sparse_shape *shape = &job->shape;
    const struct zpp_sparse_kernels *kernels = shape->kernels;
    const size_t lanes = on->queries.lanes, keys = on->keys.lanes, rows = on->queries.rows;
    const struct zpp_sparse_sizes sizes = {lanes, keys, shape->width};
    const struct zpp_sparse_scores scores = {scratch->scores, keys, 1, on->queries, on->keys};
    const struct zpp_sparse_scores keep = {scratch->keep, keys, 1, on->queries, on->keys};
    const bool drops = shape->at->dropout > 0.0f;
    kernels->matmul(scratch->scores, keys, (struct zpp_sparse_tile){on->q.at, on->q.ld, 1}, scratch->kt, keys, sizes,
                    false);
    kernels->matmul(scratch->ds, keys, (struct zpp_sparse_tile){on->go.at, on->go.ld, 1}, scratch->vt, keys, sizes,
                    false);
    zpp_sparse_hide(shape, head, &scores);
    if (drops) {
        zpp_sparse_keep(shape, head, &keep);
        zpp_sparse_drop(scratch->ds, scratch->keep, lanes * keys);
    }
    memcpy(scratch->lse, job->grads->lse + on->queries.begin, rows * sizeof(float));
    memset(scratch->lse + rows, 0, (lanes - rows) * sizeof(float)); /* rows of zeros, whose gradients are none */
    kernels->weigh(scratch->scores, scratch->ds, lanes, keys, shape->at->scale, scratch->lse,
                   job->delta + tile_of(shape, head, row) * shape->block);
    if (drops) zpp_sparse_drop(scratch->scores, scratch->keep, lanes * keys);
}

static void add_columns(const struct zpp_sparse_shape *shape, const struct operands *on,
                        const struct scratch *scratch) {
    const size_t keys = on->keys.lanes, width = shape->width;
    const struct zpp_sparse_sizes sizes = {keys, width, on->queries.lanes};
    shape->kernels->matmul(scratch->dv, width, (struct zpp_sparse_tile){scratch->scores, 1, keys}, on->go.at, on->go.ld,
                           sizes, true);
    shape->kernels->matmul(scratch->dk, width, (struct zpp_sparse_tile){scratch->ds, 1, keys}, on->q.at, on->q.ld,
                           sizes, true);
}

static void add_rows(const struct zpp_sparse_shape *shape, const struct operands *on, const struct scratch *scratch,
                     float *dq) {
    const struct zpp_sparse_sizes sizes = {on->queries.lanes, shape->width, on->keys.lanes};
    shape->kernels->matmul(dq, shape->width, (struct zpp_sparse_tile){scratch->ds, on->keys.lanes, 1}, on->k.at,
                           on->k.ld, sizes, true);
}

/* --- units -------------------------------------------------------------------------------------------------------- */
/* The rows that have a column, as far as there are queries. */
static struct zpp_sparse_span column_of(const struct backward *job, size_t head, size_t column) {
    const struct zpp_sparse_layout *layout = &job->shape.at->layout;
    const size_t of = layout->heads == 1 ? 0 : head % job->shape.at->heads, first_row = job->shape.first_row;
    const size_t least = job->shape.at->causal && column > first_row ? column : first_row;
    const int32_t *start = job->starts + of * (layout->blocks + 1) + column;
    struct zpp_sparse_span span = { job->rows + start[0], job->rows + start[1] };
    while (span.begin < span.end && (size_t)*span.begin < least) ++span.begin;
    while (span.begin < span.end && (size_t)span.end[-1] >= first_row + job->shape.rows) --span.end;
    return span;
}

/* dk and dv of a block of a head of keys; dq of the queries that see it, too, where there is memory for it. */
static void do_column(const struct backward *job, size_t kv_head, size_t column, const struct scratch *scratch,
                      float *group_dq) {
    const struct zpp_sparse_shape *shape = &job->shape;
    const size_t bytes = shape->tile_elems * sizeof(float), first = kv_head * shape->group;
    struct operands on;
    load_column(job, first, column, scratch, &on);
    memset(scratch->dk, 0, bytes);
    memset(scratch->dv, 0, bytes);
    for (size_t head = first; head < first + shape->group; ++head) {
        const struct zpp_sparse_span span = column_of(job, head, column);
        for (const int32_t *row = span.begin; row < span.end; ++row) {
            load_row(job, head, (size_t)*row, scratch, &on);
            weigh(job, head, (size_t)*row, &on, scratch);
            add_columns(shape, &on, scratch);
            if (!group_dq) continue;
            add_rows(shape, &on, scratch, group_dq + tile_of(shape, head - first, (size_t)*row) * shape->tile_elems);
        }
    }
    zpp_sparse_store(shape, scratch->dk, job->grads->grad_k, on.keys);
    zpp_sparse_store(shape, scratch->dv, job->grads->grad_v, on.keys);
}

static void backward_head(void *arg, size_t kv_head, float *memory) {
    const struct backward *job = arg;
    const struct zpp_sparse_shape *shape = &job->shape;
    const struct scratch scratch = scratch_of(shape, memory);
    const size_t tiles = shape->group * shape->rows, first = kv_head * shape->group;
    memset(scratch.group_dq, 0, tiles * shape->tile_elems * sizeof(float));
    for (size_t column = 0; column < shape->blocks; ++column) {
        do_column(job, kv_head, column, &scratch, scratch.group_dq);
    }
    for (size_t t = 0; t < tiles; ++t) {
        const size_t head = first + t / shape->rows, row = shape->first_row + t % shape->rows;
        zpp_sparse_store(shape, scratch.group_dq + t * shape->tile_elems, job->grads->grad_q,
                         zpp_sparse_queries(shape, head, row));
    }
}

static void backward_column(void *arg, size_t unit, float *memory) {
    const struct backward *job = arg;
    const struct scratch scratch = scratch_of(&job->shape, memory);
    do_column(job, unit / job->shape.blocks, unit % job->shape.blocks, &scratch, NULL);
}

static void backward_row(void *arg, size_t unit, float *memory) {
    const struct backward *job = arg;
    const struct zpp_sparse_shape *shape = &job->shape;
    const size_t head = unit / shape->rows, row = shape->first_row + unit % shape->rows;
    const struct scratch scratch = scratch_of(shape, memory);
    struct operands on;
    load_row(job, head, row, &scratch, &on);
    memset(scratch.dq, 0, shape->tile_elems * sizeof(float));
    const struct zpp_sparse_span span = zpp_sparse_row(shape, head, row);
    for (const int32_t *column = span.begin; column < span.end; ++column) {
        if (shape->at->causal && (size_t)*column > row) break;
        load_column(job, head, (size_t)*column, &scratch, &on);
        weigh(job, head, row, &on, &scratch);
        add_rows(shape, &on, &scratch, scratch.dq);
    }
    zpp_sparse_store(shape, scratch.dq, job->grads->grad_q, on.queries);
}

static void delta_row(void *arg, size_t unit, float *memory) {
    const struct backward *job = arg;
    const struct zpp_sparse_shape *shape = &job->shape;
    const struct zpp_sparse_part queries =
        zpp_sparse_queries(shape, unit / shape->rows, shape->first_row + unit % shape->rows);
    const struct scratch scratch = scratch_of(shape, memory);
    const struct zpp_sparse_rows go = zpp_sparse_load(shape, job->grads->grad_out, queries, scratch.go);
    const struct zpp_sparse_rows out = zpp_sparse_load(shape, job->grads->out, queries, scratch.q);
    for (size_t i = 0; i < queries.lanes; ++i) {
        job->delta[unit * shape->block + i] = shape->kernels->dot(go.at + i * go.ld, out.at + i * out.ld, shape->width);
    }
}

/* The layout by columns: a counting sort, so rows of a column stand in rising order. */
static void turn_layout(const struct zpp_sparse_layout *layout, int32_t *starts, int32_t *rows) {
    const size_t lines = layout->blocks + 1;
    for (size_t head = 0; head < layout->heads; ++head) {
        const int32_t *from = layout->starts + head * lines;
        int32_t *to = starts + head * lines;
        memset(to, 0, lines * sizeof *to);
        for (int32_t e = from[0]; e < from[lines - 1]; ++e) ++to[layout->columns[e] + 1];
        to[0] = from[0];
        for (size_t c = 1; c < lines; ++c) to[c] += to[c - 1];
        for (size_t r = 0; r + 1 < lines; ++r) {
            for (int32_t e = from[r]; e < from[r + 1]; ++e) rows[to[layout->columns[e]]++] = (int32_t)r;
        }
        for (size_t c = lines - 1; c > 0; --c) to[c] = to[c - 1]; /* filling moved each start to its end */
        to[0] = from[0];
    }
}

zpp_status zpp_sparse_attention_backward(const struct zpp_sparse_attention *at,
                                         const struct zpp_sparse_attention_grads *grads, zpp_pool *pool,
                                         struct zpp_err *err) {
    struct backward job = { .shape = zpp_sparse_shape_of(at), .grads = grads };
    const size_t kv_heads = at->batch * at->kv_heads, units = at->batch * at->heads * job.shape.rows;
    const size_t lines = at->layout.heads * (at->layout.blocks + 1);
    job.starts = malloc((lines + at->layout.entries + 1) * sizeof *job.starts);
    job.delta = malloc((units * job.shape.block + 1) * sizeof *job.delta);
    zpp_status status = ZPP_OK;
    if (!job.starts || !job.delta) {
        status = zpp_fail(err, ZPP_NOMEM, "sparse attention: no memory for %zu blocks of a layout and %zu sums",
                          at->layout.entries, units * job.shape.block);
    } else {
        job.rows = job.starts + lines;
        turn_layout(&at->layout, job.starts, job.rows);
        const bool by_heads = kv_heads >= (size_t)zpp_pool_threads(pool);
        const size_t scratch = scratch_elems(&job.shape, by_heads);
        status = zpp_sparse_run(pool, units, scratch_elems(&job.shape, false), delta_row, &job, err);
        if (!status && by_heads) status = zpp_sparse_run(pool, kv_heads, scratch, backward_head, &job, err);
        if (!status && !by_heads) status = zpp_sparse_run(pool, units, scratch, backward_row, &job, err);
        if (!status && !by_heads) {
            status = zpp_sparse_run(pool, kv_heads * job.shape.blocks, scratch, backward_column, &job, err);
        }
    }
    free(job.starts);
    free(job.delta);
    return status;
}
