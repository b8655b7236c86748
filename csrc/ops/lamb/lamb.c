/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB over many tensors. All are cut in blocks of a fixed size, worked on by any thread: those of the first pass leave
 * their sums of squares, which are added in order; then the second pass. Tensors go in groups whose second pass still
 * finds the first's in the cache, or of one tensor where that is larger.
 */
#include "lamb.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "../element.h"
#include "../moments/tile.h"
#include "kernels.h"
#include "lamb_trust.h"

enum { GROUP_BLOCKS = 64 /* 4 MiB of p, g, m and v */, GRAIN_BLOCKS = 2 };

struct block {
    size_t segment, begin, end;
    double params, updates; /* sums of squares */
};

struct group {
    const struct zpp_lamb_segment *segments;
    double *sums;  /* [segments_count][2], and no second pass; or NULL */
    float *trust;  /* [segments_count], or NULL */
    const struct zpp_lamb_kernels *kernels;
    const struct zpp_moments_kernels *moments;
    struct zpp_lamb_consts *consts; /* [segments_count], of all segments */
    struct block *blocks;
    size_t blocks_count;
};

struct zpp_lamb_consts zpp_lamb_consts_of(const struct zpp_lamb_segment *s, float grad_scale) {
    const double t = (double)s->step;
    return (struct zpp_lamb_consts){
        .grad_scale = s->maximize ? -grad_scale : grad_scale,
        .beta1 = (float)s->beta1,
        .one_minus_beta1 = (float)(1.0 - s->beta1),
        .beta2 = (float)s->beta2,
        .one_minus_beta2 = (float)(1.0 - s->beta2),
        .per_correction1 = (float)(1.0 / (1.0 - pow(s->beta1, t))),
        .per_root_correction2 = (float)(1.0 / sqrt(1.0 - pow(s->beta2, t))),
        .eps = (float)s->eps,
        .weight_decay = (float)s->weight_decay,
    };
}

static double sum_of(const float partial[ZPP_LAMB_LANES]) {
    double sum = 0.0;
    for (int l = 0; l < ZPP_LAMB_LANES; ++l) sum += (double)partial[l];
    return sum;
}

/* Either pass over moments that are not fp32. */
struct tile_job {
    const struct group *group;
    const struct block *block;
    struct zpp_lamb_sums *sums;
    bool moves; /* the second one */
};

static void step_tile(size_t begin, size_t end, float *const values[3], const void *arg) {
    const struct tile_job *job = arg;
    const struct zpp_lamb_kernels *kernels = job->group->kernels;
    const struct zpp_lamb_consts *consts = &job->group->consts[job->block->segment];
    struct zpp_lamb_segment tile = job->group->segments[job->block->segment];
    ZPP_MOMENTS_CROP(&tile, begin, end);
    tile.exp_avg = values[ZPP_MOMENT_FIRST];
    tile.exp_avg_sq = values[ZPP_MOMENT_SECOND];
    kernels->moments(&tile, consts, 0, tile.elems, job->sums); /* tiles begin at a multiple of the lanes */
    if (job->moves) kernels->move(&tile, consts, 0, tile.elems);
}

static void pass_low(const struct group *group, const struct block *block, struct zpp_lamb_sums *sums, bool moves) {
    const struct zpp_lamb_segment *s = &group->segments[block->segment];
    const struct tile_job job = { group, block, sums, moves };
    const struct zpp_moments_held held = { group->moments, &s->how, s->moments, 2, ZPP_MOMENT_FIRST, !moves };
    zpp_moments_each_tile(&held, block->begin, block->end, step_tile, &job);
}

static bool is_low(const struct group *group, const struct block *block) {
    return group->segments[block->segment].how.kind != ZPP_MOMENTS_F32;
}

static void first_pass(size_t begin, size_t end, void *arg) {
    const struct group *group = arg;
    for (size_t b = begin; b < end; ++b) {
        struct block *block = &group->blocks[b];
        struct zpp_lamb_sums sums = { { 0 }, { 0 } };
        if (is_low(group, block)) pass_low(group, block, &sums, false);
        else group->kernels->moments(&group->segments[block->segment], &group->consts[block->segment], block->begin,
                                     block->end, &sums);
        block->params = sum_of(sums.params);
        block->updates = sum_of(sums.updates);
    }
}

static void second_pass(size_t begin, size_t end, void *arg) {
    const struct group *group = arg;
    for (size_t b = begin; b < end; ++b) {
        const struct block *block = &group->blocks[b];
        struct zpp_lamb_sums unused = { { 0 }, { 0 } };
        if (is_low(group, block)) pass_low(group, block, &unused, true);
        else group->kernels->move(&group->segments[block->segment], &group->consts[block->segment], block->begin,
                                  block->end);
    }
}

/* The sums, or the rates, of the group's tensors, of which all blocks are there. */
static void set_rates(struct group *group) {
    for (size_t b = 0; b < group->blocks_count;) {
        const size_t k = group->blocks[b].segment;
        double params = 0.0, updates = 0.0;
        for (; b < group->blocks_count && group->blocks[b].segment == k; ++b) {
            params += group->blocks[b].params;
            updates += group->blocks[b].updates;
        }
        if (group->sums) {
            group->sums[2 * k] = params;
            group->sums[2 * k + 1] = updates;
            continue;
        }
        const struct zpp_lamb_segment *s = &group->segments[k];
        const double ratio = zpp_lamb_trust(params, updates, s->trust_least, s->trust_most);
        group->consts[k].rate = (float)(s->lr * ratio);
        if (group->trust) group->trust[k] = (float)ratio;
    }
}

