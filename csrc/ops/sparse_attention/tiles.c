/* SPDX-License-Identifier: Apache-2.0
 *
 * Tiles and units of tiles.h, the choice of a CPU version, and the check of a layout.
 */
#include "tiles.h"

#include <math.h>
#include <string.h>

#include "../../base/mem.h"
#include "dropout.h"

enum { ALIGN_BYTES = 64 };

const struct zpp_sparse_kernels *zpp_sparse_kernels_at(enum zpp_cpu_level level) {
    return ZPP_ISA_AT(level, zpp_sparse);
}

const struct zpp_sparse_kernels *zpp_sparse_kernels(void) { return zpp_sparse_kernels_at(zpp_cpu_level()); }

static zpp_status check_row(const struct zpp_sparse_layout *layout, size_t row, struct zpp_err *err) {
    for (int32_t e = layout->starts[row]; e < layout->starts[row + 1]; ++e) {
        const int32_t column = layout->columns[e];
        const int32_t above = e > layout->starts[row] ? layout->columns[e - 1] : -1;
        if (column > above && (size_t)column < layout->blocks) continue;
        return zpp_fail(err, ZPP_INVALID, "columns[%d] is %d, wanted more than %d and less than %zu blocks", (int)e,
                        (int)column, (int)above, layout->blocks);
    }
    return ZPP_OK;
}

static zpp_status check_starts(const struct zpp_sparse_layout *layout, struct zpp_err *err) {
    const size_t rows = layout->heads * (layout->blocks + 1);
    for (size_t row = 0; row < rows; ++row) {
        const int32_t start = layout->starts[row], before = row ? layout->starts[row - 1] : 0;
        const bool next_head = row % (layout->blocks + 1) == 0;
        if (start < before || (next_head && start != before) || (size_t)start > layout->entries) {
            return zpp_fail(err, ZPP_INVALID, "starts[%zu] is %d after %d, wanted numbers that rise to %zu, one head's "
                            "last the next one's first", row, (int)start, (int)before, layout->entries);
        }
    }
    if ((size_t)layout->starts[rows - 1] == layout->entries) return ZPP_OK;
    return zpp_fail(err, ZPP_INVALID, "starts end with %d, wanted %zu as there are columns",
                    (int)layout->starts[rows - 1], layout->entries);
}

zpp_status zpp_sparse_layout_check(const struct zpp_sparse_layout *layout, size_t heads, size_t seq,
                                   struct zpp_err *err) {
    const size_t block = layout->block_elems;
    if (block < ZPP_SPARSE_ATTENTION_LEAST_BLOCK || block > ZPP_SPARSE_ATTENTION_MOST_BLOCK || (block & (block - 1))) {
        return zpp_fail(err, ZPP_INVALID, "block is %zu, wanted 16, 32, 64 or 128", block);
    }
    if (layout->blocks != (seq + block - 1) / block || (layout->heads != 1 && layout->heads != heads)) {
        return zpp_fail(err, ZPP_INVALID, "the layout has %zu heads of %zu blocks, wanted 1 or %zu heads of %zu: a "
                        "sequence of %zu", layout->heads, layout->blocks, heads, (seq + block - 1) / block, seq);
    }
    const size_t rows = layout->heads * (layout->blocks + 1);
    if (check_starts(layout, err)) return ZPP_INVALID;
    for (size_t row = 0; row + 1 < rows; ++row) {
        if (check_row(layout, row, err)) return ZPP_INVALID; /* from a head's last to the next first: empty */
    }
    return ZPP_OK;
}

struct zpp_sparse_shape zpp_sparse_shape_of(const struct zpp_sparse_attention *at) {
    struct zpp_sparse_shape shape = { .at = at, .kernels = zpp_sparse_kernels() };
    shape.block = at->layout.block_elems;
    shape.blocks = at->layout.blocks;
    shape.width = (at->dim + ZPP_SPARSE_LANES - 1) / ZPP_SPARSE_LANES * ZPP_SPARSE_LANES;
    shape.tile_elems = shape.block * shape.width;
    shape.group = at->heads / at->kv_heads;
    shape.first_row = at->first / shape.block;
    shape.rows = (at->first + at->queries - 1) / shape.block + 1 - shape.first_row;
    return shape;
}

