/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.fp8_quantise_ and fp8_dequantise_: read and check tensors, then csrc/ops/quant/fp8.h. Codes are
 * uint8 tensors: views of torch's float8 ones, whose dtypes the rest of zeropp does not know.
 */
#include <stdio.h>

#include "../ops/quant/fp8.h"
#include "op_checks.h"
#include "op_entries.h"

enum { OF_BYTES = 96 };

/* The spec, and codes and scales for `elems` elements. */
static bool check_parts(struct zpp_boxed *args, const struct zpp_tensor *codes, const struct zpp_tensor *scales,
                        size_t elems, int64_t format, int64_t block_elems, struct zpp_fp8_spec *spec) {
    if (!zpp_boxed_ok(args)) return false;
    if (format != ZPP_FP8_E4M3 && format != ZPP_FP8_E5M2) {
        return zpp_boxed_fail(args, "format is %lld, wanted 0 (e4m3) or 1 (e5m2)", (long long)format);
    }
    if (block_elems < 16 || block_elems % 16) {
        return zpp_boxed_fail(args, "block_elems is %lld, wanted a multiple of 16, at least 16",
                              (long long)block_elems);
    }
    *spec = (struct zpp_fp8_spec){ (size_t)block_elems, (enum zpp_fp8_format)format };
    char of[OF_BYTES];
    snprintf(of, sizeof of, "%zu elements in blocks of %zu", elems, spec->block_elems);
    return zpp_op_check_elems(args, "codes", codes, 1u << ZPP_U8, elems, of) &&
           zpp_op_check_elems(args, "scales", scales, 1u << ZPP_F32, zpp_fp8_blocks(spec, elems), of);
}

static void run_quantise(struct zpp_boxed *args, const struct zpp_fp8_spec *spec, const struct zpp_tensor *src,
                         uint8_t *codes, float *scales) {
    struct zpp_op_stream on;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_fp8_quantise(spec, src->data, src->dtype, src->elems, codes, scales, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_op_launched(args, zpp_fp8_quantise_cuda(on.device, on.native, spec, src->data, src->dtype, src->elems,
                                                    codes, scales, &err), &err);
    }
}

static void quantise(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct zpp_fp8_spec spec;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_fp8_quantise, stack, inputs);
    const struct zpp_tensor *src = zpp_boxed_tensor(&args);
    const struct zpp_tensor *codes = zpp_boxed_tensor(&args);
    const struct zpp_tensor *scales = zpp_boxed_tensor(&args);
    const int64_t format = zpp_boxed_int(&args), block_elems = zpp_boxed_int(&args);
    if (cuda) zpp_op_on_cuda(&args, src);
    const struct zpp_tensors w[] = { zpp_op_one("codes", codes), zpp_op_one("scales", scales) };
    const struct zpp_tensors r = zpp_op_one("src", src), *written[] = { &w[0], &w[1] }, *read = &r;
    if (zpp_op_check_tensor(&args, "src", src, ZPP_OP_FLOATS) &&
        check_parts(&args, codes, scales, src->elems, format, block_elems, &spec) &&
        zpp_boxed_check_apart(&args, written, 2, &read, 1)) {
        run_quantise(&args, &spec, src, codes->data, scales->data);
    }
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(fp8_quantise, quantise)

static void run_dequantise(struct zpp_boxed *args, const struct zpp_fp8_spec *spec, const uint8_t *codes,
                           const float *scales, const struct zpp_tensor *dst, bool accumulate) {
    struct zpp_op_stream on;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_fp8_dequantise(spec, codes, scales, dst->data, dst->dtype, dst->elems, accumulate, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_op_launched(args, zpp_fp8_dequantise_cuda(on.device, on.native, spec, codes, scales, dst->data,
                                                      dst->dtype, dst->elems, accumulate, &err), &err);
    }
}

static void dequantise(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct zpp_fp8_spec spec;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_fp8_dequantise, stack, inputs);
    const struct zpp_tensor *codes = zpp_boxed_tensor(&args);
    const struct zpp_tensor *scales = zpp_boxed_tensor(&args);
    const struct zpp_tensor *dst = zpp_boxed_tensor(&args);
    const int64_t format = zpp_boxed_int(&args), block_elems = zpp_boxed_int(&args);
    const bool accumulate = zpp_boxed_bool(&args);
    if (cuda) zpp_op_on_cuda(&args, dst);
    const struct zpp_tensors r[] = { zpp_op_one("codes", codes), zpp_op_one("scales", scales) };
    const struct zpp_tensors w = zpp_op_one("dst", dst), *written = &w, *read[] = { &r[0], &r[1] };
    if (zpp_op_check_tensor(&args, "dst", dst, ZPP_OP_FLOATS) &&
        check_parts(&args, codes, scales, dst->elems, format, block_elems, &spec) &&
        zpp_boxed_check_apart(&args, &written, 1, read, 2)) {
        run_dequantise(&args, &spec, codes->data, scales->data, dst, accumulate);
    }
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(fp8_dequantise, dequantise)
