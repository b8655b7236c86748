/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.moe_*: read and check tensors, then csrc/ops/moe. Numbers of tokens follow from the tensors, so that
 * no argument is a symbolic size; everything is checked before anything is written.
 */
#include <stdio.h>

#include "../ops/moe/moe.h"
#include "op_checks.h"
#include "op_entries.h"

enum { RESULTS = 4, OF_BYTES = 96 };

/* New tensors, given to the stack in this order, or dropped where the call fails. */
struct results {
    AtenTensorHandle handles[RESULTS];
    int count;
};

static void *new_result(struct zpp_boxed *args, struct results *results, zpp_dtype dtype, size_t rows, size_t width) {
    const int64_t sizes[] = { (int64_t)rows, (int64_t)width };
    void *data = NULL;
    AtenTensorHandle made = NULL;
    if (!zpp_boxed_new_sized(args, dtype, sizes, width ? 2 : 1, &made, &data)) return NULL; /* width 0: one dimension */
    results->handles[results->count++] = made;
    return data;
}

static void give_results(struct zpp_boxed *args, const struct results *results) {
    for (int i = 0; i < results->count; ++i) {
        if (zpp_boxed_ok(args)) args->stack[i] = (StableIValue)(uintptr_t)results->handles[i];
        else zpp_torch.aoti_torch_delete_tensor_object(results->handles[i]);
    }
}

static bool check_count(struct zpp_boxed *args, const char *name, int64_t value, int64_t least, int64_t most) {
    if (!zpp_boxed_ok(args)) return false;
    if (value >= least && value <= most) return true;
    return zpp_boxed_fail(args, "%s is %lld, wanted %lld to %lld", name, (long long)value, (long long)least,
                          (long long)most);
}

/* Sizes of a gate: experts from 1, k up to experts. */
static bool check_sizes(struct zpp_boxed *args, int64_t experts, int64_t k) {
    if (!check_count(args, "experts", experts, 1, ZPP_MOE_MAX_EXPERTS)) return false;
    return check_count(args, "k", k, 1, experts < ZPP_MOE_MAX_CHOICES ? experts : ZPP_MOE_MAX_CHOICES);
}

static bool check_whole_rows(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor, size_t width) {
    if (tensor->elems % width == 0) return true;
    return zpp_boxed_fail(args, "%s has %zu elements, wanted rows of %zu", name, tensor->elems, width);
}

static bool check_chosen(struct zpp_boxed *args, const struct zpp_tensor *chosen, int64_t experts) {
    if (zpp_op_is_on_cuda(args)) return zpp_boxed_ok(args); /* moe.h: looking at them would wait */
    const int32_t *at = chosen->data;
    for (size_t a = 0; a < chosen->elems; ++a) {
        if (at[a] >= 0 && at[a] < experts) continue;
        return zpp_boxed_fail(args, "chosen[%zu] is %d, wanted an expert 0 to %lld", a, (int)at[a],
                              (long long)experts - 1);
    }
    return true;
}

/* --- gate --------------------------------------------------------------------------------------------------------- */
static bool check_bias(struct zpp_boxed *args, const struct zpp_tensor *bias, const struct zpp_moe_gate *gate) {
    if (!zpp_op_check_tensor(args, "bias", bias, 1u << ZPP_F32)) return false;
    if (bias->elems == 0 || bias->elems == gate->experts || bias->elems == gate->tokens * gate->experts) return true;
    return zpp_boxed_fail(args, "bias has %zu elements, wanted none, %zu (one an expert) or %zu (as logits)",
                          bias->elems, gate->experts, gate->tokens * gate->experts);
}

struct gate_results {
    float *weights, *losses;
    int32_t *chosen;
    int64_t *counts;
};

static void gate_on_cuda(struct zpp_boxed *args, const struct zpp_moe_gate *gate, const struct gate_results *to) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    void *work = NULL;
    AtenTensorHandle memory = NULL;
    if (!zpp_op_find_work(args, &on, zpp_moe_gate_cuda_work_bytes(gate), &memory, &work)) return;
    zpp_op_launched(args, zpp_moe_gate_cuda(on.device, on.native, gate, to->weights, to->chosen, to->counts,
                                            to->losses, work, &err), &err);
    zpp_torch.aoti_torch_delete_tensor_object(memory);
}

static void run_gate(struct zpp_boxed *args, const struct zpp_moe_gate *gate, const struct gate_results *to) {
    if (!zpp_boxed_ok(args)) return;
    if (zpp_op_is_on_cuda(args)) {
        gate_on_cuda(args, gate, to);
        return;
    }
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool = zpp_op_pool_take();
    zpp_op_launched(args, zpp_moe_gate(gate, to->weights, to->chosen, to->counts, to->losses, pool, &err), &err);
    zpp_op_pool_give(pool);
}

