/* SPDX-License-Identifier: Apache-2.0
 *
 * stream_sum.h: checks, and the launch of one of the two versions: that of reduce.c, or reduce_cuda.cu.
 */
#include "stream_sum.h"

#include "../ops/element_cuda.h"
#include "../ops/launch_cuda.h"
#include "comm.h"
#include "reduce_cuda.h"

_Static_assert(ZPP_SUM_CUDA_SOURCES == (int)ZPP_STREAM_SUM_SOURCES, "the list of sources is an argument of the kernel");
_Static_assert(sizeof(struct zpp_sum_cuda_args) <= 4096, "kernel arguments must fit 4096 bytes");

struct sum_arg {
    zpp_device *device;
    struct zpp_sum_op sum;
};
_Static_assert(sizeof(struct sum_arg) <= ZPP_OP_ARG_BYTES, "a sum is the argument of one operation");

static bool is_summed(zpp_dtype dtype) { return dtype == ZPP_F32 || dtype == ZPP_BF16 || dtype == ZPP_F16; }

static bool takes(const struct zpp_sum_op *sum) {
    const bool narrows = sum->sources == 1 && sum->dtype == ZPP_F32 && !sum->accumulate && is_summed(sum->dst_dtype);
    if (sum->dtype == ZPP_F64) return sum->dst_dtype == ZPP_F64;
    return is_summed(sum->dtype) && (sum->dst_dtype == ZPP_F32 || sum->dst_dtype == sum->dtype || narrows);
}

static zpp_status check(const struct zpp_sum_op *sum, struct zpp_err *err) {
    if (!takes(sum)) {
        const char *from = zpp_dtype_name(sum->dtype), *to = zpp_dtype_name(sum->dst_dtype);
        return zpp_fail(err, ZPP_INVALID,
                        "sum: %s elements to %s, wanted float32, bfloat16 or float16 to float32 or the same, or "
                        "float64 to float64",
                        from ? from : "unknown", to ? to : "unknown");
    }
    if (sum->sources < 1 || sum->sources > ZPP_STREAM_SUM_SOURCES) {
        return zpp_fail(err, ZPP_INVALID, "sum: %d sources, wanted 1 to %d: sum them in groups", sum->sources,
                        ZPP_STREAM_SUM_SOURCES);
    }
    return ZPP_OK;
}

static void sum_on_host(const struct zpp_sum_op *sum) {
    if (sum->halt && __atomic_load_n(sum->halt, __ATOMIC_ACQUIRE)) return;
    const struct zpp_sum_seen seen = zpp_reduce_sources(sum->dst, sum->dst_dtype, sum->accumulate, sum->src,
                                                        sum->sources, sum->dtype, sum->elems, sum->scale);
    if (sum->nonfinite && seen.nonfinite) __atomic_store_n(sum->nonfinite, 1, __ATOMIC_RELAXED);
}

void zpp_sum_cuda_fill(const struct zpp_sum_op *sum, struct zpp_sum_cuda_args *args) {
    const uint64_t pieces = zpp_launch_cuda_blocks(sum->elems, ZPP_SUM_CUDA_THREADS * ZPP_SUM_CUDA_WIDTH);
    uintptr_t addresses = (uintptr_t)sum->dst;
    *args = (struct zpp_sum_cuda_args){ .dst = sum->dst, .halt = sum->halt, .nonfinite = sum->nonfinite,
                                        .elems = sum->elems, .scale = (float)sum->scale, .scale_f64 = sum->scale,
                                        .sources = (uint32_t)sum->sources,
                                        .blocks = pieces < ZPP_SUM_CUDA_BLOCKS ? (uint32_t)pieces : ZPP_SUM_CUDA_BLOCKS,
                                        .kind = zpp_cuda_dtype_of(sum->dtype),
                                        .dst_kind = zpp_cuda_dtype_of(sum->dst_dtype), .accumulate = sum->accumulate };
    for (int r = 0; r < sum->sources; r++) {
        args->src[r] = sum->src[r];
        addresses |= (uintptr_t)sum->src[r];
    }
    args->aligned = addresses % 16 == 0;
}

static zpp_status sum_on_cuda(zpp_device *device, void *native, const struct zpp_sum_op *sum, struct zpp_err *err) {
    struct zpp_sum_cuda_args args;
    zpp_sum_cuda_fill(sum, &args);
    const char *kernel = sum->dtype == ZPP_F64 ? "zpp_sum_f64_cuda_kernel" : "zpp_sum_cuda_kernel";
    const struct zpp_launch_cuda launch = { kernel, args.blocks, ZPP_SUM_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, &args, err);
}

static zpp_status run_sum(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct sum_arg *op = arg;
    if (zpp_device_kind(op->device) == ZPP_DEVICE_CUDA) return sum_on_cuda(op->device, native, &op->sum, err);
    sum_on_host(&op->sum);
    return ZPP_OK;
}

zpp_status zpp_stream_sum(zpp_stream *stream, const struct zpp_sum_op *sum, struct zpp_err *err) {
    const struct sum_arg op = { zpp_stream_device(stream), *sum };
    const zpp_status status = check(sum, err);
    if (status != ZPP_OK || sum->elems == 0) return status;
    return zpp_stream_launch(stream, run_sum, &op, sizeof op, err);
}
