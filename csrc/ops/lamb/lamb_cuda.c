/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches LAMB on CUDA (lamb_cuda.cu): segments in groups of 32, four kernels each.
 */
#include "lamb_cuda.h"

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_lamb_cuda_batch) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(ZPP_LAMB_CUDA_LANES == (int)ZPP_LAMB_LANES, "the order of lamb.h");
_Static_assert(ZPP_LAMB_CUDA_BLOCK_ELEMS == (int)ZPP_LAMB_BLOCK_ELEMS, "the order of lamb.h");

size_t zpp_lamb_cuda_fill(const struct zpp_lamb_segment *segments, size_t segments_count, float grad_scale,
                          struct zpp_lamb_cuda_batch *batch) {
    size_t taken = 0;
    batch->count = 0;
    batch->blocks = 0;
    for (; taken < segments_count && batch->count < ZPP_LAMB_CUDA_SEGMENTS; ++taken) {
        const struct zpp_lamb_segment *s = &segments[taken];
        if (s->elems == 0) continue;
        batch->segments[batch->count++] = (struct zpp_lamb_cuda_segment){
            .param = s->param, .exp_avg = s->exp_avg, .exp_avg_sq = s->exp_avg_sq, .grad = s->grad,
            .param_out = s->param_out, .elems = s->elems, .lr = s->lr, .trust_least = s->trust_least,
            .trust_most = s->trust_most, .consts = zpp_lamb_consts_of(s, grad_scale), .first_block = batch->blocks,
            .grad_kind = zpp_cuda_kind_of(s->grad_dtype),
            .out_kind = s->param_out ? zpp_cuda_kind_of(s->out_dtype) : ZPP_CUDA_NONE };
        batch->blocks += (uint32_t)((s->elems + ZPP_LAMB_BLOCK_ELEMS - 1) / ZPP_LAMB_BLOCK_ELEMS);
    }
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
        done += zpp_lamb_cuda_fill(segments + done, segments_count - done, 1.0f, &batch);
        if (work_bytes(&batch) > most) most = work_bytes(&batch);
    }
    return most;
}

zpp_status zpp_lamb_step_cuda(zpp_device *device, void *native, const struct zpp_lamb_segment *segments,
                              size_t segments_count, float grad_scale, void *work, struct zpp_err *err) {
    struct zpp_lamb_cuda_batch batch = { .lanes = NULL };
    zpp_status status = ZPP_OK;
    for (size_t done = 0; done < segments_count && status == ZPP_OK;) {
        done += zpp_lamb_cuda_fill(segments + done, segments_count - done, grad_scale, &batch);
        if (batch.blocks == 0) continue;
        zpp_lamb_cuda_place(&batch, work);
        const struct { const char *kernel; uint64_t threads; } launches[] = {
            { "zpp_lamb_cuda_moments", (uint64_t)batch.blocks * ZPP_LAMB_LANES },
            { "zpp_lamb_cuda_blocks", 2 * (uint64_t)batch.blocks },
            { "zpp_lamb_cuda_rates", batch.count },
            { "zpp_lamb_cuda_move", (uint64_t)batch.blocks * ZPP_LAMB_CUDA_THREADS } };
        for (size_t k = 0; k < sizeof launches / sizeof launches[0] && status == ZPP_OK; ++k) {
            const struct zpp_launch_cuda launch = { launches[k].kernel,
                                                    zpp_launch_cuda_blocks(launches[k].threads, ZPP_LAMB_CUDA_THREADS),
                                                    ZPP_LAMB_CUDA_THREADS, 0 };
            status = zpp_launch_cuda(device, native, &launch, &batch, err);
        }
    }
    return status;
}
