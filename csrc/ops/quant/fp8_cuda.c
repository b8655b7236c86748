/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches 8-bit floats on CUDA (fp8_cuda.cu).
 */
#include "fp8_cuda.h"

#include <assert.h>

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "fp8.h"

zpp_status zpp_fp8_quantise_cuda(zpp_device *device, void *native, const struct zpp_fp8_spec *spec, const void *src,
                                 zpp_dtype src_dtype, size_t elems, uint8_t *codes, float *scales,
                                 struct zpp_err *err) {
    assert(spec->block_elems >= 16 && spec->block_elems % 16 == 0);
    const struct zpp_fp8_cuda_args args = {
        .floats = (void *)(uintptr_t)src, .codes = codes, .scales = scales, .elems = elems,
        .block_elems = spec->block_elems, .dtype = zpp_cuda_dtype_of(src_dtype), .format = (uint8_t)spec->format };
    const struct zpp_launch_cuda launch = { "zpp_fp8_quantise_cuda", zpp_fp8_blocks(spec, elems),
                                            ZPP_FP8_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, &args, err);
}

zpp_status zpp_fp8_dequantise_cuda(zpp_device *device, void *native, const struct zpp_fp8_spec *spec,
                                   const uint8_t *codes, const float *scales, void *dst, zpp_dtype dst_dtype,
                                   size_t elems, bool accumulate, struct zpp_err *err) {
    const struct zpp_fp8_cuda_args args = {
        .floats = dst, .codes = (uint8_t *)(uintptr_t)codes, .scales = (float *)(uintptr_t)scales, .elems = elems,
        .block_elems = spec->block_elems, .dtype = zpp_cuda_dtype_of(dst_dtype), .format = (uint8_t)spec->format,
        .accumulate = accumulate };
    const struct zpp_launch_cuda launch = { "zpp_fp8_dequantise_cuda",
                                            zpp_launch_cuda_blocks(elems, ZPP_FP8_CUDA_ELEMS), ZPP_FP8_CUDA_THREADS,
                                            0 };
    return zpp_launch_cuda(device, native, &launch, &args, err);
}
