/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches one-bit compression on CUDA (onebit_cuda.cu).
 */
#include "onebit_cuda.h"

#include <assert.h>

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "kernels.h"

_Static_assert(sizeof(struct zpp_onebit_cuda_args) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(ZPP_ONEBIT_CUDA_LANES == (int)ZPP_ONEBIT_LANES, "the order of onebit.h");
_Static_assert(ZPP_ONEBIT_CUDA_BLOCK_ELEMS == (int)ZPP_ONEBIT_BLOCK_ELEMS, "the order of onebit.h");

static uint64_t blocks_of_chunk(size_t chunk_elems) {
    return (chunk_elems + ZPP_ONEBIT_BLOCK_ELEMS - 1) / ZPP_ONEBIT_BLOCK_ELEMS;
}

size_t zpp_onebit_cuda_work_elems(size_t chunk_elems, size_t elems) {
    return zpp_onebit_chunks(chunk_elems, elems) * blocks_of_chunk(chunk_elems) * ZPP_ONEBIT_LANES;
}

static void size_args(struct zpp_onebit_cuda_args *args, size_t chunk_elems, size_t elems) {
    assert(chunk_elems >= 16 && chunk_elems % 16 == 0);
    args->elems = elems;
    args->chunk_elems = chunk_elems;
    args->chunks = zpp_onebit_chunks(chunk_elems, elems);
    args->chunk_blocks = blocks_of_chunk(chunk_elems);
}

static zpp_status launch(zpp_device *device, void *native, const char *kernel, uint64_t threads,
                         const struct zpp_onebit_cuda_args *args, struct zpp_err *err) {
    const struct zpp_launch_cuda launch = { kernel, zpp_launch_cuda_blocks(threads, ZPP_ONEBIT_CUDA_THREADS),
                                            ZPP_ONEBIT_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, args, err);
}

static zpp_status compress(zpp_device *device, void *native, const struct zpp_onebit_cuda_args *args,
                           struct zpp_err *err) {
    const uint64_t lanes = args->chunks * args->chunk_blocks * ZPP_ONEBIT_LANES;
    zpp_status status = launch(device, native, "zpp_onebit_cuda_lanes", lanes, args, err);
    if (!status) status = launch(device, native, "zpp_onebit_cuda_scales", args->chunks, args, err);
    if (!status) status = launch(device, native, "zpp_onebit_cuda_emit", zpp_onebit_bytes(args->elems), args, err);
    return status;
}

zpp_status zpp_onebit_compress_cuda(zpp_device *device, void *native, size_t chunk_elems, const void *src,
                                    zpp_dtype src_dtype, float *error, size_t elems, uint8_t *bits, float *scales,
                                    float *work, struct zpp_err *err) {
    struct zpp_onebit_cuda_args args = { .floats = (void *)(uintptr_t)src, .error = error, .bits = bits,
                                         .scales = scales, .lanes = work, .dtype = zpp_cuda_dtype_of(src_dtype) };
    size_args(&args, chunk_elems, elems);
    return compress(device, native, &args, err);
}

zpp_status zpp_onebit_reduce_cuda(zpp_device *device, void *native, size_t chunk_elems,
                                  const struct zpp_onebit_source *sources, size_t sources_count, float factor,
                                  float *error, size_t elems, uint8_t *bits, float *scales, float *work,
                                  struct zpp_err *err) {
    struct zpp_onebit_cuda_args args = { .error = error, .bits = bits, .scales = scales, .lanes = work,
                                         .factor = factor, .sources_count = (uint32_t)sources_count };
    assert(sources_count >= 1);
    if (sources_count > ZPP_ONEBIT_CUDA_SOURCES) {
        return zpp_fail(err, ZPP_INVALID, "onebit: the sum of %zu arrays on CUDA, at most %d are supported: add them "
                        "up in two steps", sources_count, ZPP_ONEBIT_CUDA_SOURCES);
    }
    for (size_t s = 0; s < sources_count; ++s) {
        args.sources[s] = (struct zpp_onebit_cuda_source){ sources[s].bits, sources[s].scales };
    }
    size_args(&args, chunk_elems, elems);
    return compress(device, native, &args, err);
}

zpp_status zpp_onebit_decode_cuda(zpp_device *device, void *native, size_t chunk_elems,
                                  const struct zpp_onebit_source *from, void *dst, zpp_dtype dst_dtype, size_t elems,
                                  bool accumulate, struct zpp_err *err) {
    struct zpp_onebit_cuda_args args = { .floats = dst, .dtype = zpp_cuda_dtype_of(dst_dtype),
                                         .accumulate = accumulate };
    args.sources[0] = (struct zpp_onebit_cuda_source){ from->bits, from->scales };
    size_args(&args, chunk_elems, elems);
    const struct zpp_launch_cuda launch = { "zpp_onebit_cuda_decode",
                                            zpp_launch_cuda_blocks(elems, ZPP_ONEBIT_CUDA_DECODE_ELEMS),
                                            ZPP_ONEBIT_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, &args, err);
}
