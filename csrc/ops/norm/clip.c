/* SPDX-License-Identifier: Apache-2.0
 *
 * The record of clip.h on the CPU, and its launches on CUDA (clip_cuda.cu).
 */
#include "clip.h"

#include <assert.h>
#include <string.h>

#include "../launch_cuda.h"
#include "clip_cuda.h"

_Static_assert(sizeof(struct zpp_clip_cuda_args) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(sizeof(struct zpp_norm_groups_cuda_args) <= 4096, "kernel arguments must fit 4096 bytes");

struct zpp_clip_record zpp_clip_record_of(double loss_scale) {
    return (struct zpp_clip_record){
        .loss_scale = loss_scale, .loss_scale_f32 = (float)loss_scale, .grad_scale = (float)(1.0 / loss_scale),
        .grad_scale_f64 = 1.0 / loss_scale};
}

static bool reads_sums(const struct zpp_clip *clip) {
    return clip->rule.parts & (ZPP_CLIP_MEASURE | ZPP_CLIP_FINITE);
}

void zpp_clip(const struct zpp_clip *clip) {
    double squares = 0.0;
    for (size_t unit = 0; reads_sums(clip) && unit < clip->units; ++unit)
        for (size_t rank = 0; rank < clip->ranks; ++rank) squares += clip->sums[rank][unit];
    const bool halted = clip->halt && __atomic_load_n(clip->halt, __ATOMIC_ACQUIRE);
    zpp_clip_parts(clip->record, &clip->rule, halted ? NAN : squares, halted);
}

zpp_status zpp_clip_cuda(zpp_device *device, void *native, const struct zpp_clip *clip, struct zpp_err *err) {
    struct zpp_clip_cuda_args args = {.record = clip->record, .halt = clip->halt, .rule = clip->rule};
    if (reads_sums(clip)) {
        if (clip->ranks > ZPP_CLIP_CUDA_RANKS) {
            return zpp_fail(err, ZPP_INVALID, "norm: sums of %zu ranks, at most %d are supported on CUDA", clip->ranks,
                            ZPP_CLIP_CUDA_RANKS);
        }
        args.ranks = clip->ranks;
        args.units = clip->units;
        for (size_t rank = 0; rank < clip->ranks; ++rank) args.sums[rank] = clip->sums[rank];
    }
    const struct zpp_launch_cuda launch = {"zpp_clip_cuda", 1, ZPP_CLIP_CUDA_THREADS, 0};
    return zpp_launch_cuda(device, native, &launch, &args, err);
}

/* The work: a sum of each segment, its count of what is not finite, then what the sums of squares work in. */
size_t zpp_norm_groups_work_elems(const struct zpp_norm_segment *segments, size_t segments_count) {
    return zpp_norm_cuda_work_elems(segments, segments_count) + 2 * segments_count;
}

struct job {
    const size_t *firsts;
    const double *of_segments;
    double *sums;
};

static size_t fill_groups(const struct job *job, size_t begin, size_t count, struct zpp_norm_groups_cuda_args *args) {
    const size_t taken = count - begin < ZPP_NORM_GROUPS_CUDA ? count - begin : ZPP_NORM_GROUPS_CUDA;
    *args = (struct zpp_norm_groups_cuda_args){job->of_segments, job->sums + begin, (uint32_t)taken, {0}};
    for (size_t g = 0; g <= taken; ++g) args->firsts[g] = (uint32_t)job->firsts[begin + g];
    return taken;
}

zpp_status zpp_norm_groups_cuda(zpp_device *device, void *native, const struct zpp_norm_segment *segments,
                                const size_t *firsts, size_t groups_count, double *work, double *sums,
                                struct zpp_err *err) {
    const size_t count = firsts[groups_count];
    double *const of_segments = work;
    uint64_t *const nonfinite = (uint64_t *)(void *)(of_segments + count);
    double *const lanes = work + 2 * count;
    const struct job job = {firsts, of_segments, sums};
    zpp_status status =
        zpp_norm_squares_cuda(device, native, segments, count, lanes, of_segments, nonfinite, err);
    for (size_t done = 0; done < groups_count && status == ZPP_OK;) {
        struct zpp_norm_groups_cuda_args args;
        const size_t taken = fill_groups(&job, done, groups_count, &args);
        const struct zpp_launch_cuda launch = {
            "zpp_norm_groups_cuda", zpp_launch_cuda_blocks(taken, ZPP_CLIP_CUDA_THREADS), ZPP_CLIP_CUDA_THREADS, 0};
        status = zpp_launch_cuda(device, native, &launch, &args, err);
        done += taken;
    }
    return status;
}
