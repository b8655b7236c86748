/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches block quantisation on CUDA (quant_cuda.cu).
 */
#include "quant_cuda.h"

#include <assert.h>

#include "../../base/device_cuda.h"
#include "../element_cuda.h"
#include "quant.h"

static zpp_status launch(zpp_device *device, void *native, const char *name, uint64_t blocks,
                         void *argument, struct zpp_err *err) {
    if (blocks == 0) return ZPP_OK;
    if (blocks > INT32_MAX) {
        return zpp_fail(err, ZPP_INVALID, "%s: %llu blocks, at most 2^31 - 1 fit one launch: use larger ones", name,
                        (unsigned long long)blocks);
    }
    CUfunction kernel;
    const zpp_status status = zpp_cuda_kernel(device, name, &kernel, err);
    if (status != ZPP_OK) return status;
    const struct zpp_cuda_grid grid = { { (unsigned int)blocks, 1, 1 }, { ZPP_QUANT_CUDA_THREADS, 1, 1 }, 0 };
    void *args[] = { argument }; /* copied by the launch */
    return zpp_cuda_launch(device, kernel, &grid, native, args, err);
}

zpp_status zpp_quantise_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec, const void *src,
                             zpp_dtype src_dtype, size_t elems, const struct zpp_quant_target *to,
                             struct zpp_err *err) {
    assert(spec->block_elems % 16 == 0 && (spec->bits == 8 || spec->bits == 4));
    struct zpp_quant_cuda_args args = {
        .floats = (void *)(uintptr_t)src, .codes = to->codes, .scales = to->scales,
        .mids = spec->asymmetric ? to->mids : NULL, .elems = elems, .block_elems = spec->block_elems,
        .dtype = zpp_cuda_dtype_of(src_dtype), .bits = (uint8_t)spec->bits };
    return launch(device, native, "zpp_quantise_cuda", zpp_quant_blocks(spec, elems), &args, err);
}

zpp_status zpp_dequantise_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec,
                               const struct zpp_quant_source *from, void *dst, zpp_dtype dst_dtype, size_t elems,
                               bool accumulate, struct zpp_err *err) {
    struct zpp_quant_cuda_args args = {
        .floats = dst, .codes = (uint8_t *)(uintptr_t)from->codes, .scales = (float *)(uintptr_t)from->scales,
        .mids = spec->asymmetric ? (float *)(uintptr_t)from->mids : NULL, .elems = elems,
        .block_elems = spec->block_elems, .dtype = zpp_cuda_dtype_of(dst_dtype), .bits = (uint8_t)spec->bits,
        .accumulate = accumulate };
    const uint64_t pairs = elems / 2 + elems % 2;
    return launch(device, native, "zpp_dequantise_cuda", (pairs + ZPP_QUANT_CUDA_PAIRS - 1) / ZPP_QUANT_CUDA_PAIRS,
                  &args, err);
}

/* --- sums --------------------------------------------------------------------------------------------------------- */
_Static_assert(sizeof(struct zpp_quant_sum_cuda_args) <= 4096, "kernel arguments must fit 4096 bytes");

static zpp_status describe_sources(const struct zpp_quant_spec *spec, const struct zpp_quant_source *sources,
                                   size_t sources_count, float factor, struct zpp_quant_sum_cuda_args *args,
                                   struct zpp_err *err) {
    if (sources_count > ZPP_QUANT_CUDA_SOURCES) {
        return zpp_fail(err, ZPP_INVALID, "codes has %zu tensors, wanted at most %d on CUDA: sum them in groups",
                        sources_count, (int)ZPP_QUANT_CUDA_SOURCES);
    }
    assert(spec->block_elems % 16 == 0 && (spec->bits == 8 || spec->bits == 4));
    args->block_elems = spec->block_elems;
    args->bits = (uint8_t)spec->bits;
    args->factor = factor;
    args->sources_count = (uint32_t)sources_count;
    for (size_t s = 0; s < sources_count; ++s) {
        args->sources[s].codes = sources[s].codes;
        args->sources[s].scales = sources[s].scales;
        args->sources[s].mids = spec->asymmetric ? sources[s].mids : NULL;
    }
    return ZPP_OK;
}

zpp_status zpp_quant_add_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec,
                              const struct zpp_quant_source *sources, size_t sources_count,
                              const struct zpp_quant_add *add, struct zpp_err *err) {
    struct zpp_quant_sum_cuda_args args = { .to = { .floats = add->dst, .elems = add->elems,
                                                    .dtype = zpp_cuda_dtype_of(add->dtype),
                                                    .accumulate = add->accumulate },
                                            .halt = add->halt };
    const zpp_status status = describe_sources(spec, sources, sources_count, add->factor, &args, err);
    if (status != ZPP_OK) return status;
    const uint64_t pairs = add->elems / 2 + add->elems % 2;
    return launch(device, native, "zpp_quant_sum_cuda", (pairs + ZPP_QUANT_CUDA_PAIRS - 1) / ZPP_QUANT_CUDA_PAIRS,
                  &args, err);
}

zpp_status zpp_quant_sum_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec,
                              const struct zpp_quant_source *sources, size_t sources_count, float factor, void *dst,
                              zpp_dtype dst_dtype, size_t elems, struct zpp_err *err) {
    const struct zpp_quant_add add = { dst, dst_dtype, elems, factor, false, NULL };
    return zpp_quant_add_cuda(device, native, spec, sources, sources_count, &add, err);
}

zpp_status zpp_quant_reduce_cuda(zpp_device *device, void *native, const struct zpp_quant_spec *spec,
                                 const struct zpp_quant_source *sources, size_t sources_count, float factor,
                                 size_t elems, const struct zpp_quant_spec *to_spec,
                                 const struct zpp_quant_target *to, struct zpp_err *err) {
    struct zpp_quant_sum_cuda_args args = {
        .to = { .codes = to->codes, .scales = to->scales, .mids = to_spec->asymmetric ? to->mids : NULL,
                .elems = elems, .block_elems = to_spec->block_elems, .bits = (uint8_t)to_spec->bits } };
    const zpp_status status = describe_sources(spec, sources, sources_count, factor, &args, err);
    if (status != ZPP_OK) return status;
    return launch(device, native, "zpp_quant_reduce_cuda", zpp_quant_blocks(to_spec, elems), &args, err);
}
