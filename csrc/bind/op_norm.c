/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.norm_squares: sum of squares (float64) and number of non-finite elements (int64) of each tensor.
 */
#include <stdlib.h>

#include "../ops/norm/norm.h"
#include "boxed.h"
#include "op_entries.h"

static const unsigned FLOATS = 1u << ZPP_F32 | 1u << ZPP_BF16 | 1u << ZPP_F16;

static void run(struct zpp_boxed *args, const struct zpp_tensors *tensors, double *sums, uint64_t *nonfinite) {
    struct zpp_norm_segment *segments = malloc((tensors->count + 1) * sizeof *segments);
    if (!segments) {
        zpp_boxed_fail(args, "no memory for %zu segments", tensors->count);
        return;
    }
    for (size_t i = 0; i < tensors->count; ++i) {
        const struct zpp_tensor *tensor = &tensors->at[i];
        segments[i] = (struct zpp_norm_segment){ tensor->data, tensor->dtype, tensor->elems };
    }
    zpp_pool *pool = zpp_op_pool_take();
    zpp_norm_squares(segments, tensors->count, sums, nonfinite, pool);
    zpp_op_pool_give(pool);
    free(segments);
}

void zpp_op_norm_squares(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    struct zpp_boxed args;
    AtenTensorHandle sums = NULL, nonfinite = NULL;
    void *sums_data = NULL, *nonfinite_data = NULL;
    zpp_boxed_begin(&args, "zeropp::norm_squares", stack, inputs);
    const struct zpp_tensors *tensors = zpp_boxed_tensors(&args, "tensors", false);
    if (zpp_boxed_check(&args, tensors, zpp_boxed_cpu(), FLOATS) &&
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