static void gate_op(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct results results = { .count = 0 };
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_moe_gate, stack, inputs);
    const struct zpp_tensor *logits = zpp_boxed_tensor(&args);
    const struct zpp_tensor *bias = zpp_boxed_tensor(&args);
    const int64_t experts = zpp_boxed_int(&args), k = zpp_boxed_int(&args);
    struct zpp_moe_gate gate = { .sigmoid = zpp_boxed_bool(&args) };
    gate.normalise = zpp_boxed_bool(&args);
    if (cuda) zpp_op_on_cuda(&args, logits);
    if (zpp_op_check_tensor(&args, "logits", logits, 1u << ZPP_F32) && check_sizes(&args, experts, k) &&
        check_whole_rows(&args, "logits", logits, (size_t)experts)) {
        gate.experts = (size_t)experts, gate.k = (size_t)k;
        gate.tokens = logits->elems / gate.experts;
        gate.logits = logits->data;
        if (check_bias(&args, bias, &gate)) {
            gate.bias = bias->elems ? bias->data : NULL;
            gate.bias_per_token = bias->elems == logits->elems;
        }
    }
    if (zpp_boxed_ok(&args)) {
        struct gate_results to;
        to.weights = new_result(&args, &results, ZPP_F32, gate.tokens, gate.k);
        to.chosen = new_result(&args, &results, ZPP_I32, gate.tokens, gate.k);
        to.counts = new_result(&args, &results, ZPP_I64, gate.experts, 0);
        to.losses = new_result(&args, &results, ZPP_F32, ZPP_MOE_LOSSES, 0);
        run_gate(&args, &gate, &to);
    }
    give_results(&args, &results);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(moe_gate, gate_op)

static void check_assignments(struct zpp_boxed *args, const struct zpp_moe_gate *gate, const struct zpp_tensor *chosen,
                              const struct zpp_tensor *grad_weights) {
    const size_t assignments = gate->tokens * gate->k;
    char of[OF_BYTES];
    snprintf(of, sizeof of, "%zu tokens with %zu choices", gate->tokens, gate->k);
    if (zpp_op_check_elems(args, "chosen", chosen, 1u << ZPP_I32, assignments, of)) {
        zpp_op_check_elems(args, "grad_weights", grad_weights, 1u << ZPP_F32, assignments, of);
    }
}

static void gate_backward(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct results results = { .count = 0 };
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_moe_gate_backward, stack, inputs);
    const struct zpp_tensor *grad_weights = zpp_boxed_tensor(&args);
    const struct zpp_tensor *grad_losses = zpp_boxed_tensor(&args);
    const struct zpp_tensor *logits = zpp_boxed_tensor(&args);
    const struct zpp_tensor *chosen = zpp_boxed_tensor(&args);
    const struct zpp_tensor *counts = zpp_boxed_tensor(&args);
    const int64_t k = zpp_boxed_int(&args), experts = (int64_t)counts->elems;
    struct zpp_moe_gate gate = { .sigmoid = zpp_boxed_bool(&args) };
    gate.normalise = zpp_boxed_bool(&args);
    if (cuda) zpp_op_on_cuda(&args, logits);
    if (zpp_op_check_tensor(&args, "counts", counts, 1u << ZPP_I64) && check_sizes(&args, experts, k) &&
        zpp_op_check_tensor(&args, "logits", logits, 1u << ZPP_F32) &&
        check_whole_rows(&args, "logits", logits, (size_t)experts)) {
        gate.experts = (size_t)experts, gate.k = (size_t)k;
        gate.tokens = logits->elems / gate.experts;
        gate.logits = logits->data;
        check_assignments(&args, &gate, chosen, grad_weights);
        if (zpp_op_check_elems(&args, "grad_losses", grad_losses, 1u << ZPP_F32, ZPP_MOE_LOSSES, "balance and z")) {
            check_chosen(&args, chosen, experts);
        }
    }
    if (zpp_boxed_ok(&args)) {
        float *grad_logits = new_result(&args, &results, ZPP_F32, gate.tokens, gate.experts);
        struct zpp_op_stream on;
        if (zpp_boxed_ok(&args) && !cuda) {
            zpp_pool *pool = zpp_op_pool_take();
            zpp_moe_gate_backward(&gate, chosen->data, counts->data, grad_weights->data, grad_losses->data,
                                  grad_logits, pool);
            zpp_op_pool_give(pool);
        } else if (zpp_boxed_ok(&args) && zpp_op_find_stream(&args, &on)) {
            struct zpp_err err = ZPP_ERR_INIT;
            zpp_op_launched(&args, zpp_moe_gate_backward_cuda(on.device, on.native, &gate, chosen->data, counts->data,
                                                              grad_weights->data, grad_losses->data, grad_logits,
                                                              &err), &err);
        }
    }
    give_results(&args, &results);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(moe_gate_backward, gate_backward)