static void run_group(struct group *group, zpp_pool *pool) {
    zpp_pool_run(pool, group->blocks_count, GRAIN_BLOCKS, first_pass, group);
    set_rates(group);
    if (!group->sums) zpp_pool_run(pool, group->blocks_count, GRAIN_BLOCKS, second_pass, group);
    group->blocks_count = 0;
}

static size_t blocks_of(const struct zpp_lamb_segment *s) {
    return s->elems / ZPP_LAMB_BLOCK_ELEMS + (s->elems % ZPP_LAMB_BLOCK_ELEMS != 0);
}

static void add_blocks(struct group *group, size_t segment) {
    const size_t elems = group->segments[segment].elems;
    for (size_t begin = 0; begin < elems; begin += ZPP_LAMB_BLOCK_ELEMS) {
        const size_t end = elems - begin < ZPP_LAMB_BLOCK_ELEMS ? elems : begin + ZPP_LAMB_BLOCK_ELEMS;
        group->blocks[group->blocks_count++] = (struct block){ .segment = segment, .begin = begin, .end = end };
    }
}

/* What is wanted of the segments: sums or trust; both may be NULL. */
struct wanted {
    double *sums;
    float *trust;
};

static void check_segment(const struct zpp_lamb_segment *s) {
    assert(s->elems == 0 || (s->param && s->grad && s->step >= 1));
    assert(s->elems == 0 || (s->exp_avg && s->exp_avg_sq) || (s->moments[0].codes && s->moments[1].codes));
    assert(s->how.first_elems == 0);
    assert(zpp_element_is_float(s->grad_dtype) && (!s->param_out || zpp_element_is_float(s->out_dtype)));
    (void)s;
}

static zpp_status step_with(enum zpp_cpu_level level, const struct zpp_lamb_segment *segments, size_t segments_count,
                            float grad_scale, const struct wanted *wanted, zpp_pool *pool, struct zpp_err *err) {
    size_t capacity = GROUP_BLOCKS;
    for (size_t k = 0; k < segments_count; ++k) {
        if (blocks_of(&segments[k]) > capacity) capacity = blocks_of(&segments[k]);
    }
    struct group group = { .segments = segments, .sums = wanted->sums, .trust = wanted->trust,
                           .kernels = ZPP_ISA_AT(level, zpp_lamb), .moments = zpp_moments_kernels_of(level) };
    group.blocks = malloc(capacity * sizeof *group.blocks);
    group.consts = malloc((segments_count + 1) * sizeof *group.consts);
    if (!group.blocks || !group.consts) {
        free(group.blocks);
        free(group.consts);
        return zpp_fail(err, ZPP_NOMEM, "lamb: no memory for the norms of %zu tensors", segments_count);
    }
    for (size_t k = 0; k < segments_count; ++k) {
        const struct zpp_lamb_segment *s = &segments[k];
        check_segment(s);
        if (group.trust) group.trust[k] = 1.0f;
        if (group.sums) group.sums[2 * k] = group.sums[2 * k + 1] = 0.0;
        group.consts[k] = zpp_lamb_consts_of(s, grad_scale);
        if (group.blocks_count + blocks_of(s) > capacity) run_group(&group, pool);
        add_blocks(&group, k);
    }
    run_group(&group, pool);
    free(group.blocks);
    free(group.consts);
    return ZPP_OK;
}

zpp_status zpp_lamb_step(const struct zpp_lamb_segment *segments, size_t segments_count, float grad_scale, float *trust,
                         zpp_pool *pool, struct zpp_err *err) {
    const struct wanted wanted = { NULL, trust };
    return step_with(zpp_cpu_level(), segments, segments_count, grad_scale, &wanted, pool, err);
}

zpp_status zpp_lamb_norms(const struct zpp_lamb_segment *segments, size_t segments_count, float grad_scale,
                          double *sums, zpp_pool *pool, struct zpp_err *err) {
    const struct wanted wanted = { sums, NULL };
    return step_with(zpp_cpu_level(), segments, segments_count, grad_scale, &wanted, pool, err);
}

static zpp_status at_level(enum zpp_cpu_level level, const struct zpp_lamb_segment *segments, size_t segments_count,
                           float grad_scale, const struct wanted *wanted, zpp_pool *pool, struct zpp_err *err) {
    if (level > zpp_cpu_detected()) {
        return zpp_fail(err, ZPP_INVALID, "lamb: this machine or build lacks %s", zpp_cpu_level_name(level));
    }
    return step_with(level, segments, segments_count, grad_scale, wanted, pool, err);
}

zpp_status zpp_lamb_step_at(enum zpp_cpu_level level, const struct zpp_lamb_segment *segments, size_t segments_count,
                            float grad_scale, float *trust, zpp_pool *pool, struct zpp_err *err) {
    const struct wanted wanted = { NULL, trust };
    return at_level(level, segments, segments_count, grad_scale, &wanted, pool, err);
}

zpp_status zpp_lamb_norms_at(enum zpp_cpu_level level, const struct zpp_lamb_segment *segments, size_t segments_count,
                             float grad_scale, double *sums, zpp_pool *pool, struct zpp_err *err) {
    const struct wanted wanted = { sums, NULL };
    return at_level(level, segments, segments_count, grad_scale, &wanted, pool, err);
}
