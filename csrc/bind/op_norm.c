/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.norm_squares: sum of squares (float64) and number of non-finite elements (int64) of each tensor.
 */
#include <stdlib.h>

#include "../ops/norm/norm.h"
#include "op_checks.h"
#include "op_entries.h"

static void run_on_cpu(const struct zpp_norm_segment *segments, size_t count, double *sums, uint64_t *nonfinite) {
    zpp_pool *pool = zpp_op_pool_take();
    zpp_norm_squares(segments, count, sums, nonfinite, pool);
    zpp_op_pool_give(pool);
}

static void run_on_cuda(struct zpp_boxed *args, const struct zpp_norm_segment *segments, size_t count, double *sums,
                        uint64_t *nonfinite) {
    struct zpp_op_stream on;
    struct zpp_err err = ZPP_ERR_INIT;
    AtenTensorHandle memory = NULL;
    void *work = NULL;
    const size_t work_bytes = zpp_norm_cuda_work_elems(segments, count) * sizeof(double);
    if (!zpp_op_find_work(args, &on, work_bytes, &memory, &work)) return;
    zpp_op_launched(args, zpp_norm_squares_cuda(on.device, on.native, segments, count, work, sums, nonfinite, &err),
                    &err);
    zpp_torch.aoti_torch_delete_tensor_object(memory);
}

static void run(struct zpp_boxed *args, const struct zpp_tensors *tensors, double *sums, uint64_t *nonfinite) {
    struct zpp_norm_segment *segments = zpp_op_new_segments(args, tensors->count, sizeof *segments);
    if (!segments) return;
    for (size_t i = 0; i < tensors->count; ++i) {
        const struct zpp_tensor *tensor = &tensors->at[i];
        segments[i] = (struct zpp_norm_segment){ tensor->data, tensor->dtype, tensor->elems };
    }
    if (!zpp_op_is_on_cuda(args)) run_on_cpu(segments, tensors->count, sums, nonfinite);
    else run_on_cuda(args, segments, tensors->count, sums, nonfinite);
    free(segments);
}

static void norm_squares(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    AtenTensorHandle sums = NULL, nonfinite = NULL;
    void *sums_data = NULL, *nonfinite_data = NULL;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_norm_squares, stack, inputs);
    const struct zpp_tensors *tensors = zpp_boxed_tensors(&args);
    if (cuda) zpp_op_on_cuda(&args, tensors->count ? &tensors->at[0] : NULL);
    if (zpp_op_check_list(&args, tensors, tensors, ZPP_OP_FLOATS, false) &&
        zpp_boxed_new(&args, ZPP_F64, tensors->count, &sums, &sums_data) &&
        zpp_boxed_new(&args, ZPP_I64, tensors->count, &nonfinite, &nonfinite_data)) {
        run(&args, tensors, sums_data, nonfinite_data);
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

ZPP_OP_BOTH(norm_squares, norm_squares)