/* --- plan --------------------------------------------------------------------------------------------------------- */
static void run_plan(struct zpp_boxed *args, const struct zpp_moe_plan *plan, int32_t *slots, int64_t *kept) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    AtenTensorHandle memory = NULL;
    void *order = NULL;
    if (!zpp_boxed_ok(args)) return;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_op_launched(args, zpp_moe_plan(plan, slots, kept, &err), &err);
    } else if (zpp_op_find_stream(args, &on) &&
               zpp_boxed_new(args, ZPP_I32, plan->seed >= 0 ? plan->tokens + 1 : 1, &memory, &order)) {
        zpp_op_launched(args, zpp_moe_plan_cuda(on.device, on.native, plan, slots, kept, order, &err), &err);
        zpp_torch.aoti_torch_delete_tensor_object(memory);
    }
}

static void plan_op(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct results results = { .count = 0 };
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_moe_plan, stack, inputs);
    const struct zpp_tensor *chosen = zpp_boxed_tensor(&args);
    const int64_t experts = zpp_boxed_int(&args), k = zpp_boxed_int(&args), capacity = zpp_boxed_int(&args);
    struct zpp_moe_plan plan = { .seed = zpp_boxed_int(&args) };
    if (cuda) zpp_op_on_cuda(&args, chosen);
    if (zpp_op_check_tensor(&args, "chosen", chosen, 1u << ZPP_I32) && check_sizes(&args, experts, k) &&
        check_whole_rows(&args, "chosen", chosen, (size_t)k) &&
        check_count(&args, "capacity", capacity, 0, INT32_MAX / experts) &&
        check_count(&args, "assignments", (int64_t)chosen->elems, 0, INT32_MAX) &&
        check_chosen(&args, chosen, experts)) {
        plan.chosen = chosen->data;
        plan.tokens = chosen->elems / (size_t)k;
        plan.experts = (size_t)experts, plan.k = (size_t)k, plan.capacity = (size_t)capacity;
        int32_t *slots = new_result(&args, &results, ZPP_I32, plan.tokens, plan.k);
        int64_t *kept = new_result(&args, &results, ZPP_I64, plan.experts, 0);
        run_plan(&args, &plan, slots, kept);
    }
    give_results(&args, &results);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(moe_plan, plan_op)

/* --- rows --------------------------------------------------------------------------------------------------------- */
struct row_args {
    const struct zpp_tensor *slots, *kept;
    int64_t k, capacity, width;
};

static void read_row_numbers(struct zpp_boxed *args, struct row_args *r) {
    r->k = zpp_boxed_int(args);
    r->capacity = zpp_boxed_int(args);
    r->width = zpp_boxed_int(args);
}

static bool check_slots(struct zpp_boxed *args, const struct zpp_moe_rows *rows) {
    if (zpp_op_is_on_cuda(args)) return zpp_boxed_ok(args);
    const size_t limit = zpp_moe_buffer_rows(rows);
    size_t live = 0, wanted = rows->capacity ? 0 : limit;
    for (size_t a = 0; a < rows->tokens * rows->k; ++a) {
        const int32_t slot = rows->slots[a];
        if (slot < -1 || (slot >= 0 && (size_t)slot >= limit)) {
            return zpp_boxed_fail(args, "slots[%zu] is %d, wanted -1 or a row below %zu", a, (int)slot, limit);
        }
        live += slot >= 0;
    }
    for (size_t e = 0; e < rows->experts && rows->capacity; ++e) {
        if (rows->kept[e] < 0 || (size_t)rows->kept[e] > rows->capacity) {
            return zpp_boxed_fail(args, "kept[%zu] is %lld, wanted 0 to capacity %zu", e, (long long)rows->kept[e],
                                  rows->capacity);
        }
        wanted += (size_t)rows->kept[e];
    }
    if (live == wanted) return true;
    return zpp_boxed_fail(args, "slots has %zu rows that are not dropped, wanted %zu as kept says: take both from one "
                          "moe_plan", live, wanted);
}

