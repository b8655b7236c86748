/* SPDX-License-Identifier: Apache-2.0
 *
 * 1-bit LAMB's fresh variance and norms over many tensors. All are cut in blocks of a fixed size, worked on by any
 * thread; their sums are added in order.
 */
#include "onebit_lamb.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "kernels.h"

enum { GRAIN_BLOCKS = 2 };

struct block {
    size_t segment, begin, end;
    double alone, both;
    float largest;
};

struct job {
    const struct zpp_onebit_lamb_segment *segments;
    const struct zpp_onebit_lamb_consts *consts; /* [segments] */
    struct block *blocks;
    const struct zpp_onebit_lamb_kernels *kernels;
};

struct zpp_onebit_lamb_consts zpp_onebit_lamb_consts_of(const struct zpp_onebit_lamb_segment *s) {
    const double t = (double)s->step, frozen = s->step < s->freeze_step ? t : (double)s->freeze_step;
    return (struct zpp_onebit_lamb_consts){
        .beta1 = (float)s->beta1,
        .beta2 = (float)s->beta2,
        .one_minus_beta2 = (float)(1.0 - s->beta2),
        .per_gradient = (float)(1.0 / (s->coefficient * (1.0 - s->beta1))),
        .per_momentum = (float)(1.0 / (s->coefficient * (1.0 - pow(s->beta1, t)))),
        .per_root_fresh = (float)(1.0 / sqrt(1.0 - pow(s->beta2, t))),
        .per_root_frozen = (float)(1.0 / sqrt(1.0 - pow(s->beta2, frozen))),
        .eps = (float)s->eps,
        .weight_decay = (float)s->weight_decay,
    };
}

static void pass(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    for (size_t b = begin; b < end; ++b) {
        struct block *block = &job->blocks[b];
        struct zpp_onebit_lamb_lanes sums = { { 0 }, { 0 }, { 0 } };
        job->kernels->fresh(&job->segments[block->segment], &job->consts[block->segment], block->begin, block->end,
                            &sums);
        for (int l = 0; l < ZPP_ONEBIT_LAMB_LANES; ++l) {
            block->alone += (double)sums.alone[l];
            block->both += (double)sums.both[l];
            block->largest = lanes_max_bits(block->largest, sums.largest[l]);
        }
    }
}

static size_t blocks_of(const struct zpp_onebit_lamb_segment *s) {
    return s->elems / ZPP_ONEBIT_LAMB_BLOCK_ELEMS + (s->elems % ZPP_ONEBIT_LAMB_BLOCK_ELEMS != 0);
}

static size_t cut(const struct zpp_onebit_lamb_segment *segments, size_t segments_count, struct block *blocks) {
    size_t count = 0;
    for (size_t k = 0; k < segments_count; ++k) {
        const size_t elems = segments[k].elems;
        for (size_t begin = 0; begin < elems; begin += ZPP_ONEBIT_LAMB_BLOCK_ELEMS) {
            const bool last = elems - begin < ZPP_ONEBIT_LAMB_BLOCK_ELEMS;
            const size_t end = last ? elems : begin + ZPP_ONEBIT_LAMB_BLOCK_ELEMS;
            blocks[count++] = (struct block){ .segment = k, .begin = begin, .end = end };
        }
    }
    return count;
}

static zpp_status fresh_with(enum zpp_cpu_level level, const struct zpp_onebit_lamb_segment *segments,
                             size_t segments_count, double *sums, float *largest, zpp_pool *pool,
                             struct zpp_err *err) {
    size_t capacity = 1;
    for (size_t k = 0; k < segments_count; ++k) capacity += blocks_of(&segments[k]);
    struct block *blocks = malloc(capacity * sizeof *blocks);
    struct zpp_onebit_lamb_consts *consts = malloc((segments_count + 1) * sizeof *consts);
    if (!blocks || !consts) {
        free(blocks);
        free(consts);
        return zpp_fail(err, ZPP_NOMEM, "onebit_lamb: no memory for the norms of %zu tensors", segments_count);
    }
    for (size_t k = 0; k < segments_count; ++k) {
        const struct zpp_onebit_lamb_segment *s = &segments[k];
        assert(s->elems == 0 || (s->param && s->exp_avg && s->before && s->exp_avg_sq && s->fresh_sq));
        assert(s->step >= 1 && s->freeze_step >= 1);
        consts[k] = zpp_onebit_lamb_consts_of(s);
        sums[2 * k] = sums[2 * k + 1] = 0.0;
        largest[k] = 0.0f;
    }
    struct job job = { segments, consts, blocks, ZPP_ISA_AT(level, zpp_onebit_lamb) };
    const size_t count = cut(segments, segments_count, blocks);
    zpp_pool_run(pool, count, GRAIN_BLOCKS, pass, &job);
    for (size_t b = 0; b < count; ++b) {
        const size_t k = blocks[b].segment;
        sums[2 * k] += blocks[b].alone;
        sums[2 * k + 1] += blocks[b].both;
        largest[k] = lanes_max_bits(largest[k], blocks[b].largest);
    }
    free(blocks);
    free(consts);
    return ZPP_OK;
}

zpp_status zpp_onebit_lamb_fresh(const struct zpp_onebit_lamb_segment *segments, size_t segments_count, double *sums,
                                 float *largest, zpp_pool *pool, struct zpp_err *err) {
    return fresh_with(zpp_cpu_level(), segments, segments_count, sums, largest, pool, err);
}

zpp_status zpp_onebit_lamb_fresh_at(enum zpp_cpu_level level, const struct zpp_onebit_lamb_segment *segments,
                                    size_t segments_count, double *sums, float *largest, zpp_pool *pool,
                                    struct zpp_err *err) {
    if (level > zpp_cpu_detected()) {
        return zpp_fail(err, ZPP_INVALID, "onebit_lamb: this machine or build lacks %s", zpp_cpu_level_name(level));
    }
    return fresh_with(level, segments, segments_count, sums, largest, pool, err);
}
