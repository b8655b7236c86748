/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches 1-bit LAMB's fresh variance and norms on CUDA (onebit_lamb_cuda.cu): segments in groups of 40, three kernels
 * each.
 */
#include "onebit_lamb_cuda.h"

#include "../launch_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_onebit_lamb_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(ZPP_ONEBIT_LAMB_CUDA_LANES == (int)ZPP_ONEBIT_LAMB_LANES, "the order of onebit_lamb.h");
_Static_assert(ZPP_ONEBIT_LAMB_CUDA_BLOCK_ELEMS == (int)ZPP_ONEBIT_LAMB_BLOCK_ELEMS, "the order of onebit_lamb.h");

size_t zpp_onebit_lamb_cuda_fill(const struct zpp_onebit_lamb_segment *segments, size_t segments_count,
                                 struct zpp_onebit_lamb_cuda_batch *batch) {
    size_t taken = 0;
    batch->blocks = 0;
    for (; taken < segments_count && taken < ZPP_ONEBIT_LAMB_CUDA_SEGMENTS; ++taken) {
        const struct zpp_onebit_lamb_segment *s = &segments[taken];
        batch->segments[taken] = (struct zpp_onebit_lamb_cuda_segment){
            .param = s->param, .exp_avg = s->exp_avg, .before = s->before, .exp_avg_sq = s->exp_avg_sq,
            .fresh_sq = s->fresh_sq, .elems = s->elems, .consts = zpp_onebit_lamb_consts_of(s),
            .first_block = batch->blocks };
        batch->blocks += (uint32_t)((s->elems + ZPP_ONEBIT_LAMB_BLOCK_ELEMS - 1) / ZPP_ONEBIT_LAMB_BLOCK_ELEMS);
    }
    batch->count = (uint32_t)taken;
    return taken;
}

/* The work of one group: sums of blocks, then their lanes, then the largest of each. */
static size_t work_bytes(const struct zpp_onebit_lamb_cuda_batch *batch) {
    return (size_t)batch->blocks *
           (2 * sizeof(double) + ZPP_ONEBIT_LAMB_LANES * sizeof(struct zpp_onebit_lamb_lane) + sizeof(float));
}

void zpp_onebit_lamb_cuda_place(struct zpp_onebit_lamb_cuda_batch *batch, void *work, double *sums, float *largest) {
    batch->block_sums = work;
    batch->lanes = (struct zpp_onebit_lamb_lane *)(void *)(batch->block_sums + 2 * (size_t)batch->blocks);
    batch->block_largest = (float *)(void *)(batch->lanes + (size_t)batch->blocks * ZPP_ONEBIT_LAMB_LANES);
    batch->sums = sums;
    batch->largest = largest;
}

size_t zpp_onebit_lamb_cuda_work_bytes(const struct zpp_onebit_lamb_segment *segments, size_t segments_count) {
    struct zpp_onebit_lamb_cuda_batch batch;
    size_t most = sizeof(double);
    for (size_t done = 0; done < segments_count;) {
        done += zpp_onebit_lamb_cuda_fill(segments + done, segments_count - done, &batch);
        if (work_bytes(&batch) > most) most = work_bytes(&batch);
    }
    return most;
}

static zpp_status launch_group(zpp_device *device, void *native, const struct zpp_onebit_lamb_cuda_batch *batch,
                               struct zpp_err *err) {
    const unsigned int threads = ZPP_ONEBIT_LAMB_CUDA_THREADS;
    const uint64_t threads_needed = (uint64_t)batch->blocks * ZPP_ONEBIT_LAMB_LANES;
    const struct zpp_launch_cuda all[] = {
        { "zpp_onebit_lamb_cuda_lanes", zpp_launch_cuda_blocks(threads_needed, threads), threads, 0 },
        { "zpp_onebit_lamb_cuda_blocks", zpp_launch_cuda_blocks(batch->blocks, threads), threads, 0 },
        { "zpp_onebit_lamb_cuda_tensors", zpp_launch_cuda_blocks(batch->count, threads), threads, 0 } };
    zpp_status status = ZPP_OK;
    for (size_t k = 0; k < sizeof all / sizeof all[0] && status == ZPP_OK; ++k) {
        status = zpp_launch_cuda(device, native, &all[k], batch, err);
    }
    return status;
}

zpp_status zpp_onebit_lamb_fresh_cuda(zpp_device *device, void *native, const struct zpp_onebit_lamb_segment *segments,
                                      size_t segments_count, double *sums, float *largest, void *work,
                                      struct zpp_err *err) {
    struct zpp_onebit_lamb_cuda_batch batch = { .lanes = NULL };
    zpp_status status = ZPP_OK;
    for (size_t done = 0; done < segments_count && status == ZPP_OK;) {
        const size_t taken = zpp_onebit_lamb_cuda_fill(segments + done, segments_count - done, &batch);
        zpp_onebit_lamb_cuda_place(&batch, work, sums + 2 * done, largest + done);
        status = launch_group(device, native, &batch, err);
        done += taken;
    }
    return status;
}
