/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.norm_squares: sum of squares (float64) and number of non-finite elements (int64) of each tensor.
 */
#include <stdlib.h>

#include "../ops/norm/norm.h"
#include "boxed.h"
#include "op_entries.h"

static const unsigned FLOATS = 1u << ZPP_F32 | 1u << ZPP_BF16 | 1u << ZPP_F16;

static void run_on_cpu(const struct zpp_norm_segment *segments, size_t count, double *sums, uint64_t *nonfinite) {
    zpp_pool *pool = zpp_op_pool_take();
    zpp_norm_squares(segments, count, sums, nonfinite, pool);
    zpp_op_pool_give(pool);
}

static void run_on_cuda(struct zpp_boxed *args, struct zpp_place place, const struct zpp_norm_segment *segments,
                        size_t count, double *sums, uint64_t *nonfinite) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = NULL;
    void *stream = NULL, *work = NULL;
    AtenTensorHandle memory = NULL; /* torch's allocator follows the stream: it may be given back before the end */
    if (!zpp_boxed_new_on(args, place, ZPP_F64, zpp_norm_cuda_work_elems(segments, count), &memory, &work)) return;
    zpp_status status = zpp_op_cuda(place.device_index, &device, &stream, &err);
    if (status == ZPP_OK) {
        status = zpp_norm_squares_cuda(device, stream, segments, count, work, sums, nonfinite, &err);
    }
    zpp_torch.aoti_torch_delete_tensor_object(memory);
    if (status != ZPP_OK) zpp_boxed_fail(args, "%s", err.text);
}

static void run(struct zpp_boxed *args, const struct zpp_tensors *tensors, struct zpp_place place, double *sums,
                uint64_t *nonfinite) {
    struct zpp_norm_segment *segments = malloc((tensors->count + 1) * sizeof *segments);
    if (!segments) {
        zpp_boxed_fail(args, "no memory for %zu segments", tensors->count);
        return;
    }
    for (size_t i = 0; i < tensors->count; ++i) {
        const struct zpp_tensor *tensor = &tensors->at[i];
        segments[i] = (struct zpp_norm_segment){ tensor->data, tensor->dtype, tensor->elems };
    }
    if (place.device_index < 0) run_on_cpu(segments, tensors->count, sums, nonfinite);
    else run_on_cuda(args, place, segments, tensors->count, sums, nonfinite);
    free(segments);
}

static void norm_squares(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    AtenTensorHandle sums = NULL, nonfinite = NULL;
    void *sums_data = NULL, *nonfinite_data = NULL;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_norm_squares, stack, inputs);
    const struct zpp_tensors *tensors = zpp_boxed_tensors(&args);
    struct zpp_place place = zpp_boxed_cpu();
    if (cuda) {
        const int32_t index = tensors->count ? tensors->at[0].device_index : 0;
        place = (struct zpp_place){ zpp_torch.aoti_torch_device_type_cuda(), index };
    }
    if (zpp_boxed_check(&args, tensors, place, FLOATS) &&
        zpp_boxed_new_on(&args, place, ZPP_F64, tensors->count, &sums, &sums_data) &&
        zpp_boxed_new_on(&args, place, ZPP_I64, tensors->count, &nonfinite, &nonfinite_data)) {
        run(&args, tensors, place, sums_data, nonfinite_data);
    }
    if (zpp_boxed_ok(&args)) {
        stack[0] = (StableIValue)(uintptr_t)sums;
        stack[1] = (StableIValue)(uintptr_t)nonfinite;
    } else {
        if (sums) zpp_torch.aoti_torch_delete_tensor_object(sums);
        if (nonfinite) zpp_torch.aoti_torch_delete_tensor_object(nonfinite);
    }
    zpp_boxed_end(&args);
}

void zpp_op_norm_squares(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    norm_squares(stack, inputs, false);
}

void zpp_op_norm_squares_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    norm_squares(stack, inputs, true);
}