static size_t whole_lanes(size_t rows) { return (rows + ZPP_SPARSE_LANES - 1) / ZPP_SPARSE_LANES * ZPP_SPARSE_LANES; }

struct zpp_sparse_part zpp_sparse_queries(const struct zpp_sparse_shape *shape, size_t head, size_t row) {
    const struct zpp_sparse_attention *at = shape->at;
    const size_t edge = row * shape->block, most = edge + shape->block, last = at->first + at->queries;
    const size_t position = edge > at->first ? edge : at->first, end = most < last ? most : last;
    return (struct zpp_sparse_part){head * at->queries + position - at->first, position, end - position,
                                    whole_lanes(end - position)};
}

struct zpp_sparse_part zpp_sparse_keys(const struct zpp_sparse_shape *shape, size_t head, size_t column) {
    const size_t position = column * shape->block, left = shape->at->seq - position;
    const size_t rows = left < shape->block ? left : shape->block;
    return (struct zpp_sparse_part){head / shape->group * shape->at->seq + position, position, rows, whole_lanes(rows)};
}

struct zpp_sparse_rows zpp_sparse_load(const struct zpp_sparse_shape *shape, const void *tensor,
                                       struct zpp_sparse_part part, float *scratch) {
    const struct zpp_sparse_attention *at = shape->at;
    const size_t rows = part.rows, dim = at->dim, bytes = zpp_dtype_bytes(at->dtype);
    const char *from = (const char *)tensor + part.begin * dim * bytes;
    const bool whole = dim == shape->width && rows == part.lanes;
    if (whole && at->dtype == ZPP_F32) return (struct zpp_sparse_rows){ (const float *)(const void *)from, dim };
    if (!whole) memset(scratch, 0, part.lanes * shape->width * sizeof *scratch);
    if (dim == shape->width) {
        zpp_convert(scratch, ZPP_F32, from, at->dtype, rows * dim);
    } else {
        for (size_t r = 0; r < rows; ++r) {
            zpp_convert(scratch + r * shape->width, ZPP_F32, from + r * dim * bytes, at->dtype, dim);
        }
    }
    return (struct zpp_sparse_rows){ scratch, shape->width };
}

void zpp_sparse_store(const struct zpp_sparse_shape *shape, const float *tile, void *tensor,
                      struct zpp_sparse_part part) {
    const struct zpp_sparse_attention *at = shape->at;
    const size_t dim = at->dim, bytes = zpp_dtype_bytes(at->dtype);
    char *to = (char *)tensor + part.begin * dim * bytes;
    for (size_t r = 0; r < part.rows; ++r) {
        zpp_convert(to + r * dim * bytes, at->dtype, tile + r * shape->width, ZPP_F32, dim);
    }
}

void zpp_sparse_transpose(const struct zpp_sparse_shape *shape, struct zpp_sparse_rows from, size_t lanes, float *to) {
    enum { PATCH = 8 }; /* patches, so that neither side leaves the cache line by line */
    for (size_t r = 0; r < lanes; r += PATCH) {
        for (size_t c = 0; c < shape->width; c += PATCH) {
            for (size_t y = c; y < c + PATCH; ++y) {
                for (size_t x = r; x < r + PATCH; ++x) to[y * lanes + x] = from.at[x * from.ld + y];
            }
        }
    }
}

struct zpp_sparse_span zpp_sparse_row(const struct zpp_sparse_shape *shape, size_t head, size_t row) {
    const struct zpp_sparse_layout *layout = &shape->at->layout;
    const size_t of = layout->heads == 1 ? 0 : head % shape->at->heads;
    const int32_t *start = layout->starts + of * (layout->blocks + 1) + row;
    return (struct zpp_sparse_span){ layout->columns + start[0], layout->columns + start[1] };
}

