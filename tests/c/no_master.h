/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments of Adam whose bf16 parameters have no fp32 copy, for the tests of its CUDA kernels.
 */
#ifndef ZPP_TESTS_NO_MASTER_H
#define ZPP_TESTS_NO_MASTER_H

#include "../../csrc/zero/step_plan.h"
#include "harness.h"

/* The place of segment s in its parameter, and that parameter's number. */
static size_t first_elems_of(const struct zpp_optim_segment *segments, size_t s) {
    return segments[s].how.kind == ZPP_MOMENTS_F32 ? s * 40503u : segments[s].how.first_elems;
}

/* Make param_out the parameter: bf16, in memory that is large enough for fp32. */
static void without_master(struct zpp_optim_segment *segments, size_t count) {
    for (size_t s = 0; s < count; ++s) {
        const uint64_t key = zpp_moments_key(0, (UINT64_C(1) << 32) + s, segments[s].step);
        if (!segments[s].param_out) segments[s].elems = 0;
        segments[s].param = NULL;
        segments[s].out_dtype = ZPP_BF16;
        segments[s].param_key = zpp_moments_key_from(key, first_elems_of(segments, s));
    }
}

static void no_master_on_cpu(const struct zpp_optim_segment *segments, size_t count, float grad_scale) {
    struct zpp_no_master_piece *pieces = calloc(count, sizeof *pieces);
    CHECK(pieces != NULL);
    for (size_t s = 0; s < count; ++s)
        pieces[s] = (struct zpp_no_master_piece){segments[s], s, first_elems_of(segments, s)};
    zpp_no_master_step(pieces, count, grad_scale, NULL);
    free(pieces);
}

#endif