/* Everything but the moved tensors themselves. */
static bool check_rows(struct zpp_boxed *args, const struct row_args *r, zpp_dtype dtype, struct zpp_moe_rows *rows) {
    if (!zpp_op_check_tensor(args, "slots", r->slots, 1u << ZPP_I32) ||
        !zpp_op_check_tensor(args, "kept", r->kept, 1u << ZPP_I64)) {
        return false;
    }
    const int64_t experts = (int64_t)r->kept->elems;
    if (!check_sizes(args, experts, r->k) || !check_count(args, "capacity", r->capacity, 0, INT32_MAX / experts) ||
        !check_count(args, "width", r->width, 1, INT32_MAX) ||
        !check_whole_rows(args, "slots", r->slots, (size_t)r->k)) {
        return false;
    }
    *rows = (struct zpp_moe_rows){
        .slots = r->slots->data, .kept = r->kept->data, .tokens = r->slots->elems / (size_t)r->k, .k = (size_t)r->k,
        .experts = (size_t)experts, .capacity = (size_t)r->capacity, .width_elems = (size_t)r->width, .dtype = dtype };
    return check_slots(args, rows);
}

static bool check_moved(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor,
                        const struct zpp_moe_rows *rows, bool buffer) {
    const size_t count = buffer ? zpp_moe_buffer_rows(rows) : rows->tokens;
    char of[OF_BYTES];
    snprintf(of, sizeof of, "%zu %s of width %zu", count, buffer ? "rows of the buffer" : "tokens", rows->width_elems);
    return zpp_op_check_elems(args, name, tensor, 1u << rows->dtype, count * rows->width_elems, of);
}

static bool check_weights(struct zpp_boxed *args, const struct zpp_tensor *weights, const struct zpp_moe_rows *rows,
                          bool may_be_empty) {
    if (may_be_empty && weights->elems == 0) return zpp_op_check_tensor(args, "weights", weights, 1u << ZPP_F32);
    return zpp_op_check_elems(args, "weights", weights, 1u << ZPP_F32, rows->tokens * rows->k, "as slots");
}

/* `out` lies apart from what is read. */
static bool check_out_apart(struct zpp_boxed *args, const struct zpp_tensor *out, const struct zpp_tensor *from,
                            const struct row_args *r, const struct zpp_tensor *weights) {
    const struct zpp_tensors w = zpp_op_one("out", out);
    const struct zpp_tensors reads[] = { zpp_op_one("the tensor read", from), zpp_op_one("slots", r->slots),
                                         zpp_op_one("kept", r->kept), zpp_op_one("weights", weights) };
    const struct zpp_tensors *written = &w, *read[] = { &reads[0], &reads[1], &reads[2], &reads[3] };
    return zpp_boxed_check_apart(args, &written, 1, read, weights ? 4 : 3);
}

static void run_dispatch(struct zpp_boxed *args, const struct zpp_moe_rows *rows, const void *x, void *to) {
    struct zpp_op_stream on;
    if (!zpp_boxed_ok(args)) return;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_moe_dispatch(rows, x, to, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_op_launched(args, zpp_moe_dispatch_cuda(on.device, on.native, rows, x, to, &err), &err);
    }
}

static void dispatch(StableIValue *stack, uint64_t inputs, bool into, bool cuda) {
    struct zpp_boxed boxed, *args = &boxed;
    struct row_args r;
    struct zpp_moe_rows rows;
    struct results results = { .count = 0 };
    const struct zpp_tensor *out = NULL;
    zpp_boxed_begin(args, into ? ZPP_SCHEMA_zpp_op_moe_dispatch_into : ZPP_SCHEMA_zpp_op_moe_dispatch, stack, inputs);
    const struct zpp_tensor *x = zpp_boxed_tensor(args);
    r.slots = zpp_boxed_tensor(args);
    r.kept = zpp_boxed_tensor(args);
    if (into) out = zpp_boxed_tensor(args);
    read_row_numbers(args, &r);
    if (cuda) zpp_op_on_cuda(args, x);
    if (zpp_op_check_tensor(args, "x", x, ZPP_OP_FLOATS) && check_rows(args, &r, x->dtype, &rows) &&
        check_moved(args, "x", x, &rows, false)) {
        void *to = NULL;
        if (!into) to = new_result(args, &results, x->dtype, zpp_moe_buffer_rows(&rows), rows.width_elems);
        else if (check_moved(args, "out", out, &rows, true) && check_out_apart(args, out, x, &r, NULL)) to = out->data;
        run_dispatch(args, &rows, x->data, to);
    }
    give_results(args, &results);
    zpp_boxed_end(args);
}