void zpp_sparse_hide(const struct zpp_sparse_shape *shape, size_t head, const struct zpp_sparse_scores *scores) {
    const struct zpp_sparse_attention *at = shape->at;
    const struct zpp_sparse_part *queries = &scores->queries, *keys = &scores->keys;
    const uint8_t *seen = at->key_mask ? at->key_mask + head / at->heads * at->seq + keys->position : NULL;
    for (size_t j = seen ? 0 : keys->rows; j < keys->lanes; ++j) {
        if (seen && j < keys->rows && seen[j]) continue;
        for (size_t i = 0; i < queries->lanes; ++i) scores->at[i * scores->query + j * scores->key] = -INFINITY;
    }
    if (!at->causal || keys->position + keys->rows <= queries->position) return;
    for (size_t i = 0; i < queries->lanes; ++i) {
        for (size_t j = queries->position + i - keys->position + 1; j < keys->lanes; ++j) {
            scores->at[i * scores->query + j * scores->key] = -INFINITY;
        }
    }
}

void zpp_sparse_keep(const struct zpp_sparse_shape *shape, size_t head, const struct zpp_sparse_scores *keep) {
    const struct zpp_sparse_attention *at = shape->at;
    const struct zpp_sparse_part *queries = &keep->queries, *keys = &keep->keys;
    const uint32_t below = zpp_sparse_drop_below(at->dropout);
    const float factor = zpp_sparse_drop_factor(below);
    for (size_t i = 0; i < queries->lanes; ++i) {
        const uint64_t key = zpp_sparse_drop_key((uint64_t)*at->seed, head, queries->position + i);
        float *to = keep->at + i * keep->query;
        for (size_t j = 0; j < keys->lanes; j += ZPP_SPARSE_DROP_KEYS) { /* blocks are whole groups of keys */
            uint64_t draws = zpp_sparse_drop_draws(key, keys->position + j);
            for (size_t n = 0; n < ZPP_SPARSE_DROP_KEYS; ++n, draws >>= 16) {
                to[(j + n) * keep->key] = (draws & 0xffff) < below ? 0.0f : factor;
            }
        }
    }
}

void zpp_sparse_drop(float *at, const float *keep, size_t elems) {
    for (size_t i = 0; i < elems; ++i) at[i] = keep[i] == 0.0f ? 0.0f : at[i] * keep[i];
}

/* --- units -------------------------------------------------------------------------------------------------------- */
struct run {
    zpp_sparse_unit_fn unit;
    void *job;
    size_t units, scratch_elems;
    float *scratches;
    atomic_size_t next;
};

static void work(size_t begin, size_t end, void *arg) {
    struct run *run = arg;
    for (size_t worker = begin; worker < end; ++worker) {
        size_t unit;
        while ((unit = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < run->units) {
            run->unit(run->job, unit, run->scratches + worker * run->scratch_elems);
        }
    }
}

zpp_status zpp_sparse_run(zpp_pool *pool, size_t units, size_t scratch_elems, zpp_sparse_unit_fn unit, void *job,
                          struct zpp_err *err) {
    size_t workers = (size_t)zpp_pool_threads(pool);
    if (workers > units) workers = units;
    if (workers == 0) return ZPP_OK;
    struct run run = { .unit = unit, .job = job, .units = units };
    run.scratch_elems = (scratch_elems + ZPP_SPARSE_LANES - 1) / ZPP_SPARSE_LANES * ZPP_SPARSE_LANES;
    const size_t bytes = workers * run.scratch_elems * sizeof(float);
    void *scratches = NULL;
    const zpp_status status = zpp_mem_alloc(bytes, ALIGN_BYTES, &scratches, err);
    if (status) return status;
    run.scratches = scratches;
    zpp_pool_run(pool, workers, 1, work, &run);
    zpp_mem_free(scratches, bytes);
    return ZPP_OK;
}
