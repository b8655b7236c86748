/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on moments in bf16 or 8 bits: a tile of them is decoded to fp32 beside the stack, stepped by the kernel that
 * fp32 moments have, and encoded again. Two or three tiles of 8 KiB stay in the first-level cache, so memory sees the
 * few bits only.
 */
#include "kernels.h"

#define LINE_ALIGNED __attribute__((aligned(64)))

/* The tile as a segment of its own: [begin, begin + elems) of `whole`, its moments elsewhere. */
static struct zpp_adam_segment tile_of(const struct zpp_adam_segment *whole, size_t begin, size_t elems) {
    struct zpp_adam_segment tile = *whole;
    tile.param += begin;
    tile.grad = (const char *)whole->grad + begin * zpp_dtype_bytes(whole->grad_dtype);
    if (whole->param_out) tile.param_out = (char *)whole->param_out + begin * zpp_dtype_bytes(whole->out_dtype);
    tile.elems = elems;
    tile.how.kind = ZPP_MOMENTS_F32;
    return tile;
}

void zpp_adam_low(const struct zpp_adam_segment *segment, const struct zpp_adam_consts *consts, zpp_adam_kernel kernel,
                  const struct zpp_moments_kernels *moments, size_t begin, size_t end) {
    LINE_ALIGNED float values[3][ZPP_MOMENTS_TILE_ELEMS];
    const int count = segment->moments[ZPP_MOMENT_MAX].codes ? 3 : 2;
    for (size_t at = begin; at < end;) {
        const size_t next = zpp_moments_tile_end(&segment->how, at, end);
        struct zpp_adam_segment tile = tile_of(segment, at, next - at);
        tile.exp_avg = values[ZPP_MOMENT_FIRST];
        tile.exp_avg_sq = values[ZPP_MOMENT_SECOND];
        tile.max_exp_avg_sq = count == 3 ? values[ZPP_MOMENT_MAX] : NULL;
        for (int k = 0; k < count; ++k) {
            zpp_moments_load(moments, &segment->how, (enum zpp_moments_which)k, &segment->moments[k], at, next,
                             values[k]);
        }
        kernel(&tile, consts, 0, next - at);
        for (int k = 0; k < count; ++k) {
            zpp_moments_store(moments, &segment->how, (enum zpp_moments_which)k, &segment->moments[k], at, next,
                              values[k], false);
        }
        at = next;
    }
}
