/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches LAMB on CUDA (lamb_cuda.cu, lamb_low_cuda.cu): segments in groups of 32, or of 25 where their moments are
 * not fp32; four kernels each.
 */
#include "lamb_cuda.h"

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_lamb_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(sizeof(struct zpp_lamb_low_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(sizeof(struct zpp_lamb_low_consts) <= ZPP_LOW_CUDA_CONSTS_BYTES, "constants must fit");
_Static_assert((int)ZPP_LAMB_CUDA_THREADS == (int)ZPP_LOW_CUDA_THREADS, "one kind of launch");
_Static_assert(ZPP_LAMB_CUDA_LANES == (int)ZPP_LAMB_LANES, "the order of lamb.h");
_Static_assert(ZPP_LAMB_CUDA_BLOCK_ELEMS == (int)ZPP_LAMB_BLOCK_ELEMS, "the order of lamb.h");

size_t zpp_lamb_cuda_fill(const struct zpp_lamb_segment *segments, size_t segments_count, struct zpp_grad_scale scale,
                          struct zpp_lamb_cuda_batch *batch) {
    const bool low = segments_count && segments[0].how.kind != ZPP_MOMENTS_F32; /* all are alike */
    const uint32_t capacity = low ? ZPP_LOW_CUDA_SEGMENTS : ZPP_LAMB_CUDA_SEGMENTS;
    size_t taken = 0;
    batch->count = 0;
    batch->blocks = 0;
    batch->scale = scale;
    for (; taken < segments_count && batch->count < capacity; ++taken) {
        const struct zpp_lamb_segment *s = &segments[taken];
        if (s->elems == 0) continue;
        batch->places[batch->count] = (uint32_t)taken;
        batch->segments[batch->count++] =
            (struct zpp_lamb_cuda_segment){.param = s->param,
                                           .exp_avg = s->exp_avg,
                                           .exp_avg_sq = s->exp_avg_sq,
                                           .grad = s->grad,
                                           .param_out = s->param_out,
                                           .elems = s->elems,
                                           .lr = s->lr,
                                           .trust_least = s->trust_least,
                                           .trust_most = s->trust_most,
                                           .consts = zpp_lamb_consts_of(s, zpp_grad_scale_on_host(&scale)),
                                           .first_block = batch->blocks,
                                           .grad_dtype = zpp_cuda_dtype_of(s->grad_dtype),
                                           .out_dtype = s->param_out ? zpp_cuda_dtype_of(s->out_dtype) : ZPP_CUDA_NONE};
        batch->blocks += (uint32_t)((s->elems + ZPP_LAMB_BLOCK_ELEMS - 1) / ZPP_LAMB_BLOCK_ELEMS);
    }
    batch->taken = (uint32_t)taken;
    return taken;
}

/* The work of one group: rates, then sums of blocks, then lanes. */
enum { RATES_BYTES = ZPP_LAMB_CUDA_SEGMENTS * sizeof(float) };

static size_t work_bytes(const struct zpp_lamb_cuda_batch *batch) {
    return RATES_BYTES + (size_t)batch->blocks * 2 * (sizeof(double) + ZPP_LAMB_LANES * sizeof(float));
}

void zpp_lamb_cuda_place(struct zpp_lamb_cuda_batch *batch, void *work) {
    batch->rates = work;
    batch->sums = (double *)(void *)((char *)work + RATES_BYTES);
    batch->lanes = (float *)(void *)(batch->sums + 2 * (size_t)batch->blocks);
}

size_t zpp_lamb_cuda_work_bytes(const struct zpp_lamb_segment *segments, size_t segments_count) {
    struct zpp_lamb_cuda_batch batch;
    size_t most = RATES_BYTES;
    for (size_t done = 0; done < segments_count;) {
        done += zpp_lamb_cuda_fill(segments + done, segments_count - done, zpp_grad_scale_of(1.0f), &batch);
        if (work_bytes(&batch) > most) most = work_bytes(&batch);
    }
    return most;
}

struct job {
    const struct zpp_lamb_segment *segments;
    struct zpp_grad_scale scale;
};

static void describe_low(const void *arg, size_t index, struct zpp_low_cuda_segment *segment, void *consts) {
    const struct job *job = arg;
    const struct zpp_lamb_segment *s = &job->segments[index];
    *segment = (struct zpp_low_cuda_segment){
        .param = s->param, .grad = s->grad, .param_out = s->param_out, .elems = s->elems,
        .grad_dtype = zpp_cuda_dtype_of(s->grad_dtype),
        .out_dtype = s->param_out ? zpp_cuda_dtype_of(s->out_dtype) : ZPP_CUDA_NONE,
    };
    zpp_low_cuda_hold(segment, &s->how, s->moments, 2, ZPP_MOMENT_FIRST);
    ((struct zpp_lamb_low_consts *)consts)->lamb = zpp_lamb_consts_of(s, zpp_grad_scale_on_host(&job->scale));
}

unsigned int zpp_lamb_low_cuda_fill(const struct zpp_lamb_segment *segments, size_t segments_count,
                                    const struct zpp_lamb_cuda_batch *beside, struct zpp_lamb_low_cuda_batch *batch) {
    const struct job job = {segments, beside->scale};
    const struct zpp_low_cuda_source source = {"zpp_lamb_low_cuda_move",
                                               segments_count,
                                               sizeof(struct zpp_lamb_low_consts),
                                               describe_low,
                                               &job,
                                               beside->scale};
    unsigned int blocks;
    zpp_low_cuda_fill(&source, 0, batch, &blocks);
    batch->lanes = beside->lanes;
    batch->blocks = beside->blocks;
    for (uint32_t k = 0; k < batch->list.count; ++k) {
        batch->firsts[k] = beside->segments[k].first_block;
        batch->consts[k].rate = beside->rates + k;
    }
    return blocks;
}

/* The kernels of one group in order; those that touch moments are of their kind. */
static zpp_status launch_group(zpp_device *device, void *native, const struct zpp_lamb_cuda_batch *batch,
                               const struct zpp_lamb_low_cuda_batch *low, unsigned int low_blocks,
                               struct zpp_err *err) {
    const unsigned int threads = ZPP_LAMB_CUDA_THREADS;
    const uint64_t lane_blocks = zpp_launch_cuda_blocks((uint64_t)batch->blocks * ZPP_LAMB_LANES, threads);
    const struct { struct zpp_launch_cuda launch; const void *argument; } all[] = {
        { { low ? "zpp_lamb_low_cuda_lanes" : "zpp_lamb_cuda_moments", lane_blocks, threads, 0 },
          low ? (const void *)low : batch },
        { { "zpp_lamb_cuda_blocks", zpp_launch_cuda_blocks(2 * (uint64_t)batch->blocks, threads), threads, 0 }, batch },
        { { "zpp_lamb_cuda_rates", zpp_launch_cuda_blocks(batch->count, threads), threads, 0 }, batch },
        { { low ? "zpp_lamb_low_cuda_move" : "zpp_lamb_cuda_move", low ? low_blocks : batch->blocks, threads, 0 },
          low ? (const void *)low : batch } };
    zpp_status status = ZPP_OK;
    for (size_t k = 0; k < sizeof all / sizeof all[0] && status == ZPP_OK; ++k) {
        status = zpp_launch_cuda(device, native, &all[k].launch, all[k].argument, err);
    }
    return status;
}

zpp_status zpp_lamb_step_cuda(zpp_device *device, void *native, const struct zpp_lamb_segment *segments,
                              size_t segments_count, struct zpp_grad_scale scale, void *work, struct zpp_err *err) {
    const bool is_low = segments_count && segments[0].how.kind != ZPP_MOMENTS_F32;
    struct zpp_lamb_cuda_batch batch = { .lanes = NULL };
    struct zpp_lamb_low_cuda_batch low = { .lanes = NULL };
    zpp_status status = ZPP_OK;
    for (size_t done = 0; done < segments_count && status == ZPP_OK;) {
        const size_t taken = zpp_lamb_cuda_fill(segments + done, segments_count - done, scale, &batch);
        unsigned int blocks = 0;
        zpp_lamb_cuda_place(&batch, work);
        if (is_low) blocks = zpp_lamb_low_cuda_fill(segments + done, taken, &batch, &low);
        if (batch.blocks) status = launch_group(device, native, &batch, is_low ? &low : NULL, blocks, err);
        done += taken;
    }
    return status;
}

zpp_status zpp_lamb_norms_cuda(zpp_device *device, void *native, const struct zpp_lamb_segment *segments,
                               size_t segments_count, struct zpp_grad_scale scale, double *sums, void *work,
                               struct zpp_err *err) {
    const unsigned int threads = ZPP_LAMB_CUDA_THREADS;
    struct zpp_lamb_cuda_batch batch = { .lanes = NULL };
    zpp_status status = ZPP_OK;
    for (size_t done = 0; done < segments_count && status == ZPP_OK;) {
        const size_t taken = zpp_lamb_cuda_fill(segments + done, segments_count - done, scale, &batch);
        zpp_lamb_cuda_place(&batch, work);
        batch.norms = sums + 2 * done;
        const uint64_t threads_needed = (uint64_t)batch.blocks * ZPP_LAMB_LANES;
        const struct zpp_launch_cuda all[] = {
            { "zpp_lamb_cuda_moments", zpp_launch_cuda_blocks(threads_needed, threads), threads, 0 },
            { "zpp_lamb_cuda_blocks", zpp_launch_cuda_blocks(2 * (uint64_t)batch.blocks, threads), threads, 0 },
            { "zpp_lamb_cuda_norms", zpp_launch_cuda_blocks(batch.taken, threads), threads, 0 } };
        for (size_t k = 0; k < sizeof all / sizeof all[0] && status == ZPP_OK; ++k) {
            status = zpp_launch_cuda(device, native, &all[k], &batch, err);
        }
        done += taken;
    }
    return status;
}
