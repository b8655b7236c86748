/* SPDX-License-Identifier: Apache-2.0
 *
 * The walk over tiles of moments that are not fp32: tile.h.
 */
#include "tile.h"

#include <assert.h>

#define LINE_ALIGNED __attribute__((aligned(64)))

void zpp_moments_each_tile(const struct zpp_moments_held *held, size_t begin, size_t end, zpp_moments_step_fn step,
                           const void *arg) {
    LINE_ALIGNED float scratch[3][ZPP_MOMENTS_TILE_ELEMS];
    float *const values[3] = { scratch[0], scratch[1], scratch[2] };
    const size_t count = held->count < 3 ? held->count : 3; /* it is; an analyser cannot know */
    assert(held->count >= 1 && held->first + held->count <= 3);
    for (size_t at = begin; at < end;) {
        const size_t next = zpp_moments_tile_end(held->how, at, end);
        for (size_t k = 0; k < count; ++k) {
            zpp_moments_load(held->kernels, held->how, (enum zpp_moments_which)(held->first + k), &held->moments[k], at,
                             next, values[k]);
        }
        step(at, next, values, arg);
        for (size_t k = 0; k < count && !held->reads; ++k) {
            zpp_moments_store(held->kernels, held->how, (enum zpp_moments_which)(held->first + k), &held->moments[k],
                              at, next, values[k], false);
        }
        at = next;
    }
}
