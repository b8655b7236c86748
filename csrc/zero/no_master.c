/* SPDX-License-Identifier: Apache-2.0
 *
 * See no_master.h. Tiles begin at multiples of their length in the *parameter*, which are borders of 8-bit moments'
 * blocks too.
 */
#include "no_master.h"

enum { TILE_ELEMS = ZPP_MOMENTS_TILE_ELEMS };
/* Moments' random bits have the parameters' numbers as streams; these are others. */
#define STREAM_OF_PARAMS (UINT64_C(1) << 32)

struct job {
    const struct zpp_no_master_piece *piece;
    const struct zpp_moments_kernels *kernels;
    struct zpp_moments how; /* of the parameter itself */
    float grad_scale;
};

/* Elements [begin, end) of the piece's segment, without its parameter. */
static struct zpp_optim_segment crop(const struct zpp_optim_segment *whole, size_t begin, size_t end) {
    struct zpp_optim_segment part = *whole;
    part.elems = end - begin;
    part.param_out = NULL;
    part.grad = (const char *)whole->grad + begin * zpp_dtype_bytes(whole->grad_dtype);
    if (whole->how.kind == ZPP_MOMENTS_F32) {
        part.exp_avg += begin;
        part.exp_avg_sq += begin;
        if (whole->max_exp_avg_sq) part.max_exp_avg_sq += begin;
        return part;
    }
    part.how.first_elems += begin;
    for (int k = 0; k < 3; k++) {
        if (!whole->moments[k].codes) continue;
        part.moments[k].codes = (char *)whole->moments[k].codes + begin * zpp_moments_elem_bytes(whole->how.kind);
        /* A tile that is not the first begins a block. */
        if (begin && whole->moments[k].scales)
            part.moments[k].scales = whole->moments[k].scales + zpp_moments_scales(whole->how.first_elems, begin);
    }
    return part;
}

static void step_tiles(size_t first_tile, size_t last_tile, void *arg) {
    const struct job *job = arg;
    const struct zpp_optim_segment *whole = &job->piece->segment;
    const struct zpp_moment param = { whole->param_out, NULL };
    const size_t into = job->piece->first_elems % TILE_ELEMS;
    float values[TILE_ELEMS];
    for (size_t tile = first_tile; tile < last_tile; tile++) {
        const size_t begin = tile ? tile * TILE_ELEMS - into : 0, next = (tile + 1) * TILE_ELEMS - into;
        const size_t end = next < whole->elems ? next : whole->elems;
        struct zpp_optim_segment part = crop(whole, begin, end);
        zpp_moments_load(job->kernels, &job->how, ZPP_MOMENT_FIRST, &param, begin, end, values);
        part.param = values;
        zpp_optim_step(&part, 1, job->grad_scale, NULL);
        zpp_moments_store(job->kernels, &job->how, ZPP_MOMENT_FIRST, &param, begin, end, values, false);
    }
}

void zpp_no_master_step(const struct zpp_no_master_piece *pieces, size_t count, float grad_scale, zpp_pool *pool) {
    const struct zpp_moments_kernels *kernels = zpp_moments_kernels_of(zpp_cpu_level());
    for (size_t i = 0; i < count; i++) {
        const struct zpp_no_master_piece *piece = &pieces[i];
        struct job job = { piece, kernels,
                           { ZPP_MOMENTS_BF16, piece->first_elems,
                             zpp_moments_key(0, STREAM_OF_PARAMS + piece->stream, piece->segment.step) },
                           grad_scale };
        const size_t elems = piece->first_elems % TILE_ELEMS + piece->segment.elems;
        zpp_pool_run(pool, (elems + TILE_ELEMS - 1) / TILE_ELEMS, 1, step_tiles, &job);
    }
}
