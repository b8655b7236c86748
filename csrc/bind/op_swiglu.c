/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.swiglu*: read and check tensors, then csrc/ops/moe. The forms that end in _ write to memory of the
 * caller.
 */
#include <stdio.h>

#include "../ops/moe/moe.h"
#include "op_checks.h"
#include "op_entries.h"

struct swiglu {
    size_t rows, inner;
    zpp_dtype dtype;
};

static bool check_gate_up(struct zpp_boxed *args, const struct zpp_tensor *gate_up, int64_t inner, struct swiglu *out) {
    if (!zpp_op_check_tensor(args, "gate_up", gate_up, ZPP_OP_FLOATS)) return false;
    if (inner < 1 || gate_up->elems % (2 * (size_t)inner))
        return zpp_boxed_fail(args, "gate_up has %zu elements and inner is %lld, wanted rows of 2 inner, at least 2",
                              gate_up->elems, (long long)inner);
    *out = (struct swiglu){gate_up->elems / (2 * (size_t)inner), (size_t)inner, gate_up->dtype};
    return true;
}

static bool check_rows(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor,
                       const struct swiglu *rows, size_t width) {
    char of[96];
    snprintf(of, sizeof of, "%zu rows of %zu", rows->rows, width);
    return zpp_op_check_elems(args, name, tensor, 1u << rows->dtype, rows->rows * width, of);
}

/* A new tensor, or the memory of the caller's. */
static void *result(struct zpp_boxed *args, const char *name, const struct zpp_tensor *into, const struct swiglu *rows,
                    size_t width, AtenTensorHandle *made) {
    const int64_t sizes[] = {(int64_t)rows->rows, (int64_t)width};
    void *data = NULL;
    if (into) return check_rows(args, name, into, rows, width) ? into->data : NULL;
    return zpp_boxed_new_sized(args, rows->dtype, sizes, 2, made, &data) ? data : NULL;
}

static void give(struct zpp_boxed *args, const AtenTensorHandle *made, int count) {
    for (int i = 0; i < count; ++i) {
        if (!made[i]) continue;
        if (zpp_boxed_ok(args)) args->stack[i] = (StableIValue)(uintptr_t)made[i];
        else zpp_torch.aoti_torch_delete_tensor_object(made[i]);
    }
}

static void forward(StableIValue *stack, uint64_t inputs, bool into) {
    struct zpp_boxed args;
    struct swiglu rows = {0};
    AtenTensorHandle made = NULL;
    zpp_boxed_begin(&args, into ? ZPP_SCHEMA_zpp_op_swiglu_into : ZPP_SCHEMA_zpp_op_swiglu, stack, inputs);
    const struct zpp_tensor *gate_up = zpp_boxed_tensor(&args);
    const struct zpp_tensor *out = into ? zpp_boxed_tensor(&args) : NULL;
    if (check_gate_up(&args, gate_up, zpp_boxed_int(&args), &rows)) {
        void *to = result(&args, "out", out, &rows, rows.inner, &made);
        zpp_pool *pool = zpp_op_pool_take();
        if (zpp_boxed_ok(&args)) zpp_moe_swiglu(gate_up->data, to, rows.rows, rows.inner, rows.dtype, pool);
        zpp_op_pool_give(pool);
    }
    give(&args, &made, 1);
    zpp_boxed_end(&args);
}

void zpp_op_swiglu(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    forward(stack, inputs, false);
}

void zpp_op_swiglu_into(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    forward(stack, inputs, true);
}

static void backward(StableIValue *stack, uint64_t inputs, bool into) {
    struct zpp_boxed args;
    struct swiglu rows = {0};
    AtenTensorHandle made[2] = {NULL, NULL};
    zpp_boxed_begin(&args, into ? ZPP_SCHEMA_zpp_op_swiglu_backward_into : ZPP_SCHEMA_zpp_op_swiglu_backward, stack,
                    inputs);
    const struct zpp_tensor *grad = zpp_boxed_tensor(&args);
    const struct zpp_tensor *gate_up = zpp_boxed_tensor(&args);
    const struct zpp_tensor *grad_gate_up = into ? zpp_boxed_tensor(&args) : NULL;
    const struct zpp_tensor *out = into ? zpp_boxed_tensor(&args) : NULL;
    if (check_gate_up(&args, gate_up, zpp_boxed_int(&args), &rows) &&
        check_rows(&args, "grad", grad, &rows, rows.inner)) {
        void *to_grad = result(&args, "grad_gate_up", grad_gate_up, &rows, 2 * rows.inner, &made[0]);
        void *to_out = zpp_boxed_ok(&args) ? result(&args, "out", out, &rows, rows.inner, &made[1]) : NULL;
        zpp_pool *pool = zpp_op_pool_take();
        if (zpp_boxed_ok(&args))
            zpp_moe_swiglu_backward(gate_up->data, grad->data, to_grad, to_out, rows.rows, rows.inner, rows.dtype,
                                    pool);
        zpp_op_pool_give(pool);
    }
    give(&args, made, 2);
    zpp_boxed_end(&args);
}

void zpp_op_swiglu_backward(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    backward(stack, inputs, false);
}

void zpp_op_swiglu_backward_into(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    backward(stack, inputs, true);
}
