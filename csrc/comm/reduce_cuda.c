/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches the sum of several ranks' arrays on CUDA (reduce_cuda.cu).
 */
#include "reduce_cuda.h"

#include "../ops/element_cuda.h"
#include "../ops/launch_cuda.h"

_Static_assert(ZPP_SUM_CUDA_SOURCES == (int)ZPP_STREAM_SUM_SOURCES, "the list of sources is an argument of the kernel");
_Static_assert(sizeof(struct zpp_sum_cuda_args) <= 4096, "kernel arguments must fit 4096 bytes");

void zpp_sum_cuda_fill(const struct zpp_stream_sum *sum, struct zpp_sum_cuda_args *args) {
    const uint64_t pieces = zpp_launch_cuda_blocks(sum->elems, ZPP_SUM_CUDA_THREADS * ZPP_SUM_CUDA_WIDTH);
    uintptr_t addresses = (uintptr_t)sum->dst;
    *args = (struct zpp_sum_cuda_args){ .dst = sum->dst, .halt = sum->halt, .nonfinite = sum->nonfinite,
                                        .elems = sum->elems, .scale = sum->scale, .sources = (uint32_t)sum->sources,
                                        .blocks = pieces < ZPP_SUM_CUDA_BLOCKS ? (uint32_t)pieces : ZPP_SUM_CUDA_BLOCKS,
                                        .kind = zpp_cuda_dtype_of(sum->dtype),
                                        .dst_kind = zpp_cuda_dtype_of(sum->dst_dtype), .accumulate = sum->accumulate };
    for (int r = 0; r < sum->sources; r++) {
        args->src[r] = sum->src[r];
        addresses |= (uintptr_t)sum->src[r];
    }
    args->aligned = addresses % 16 == 0;
}

zpp_status zpp_sum_cuda(zpp_device *device, void *native, const struct zpp_stream_sum *sum, struct zpp_err *err) {
    struct zpp_sum_cuda_args args;
    zpp_sum_cuda_fill(sum, &args);
    const struct zpp_launch_cuda launch = { "zpp_sum_cuda_kernel", args.blocks, ZPP_SUM_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, &args, err);
}
