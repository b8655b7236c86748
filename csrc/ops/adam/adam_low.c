/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on moments in bf16 or 8 bits: its step on a tile of moments/tile.h.
 */
#include "../moments/tile.h"
#include "kernels.h"

struct job {
    const struct zpp_optim_segment *segment;
    const struct zpp_adam_consts *consts;
    zpp_adam_kernel kernel;
};

static void step(size_t begin, size_t end, float *const values[3], const void *arg) {
    const struct job *job = arg;
    struct zpp_optim_segment tile = *job->segment;
    ZPP_MOMENTS_CROP(&tile, begin, end);
    tile.exp_avg = values[ZPP_MOMENT_FIRST];
    tile.exp_avg_sq = values[ZPP_MOMENT_SECOND];
    tile.max_exp_avg_sq = tile.moments[ZPP_MOMENT_MAX].codes ? values[ZPP_MOMENT_MAX] : NULL;
    job->kernel(&tile, job->consts, 0, tile.elems);
}

void zpp_adam_low(const struct zpp_optim_segment *segment, const struct zpp_adam_consts *consts, zpp_adam_kernel kernel,
                  const struct zpp_moments_kernels *moments, size_t begin, size_t end) {
    const struct job job = { segment, consts, kernel };
    const struct zpp_moments_held held = { moments, &segment->how, segment->moments,
                                           segment->moments[ZPP_MOMENT_MAX].codes ? 3 : 2, ZPP_MOMENT_FIRST, false };
    zpp_moments_each_tile(&held, begin, end, step, &job);
}