static void dispatch_new(StableIValue *stack, uint64_t inputs, bool cuda) { dispatch(stack, inputs, false, cuda); }
static void dispatch_into(StableIValue *stack, uint64_t inputs, bool cuda) { dispatch(stack, inputs, true, cuda); }
ZPP_OP_BOTH(moe_dispatch, dispatch_new)
ZPP_OP_BOTH(moe_dispatch_into, dispatch_into)

static void run_combine(struct zpp_boxed *args, const struct zpp_moe_rows *rows, const void *from,
                        const float *weights, void *to) {
    struct zpp_op_stream on;
    if (!zpp_boxed_ok(args)) return;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_moe_combine(rows, from, weights, to, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_op_launched(args, zpp_moe_combine_cuda(on.device, on.native, rows, from, weights, to, &err), &err);
    }
}

static void combine(StableIValue *stack, uint64_t inputs, bool into, bool cuda) {
    struct zpp_boxed boxed, *args = &boxed;
    struct row_args r;
    struct zpp_moe_rows rows;
    struct results results = { .count = 0 };
    const struct zpp_tensor *out = NULL;
    zpp_boxed_begin(args, into ? ZPP_SCHEMA_zpp_op_moe_combine_into : ZPP_SCHEMA_zpp_op_moe_combine, stack, inputs);
    const struct zpp_tensor *from = zpp_boxed_tensor(args);
    r.slots = zpp_boxed_tensor(args);
    r.kept = zpp_boxed_tensor(args);
    const struct zpp_tensor *weights = zpp_boxed_tensor(args);
    if (into) out = zpp_boxed_tensor(args);
    read_row_numbers(args, &r);
    if (cuda) zpp_op_on_cuda(args, from);
    if (zpp_op_check_tensor(args, "rows", from, ZPP_OP_FLOATS) && check_rows(args, &r, from->dtype, &rows) &&
        check_moved(args, "rows", from, &rows, true) && check_weights(args, weights, &rows, true)) {
        void *to = NULL;
        if (!into) to = new_result(args, &results, from->dtype, rows.tokens, rows.width_elems);
        else if (check_moved(args, "out", out, &rows, false) && check_out_apart(args, out, from, &r, weights))
            to = out->data;
        run_combine(args, &rows, from->data, weights->elems ? weights->data : NULL, to);
    }
    give_results(args, &results);
    zpp_boxed_end(args);
}

static void combine_new(StableIValue *stack, uint64_t inputs, bool cuda) { combine(stack, inputs, false, cuda); }
static void combine_into(StableIValue *stack, uint64_t inputs, bool cuda) { combine(stack, inputs, true, cuda); }
ZPP_OP_BOTH(moe_combine, combine_new)
ZPP_OP_BOTH(moe_combine_into, combine_into)

static void combine_backward(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct row_args r;
    struct zpp_moe_rows rows;
    struct results results = { .count = 0 };
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_moe_combine_backward, stack, inputs);
    const struct zpp_tensor *grad = zpp_boxed_tensor(&args);
    const struct zpp_tensor *from = zpp_boxed_tensor(&args);
    r.slots = zpp_boxed_tensor(&args);
    r.kept = zpp_boxed_tensor(&args);
    const struct zpp_tensor *weights = zpp_boxed_tensor(&args);
    read_row_numbers(&args, &r);
    if (cuda) zpp_op_on_cuda(&args, from);
    if (zpp_op_check_tensor(&args, "rows", from, ZPP_OP_FLOATS) && check_rows(&args, &r, from->dtype, &rows) &&
        check_moved(&args, "rows", from, &rows, true) && check_moved(&args, "grad", grad, &rows, false) &&
        check_weights(&args, weights, &rows, false)) {
        void *grad_rows =
            new_result(&args, &results, from->dtype, zpp_moe_buffer_rows(&rows), rows.width_elems);
        float *grad_weights = new_result(&args, &results, ZPP_F32, rows.tokens, rows.k);
        struct zpp_op_stream on;
        if (zpp_boxed_ok(&args) && !cuda) {
            zpp_pool *pool = zpp_op_pool_take();
            zpp_moe_combine_backward(&rows, from->data, weights->data, grad->data, grad_rows, grad_weights, pool);
            zpp_op_pool_give(pool);
        } else if (zpp_boxed_ok(&args) && zpp_op_find_stream(&args, &on)) {
            struct zpp_err err = ZPP_ERR_INIT;
            zpp_op_launched(&args, zpp_moe_combine_backward_cuda(on.device, on.native, &rows, from->data,
                                                                 weights->data, grad->data, grad_rows, grad_weights,
                                                                 &err), &err);
        }
    }
    give_results(&args, &results);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(moe_combine_backward, combine_backward)
