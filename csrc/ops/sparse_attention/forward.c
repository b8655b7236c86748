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
struct room {
    float *q, *row, *out, *scores; /* q transposed; a tile for whatever is converted; the sums; STEP_KEYS or a block */
    float *most, *sum, *factor;    /* of each query */
};

static size_t step_blocks(size_t block) { return block < STEP_KEYS ? STEP_KEYS / block : 1; }

static size_t room_elems(const struct zpp_sparse_shape *shape) {
    return 3 * shape->tile_elems + step_blocks(shape->block) * shape->block * shape->block + 3 * shape->block;
}

static struct room room_of(const struct zpp_sparse_shape *shape, float *at) {
    struct room room;
    room.q = at;
    room.row = room.q + shape->tile_elems;
    room.out = room.row + shape->tile_elems;
    room.scores = room.out + shape->tile_elems;
    room.most = room.scores + step_blocks(shape->block) * shape->block * shape->block;
    room.sum = room.most + shape->block;
    room.factor = room.sum + shape->block;
    return room;
}

/* Blocks from *next on, as many as a step takes: their scores, the softmax, their part of the sums. */
static void step(const struct zpp_sparse_shape *shape, size_t head, size_t row, const int32_t **next,
                 const int32_t *end, const struct room *room) {
    const struct zpp_sparse_attention *at = shape->at;
    const struct zpp_sparse_kernels *kernels = shape->kernels;
    const size_t block = shape->block, width = shape->width, square = block * block;
    const int32_t *first = *next;
    size_t count = 0;
    for (; *next < end && count < step_blocks(block); ++*next, ++count) {
        const size_t column = (size_t)**next;
        const struct zpp_sparse_rows k = zpp_sparse_load(shape, at->k, head, column, room->row);
        const struct zpp_sparse_sizes sizes = { block, block, width };
        kernels->matmul(room->scores + count * square, block, (struct zpp_sparse_tile){ k.at, k.ld, 1 }, room->q, block,
                        sizes, false);
        zpp_sparse_hide(shape, head, row, column, room->scores + count * square, 1, block);
    }
    kernels->softmax(room->scores, count * block, block, at->scale, room->most, room->sum, room->factor);
    if (first != zpp_sparse_row(shape, head, row).begin) {
        kernels->scale_rows(room->out, block, width, room->factor);
    }
    for (size_t c = 0; c < count; ++c) {
        const struct zpp_sparse_rows v = zpp_sparse_load(shape, at->v, head, (size_t)first[c], room->row);
        const struct zpp_sparse_sizes sizes = { block, width, block };
        kernels->matmul(room->out, width, (struct zpp_sparse_tile){ room->scores + c * square, 1, block }, v.at, v.ld,
                        sizes, true);
    }
}

static void finish(const struct forward *job, size_t head, size_t row, const struct room *room) {
    const struct zpp_sparse_shape *shape = &job->shape;
    const size_t seq = shape->at->seq, first = row * shape->block;
    for (size_t i = 0; i < shape->block; ++i) {
        const float sum = room->sum[i];
        room->factor[i] = sum == 0.0f ? 0.0f : 1.0f / sum; /* a query that sees nothing; a NaN stays one */
        if (first + i < seq) job->lse[head * seq + first + i] = sum == 0.0f ? -INFINITY : room->most[i] + logf(sum);
    }
    shape->kernels->scale_rows(room->out, shape->block, shape->width, room->factor);
    zpp_sparse_store(shape, room->out, job->out, head, row);
}

static void forward_row(void *arg, size_t unit, float *memory) {
    const struct forward *job = arg;
    const struct zpp_sparse_shape *shape = &job->shape;
    const size_t head = unit / shape->blocks, row = unit % shape->blocks;
    const struct room room = room_of(shape, memory);
    zpp_sparse_transpose(shape, zpp_sparse_load(shape, shape->at->q, head, row, room.row), room.q);
    memset(room.out, 0, shape->tile_elems * sizeof *room.out);
    for (size_t i = 0; i < shape->block; ++i) room.most[i] = -INFINITY, room.sum[i] = 0.0f;
    struct zpp_sparse_span span = zpp_sparse_row(shape, head, row);
    if (shape->at->causal) {
        while (span.end > span.begin && (size_t)span.end[-1] > row) --span.end;
    }
    for (const int32_t *next = span.begin; next < span.end;) step(shape, head, row, &next, span.end, &room);
    finish(job, head, row, &room);
}

zpp_status zpp_sparse_attention_forward(const struct zpp_sparse_attention *at, void *out, float *lse, zpp_pool *pool,
                                        struct zpp_err *err) {
    struct forward job = { zpp_sparse_shape_of(at), out, lse };
    return zpp_sparse_run(pool, at->batch * at->heads * job.shape.blocks, room_elems(&job.shape), forward_row, &job,
                          err);
}
