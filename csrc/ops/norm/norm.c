/* SPDX-License-Identifier: Apache-2.0
 *
 * Sum of squares over many segments: blocks of all segments are summed in any order by any thread, each into its own
 * place, and added up in their own order afterwards. Rounds of a fixed number of blocks bound what that needs.
 */
#include "norm.h"

#include <assert.h>
#include <math.h>

#include "../element.h"
#include "kernels.h"

enum {
    ROUND_BLOCKS = 2048, /* 32 MiB of fp32: a round's start and end cost nothing beside it */
    GRAIN_BLOCKS = 8,
};

struct block {
    size_t segment, begin_elems;
    double sum;
    uint64_t nonfinite;
};

struct round {
    const struct zpp_norm_segment *segments;
    const struct zpp_norm_kernels *kernels;
    size_t count;
    struct block blocks[ROUND_BLOCKS];
};

/* F64 has one version for every CPU: what the compiler makes of a plain loop. */
static double f64_block(const void *data, size_t elems) {
    const double *x = data;
    double lanes[ZPP_NORM_LANES] = { 0 };
    size_t i = 0;
    for (; i + ZPP_NORM_LANES <= elems; i += ZPP_NORM_LANES) {
        for (size_t l = 0; l < ZPP_NORM_LANES; ++l) lanes[l] += x[i + l] * x[i + l];
    }
    for (; i < elems; ++i) lanes[i % ZPP_NORM_LANES] += x[i] * x[i];
    return zpp_norm_add_lanes(lanes);
}

static size_t block_elems(const struct zpp_norm_segment *segment, size_t begin_elems) {
    const size_t left = segment->elems - begin_elems;
    return left < ZPP_NORM_BLOCK_ELEMS ? left : ZPP_NORM_BLOCK_ELEMS;
}

static uint64_t count_nonfinite(const void *data, zpp_dtype dtype, size_t elems) {
    uint64_t count = 0;
    for (size_t i = 0; i < elems; ++i)
        count += dtype == ZPP_F64 ? !isfinite(((const double *)data)[i]) : !isfinite(zpp_element_load(data, dtype, i));
    return count;
}

static void sum_blocks(size_t begin, size_t end, void *arg) {
    struct round *round = arg;
    for (size_t k = begin; k < end; ++k) {
        struct block *block = &round->blocks[k];
        const struct zpp_norm_segment *segment = &round->segments[block->segment];
        const char *data = (const char *)segment->data + block->begin_elems * zpp_dtype_bytes(segment->dtype);
        const size_t elems = block_elems(segment, block->begin_elems);
        const bool wide = segment->dtype == ZPP_F64;
        block->sum = wide ? f64_block(data, elems) : round->kernels->block(data, segment->dtype, elems);
        /* Squares of finite elements hardly overflow, so only a block with a non-finite element is read again. */
        block->nonfinite = isfinite(block->sum) ? 0 : count_nonfinite(data, segment->dtype, elems);
    }
}

static void finish_round(struct round *round, zpp_pool *pool, double *sums, uint64_t *nonfinite) {
    zpp_pool_run(pool, round->count, GRAIN_BLOCKS, sum_blocks, round);
    for (size_t k = 0; k < round->count; ++k) {
        sums[round->blocks[k].segment] += round->blocks[k].sum;
        if (nonfinite) nonfinite[round->blocks[k].segment] += round->blocks[k].nonfinite;
    }
    round->count = 0;
}

static void squares_with(enum zpp_cpu_level level, const struct zpp_norm_segment *segments, size_t segments_count,
                         double *sums, uint64_t *nonfinite, zpp_pool *pool) {
    struct round round;
    round.segments = segments;
    round.kernels = ZPP_ISA_AT(level, zpp_norm);
    round.count = 0;
    for (size_t s = 0; s < segments_count; ++s) {
        assert(segments[s].dtype <= ZPP_F64); /* F32, BF16, F16, F64 */
        sums[s] = 0.0;
        if (nonfinite) nonfinite[s] = 0;
        for (size_t begin = 0; begin < segments[s].elems; begin += ZPP_NORM_BLOCK_ELEMS) {
            round.blocks[round.count++] = (struct block){ .segment = s, .begin_elems = begin };
            if (round.count == ROUND_BLOCKS) finish_round(&round, pool, sums, nonfinite);
        }
    }
    finish_round(&round, pool, sums, nonfinite);
}

void zpp_norm_squares(const struct zpp_norm_segment *segments, size_t segments_count, double *sum_per_segment,
                      uint64_t *nonfinite_per_segment, zpp_pool *pool) {
    squares_with(zpp_cpu_level(), segments, segments_count, sum_per_segment, nonfinite_per_segment, pool);
}

bool zpp_norm_squares_at(enum zpp_cpu_level level, const struct zpp_norm_segment *segments, size_t segments_count,
                         double *sum_per_segment, uint64_t *nonfinite_per_segment, zpp_pool *pool) {
    if (level > zpp_cpu_detected()) return false;
    squares_with(level, segments, segments_count, sum_per_segment, nonfinite_per_segment, pool);
    return true;
}
