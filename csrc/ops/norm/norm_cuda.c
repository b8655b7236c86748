/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches the sum of squares on CUDA (norm_cuda.cu): segments in groups of 128, four kernels each.
 */
#include "norm_cuda.h"

#include "../../base/device_cuda.h"
#include "../element_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_norm_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(ZPP_NORM_CUDA_LANES == (int)ZPP_NORM_LANES, "the order of norm.h");
_Static_assert(ZPP_NORM_CUDA_BLOCK_ELEMS == (int)ZPP_NORM_BLOCK_ELEMS, "the order of norm.h");

size_t zpp_norm_cuda_fill(const struct zpp_norm_segment *segments, size_t segments_count,
                          struct zpp_norm_cuda_batch *batch) {
    const size_t taken = segments_count < ZPP_NORM_CUDA_SEGMENTS ? segments_count : ZPP_NORM_CUDA_SEGMENTS;
    batch->count = (uint32_t)taken;
    batch->blocks = 0;
    for (size_t k = 0; k < taken; ++k) {
        const struct zpp_norm_segment *s = &segments[k];
        batch->segments[k] = (struct zpp_norm_cuda_segment){ s->data, s->elems, batch->blocks,
                                                             zpp_cuda_dtype_of(s->dtype) };
        batch->blocks += (uint32_t)((s->elems + ZPP_NORM_BLOCK_ELEMS - 1) / ZPP_NORM_BLOCK_ELEMS);
    }
    return taken;
}

size_t zpp_norm_cuda_work_elems(const struct zpp_norm_segment *segments, size_t segments_count) {
    struct zpp_norm_cuda_batch batch;
    size_t most = 0;
    for (size_t done = 0; done < segments_count;) {
        done += zpp_norm_cuda_fill(segments + done, segments_count - done, &batch);
        if (batch.blocks > most) most = batch.blocks;
    }
    return most * ZPP_NORM_LANES;
}

static zpp_status launch(zpp_device *device, void *native, CUfunction kernel, size_t threads,
                         struct zpp_norm_cuda_batch *batch, struct zpp_err *err) {
    if (threads == 0) return ZPP_OK;
    const unsigned int blocks = (unsigned int)((threads - 1) / ZPP_NORM_CUDA_THREADS + 1);
    const struct zpp_cuda_grid grid = { { blocks, 1, 1 }, { ZPP_NORM_CUDA_THREADS, 1, 1 }, 0 };
    void *args[] = { batch }; /* copied by the launch */
    return zpp_cuda_launch(device, kernel, &grid, native, args, err);
}

zpp_status zpp_norm_squares_cuda(zpp_device *device, void *native, const struct zpp_norm_segment *segments,
                                 size_t segments_count, double *work, double *sum_per_segment,
                                 uint64_t *nonfinite_per_segment, struct zpp_err *err) {
    CUfunction zero, lanes, blocks, ends;
    struct zpp_norm_cuda_batch batch = { .lanes = work };
    zpp_status status = zpp_cuda_kernel(device, "zpp_norm_cuda_zero", &zero, err);
    if (status == ZPP_OK) status = zpp_cuda_kernel(device, "zpp_norm_cuda_lanes", &lanes, err);
    if (status == ZPP_OK) status = zpp_cuda_kernel(device, "zpp_norm_cuda_blocks", &blocks, err);
    if (status == ZPP_OK) status = zpp_cuda_kernel(device, "zpp_norm_cuda_segments", &ends, err);
    for (size_t done = 0; done < segments_count && status == ZPP_OK;) {
        batch.sums = sum_per_segment + done;
        batch.nonfinite = (unsigned long long *)(void *)(nonfinite_per_segment + done);
        done += zpp_norm_cuda_fill(segments + done, segments_count - done, &batch);
        const size_t threads = (size_t)batch.blocks * ZPP_NORM_LANES; /* up to 2^32 elements of work a launch */
        status = launch(device, native, zero, batch.count, &batch, err);
        if (status == ZPP_OK) status = launch(device, native, lanes, threads, &batch, err);
        if (status == ZPP_OK) status = launch(device, native, blocks, batch.blocks, &batch, err);
        if (status == ZPP_OK) status = launch(device, native, ends, batch.count, &batch, err);
    }
    return status;
}
