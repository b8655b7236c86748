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

static void step_tiles(size_t first_tile, size_t last_tile, void *arg) {
    const struct job *job = arg;
    const struct zpp_optim_segment *whole = &job->piece->segment;
    const struct zpp_moment param = { whole->param_out, NULL };
    const size_t into = job->piece->first_elems % TILE_ELEMS;
    float values[TILE_ELEMS];
    for (size_t tile = first_tile; tile < last_tile; tile++) {
        const size_t begin = tile ? tile * TILE_ELEMS - into : 0, next = (tile + 1) * TILE_ELEMS - into;
        const size_t end = next < whole->elems ? next : whole->elems;
        struct zpp_optim_segment part = zpp_optim_part_with_states(whole, begin, end - begin);
        part.param_out = NULL;
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
