/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.onebit_lamb_fresh_: read and check lists of tensors, then csrc/ops/onebit_lamb. Everything is
 * checked before anything is written.
 */
#include <math.h>
#include <stdlib.h>

#include "../ops/onebit_lamb/onebit_lamb.h"
#include "op_checks.h"
#include "op_entries.h"

struct lists {
    const struct zpp_tensors *params, *exp_avgs, *befores, *exp_avg_sqs, *fresh_sqs;
    const struct zpp_ints *steps;
    const struct zpp_floats *coefficient, *eps, *weight_decay;
};

struct results {
    AtenTensorHandle sums, largest;
    void *sums_data, *largest_data;
};

static bool check_coefficients(struct zpp_boxed *args, const struct lists *l) {
    if (!zpp_op_check_floats(args, l->coefficient, l->params, 0.0)) return false;
    for (size_t i = 0; i < l->coefficient->count; ++i) {
        if (l->coefficient->at[i] == 0.0) return zpp_boxed_fail(args, "coefficient is 0, wanted coefficient > 0");
    }
    return true;
}

static bool check_lists(struct zpp_boxed *args, const struct lists *l) {
    const struct zpp_tensors *const read[] = { l->params, l->exp_avgs, l->befores, l->exp_avg_sqs };
    for (size_t k = 0; k < 4; ++k) {
        if (!zpp_op_check_list(args, read[k], l->params, 1u << ZPP_F32, false)) return false;
    }
    return zpp_op_check_list(args, l->fresh_sqs, l->params, 1u << ZPP_F32, false) &&
           zpp_boxed_check_apart(args, &l->fresh_sqs, 1, read, 4) && zpp_op_check_steps(args, l->steps, l->params) &&
           check_coefficients(args, l) && zpp_op_check_floats(args, l->eps, l->params, 0.0) &&
           zpp_op_check_floats(args, l->weight_decay, l->params, -INFINITY);
}

static bool check_numbers(struct zpp_boxed *args, const struct zpp_onebit_lamb_segment *r, int64_t freeze_step) {
    const struct zpp_op_rate rates[] = { { "beta1", r->beta1, 0.0, 1.0 }, { "beta2", r->beta2, 0.0, 1.0 } };
    if (!zpp_op_check_rates(args, rates, 2)) return false;
    if (freeze_step >= 1) return true;
    return zpp_boxed_fail(args, "freeze_step is %lld, wanted freeze_step >= 1", (long long)freeze_step);
}

static void run_on_cpu(struct zpp_boxed *args, const struct zpp_onebit_lamb_segment *segments, size_t count,
                       const struct results *to) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool = zpp_op_pool_take();
    if (zpp_onebit_lamb_fresh(segments, count, to->sums_data, to->largest_data, pool, &err)) {
        zpp_boxed_fail(args, "%s", err.text);
    }
    zpp_op_pool_give(pool);
}

static void run_on_cuda(struct zpp_boxed *args, const struct zpp_onebit_lamb_segment *segments, size_t count,
                        const struct results *to) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    void *work = NULL;
    AtenTensorHandle memory = NULL;
    if (!zpp_op_find_work(args, &on, zpp_onebit_lamb_cuda_work_bytes(segments, count), &memory, &work)) return;
    zpp_op_launched(args, zpp_onebit_lamb_fresh_cuda(on.device, on.native, segments, count, to->sums_data,
                                                     to->largest_data, work, &err), &err);
    zpp_torch.aoti_torch_delete_tensor_object(memory);
}

static void run(struct zpp_boxed *args, const struct lists *l, const struct zpp_onebit_lamb_segment *rates,
                const struct results *to) {
    struct zpp_onebit_lamb_segment *segments = zpp_op_new_segments(args, l->params->count, sizeof *segments);
    if (!segments) return;
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i] = *rates;
        segments[i].param = l->params->at[i].data;
        segments[i].exp_avg = l->exp_avgs->at[i].data;
        segments[i].before = l->befores->at[i].data;
        segments[i].exp_avg_sq = l->exp_avg_sqs->at[i].data;
        segments[i].fresh_sq = l->fresh_sqs->at[i].data;
        segments[i].elems = l->params->at[i].elems;
        segments[i].step = (uint64_t)l->steps->at[i];
        segments[i].coefficient = zpp_op_float_of(l->coefficient, i);
        segments[i].eps = zpp_op_float_of(l->eps, i);
        segments[i].weight_decay = zpp_op_float_of(l->weight_decay, i);
    }
    if (zpp_op_is_on_cuda(args)) run_on_cuda(args, segments, l->params->count, to);
    else run_on_cpu(args, segments, l->params->count, to);
    free(segments);
}

static bool new_results(struct zpp_boxed *args, size_t count, struct results *to) {
    const int64_t sizes[] = { (int64_t)count, 2 };
    return zpp_boxed_new_sized(args, ZPP_F64, sizes, 2, &to->sums, &to->sums_data) &&
           zpp_boxed_new(args, ZPP_F32, count, &to->largest, &to->largest_data);
}

static void onebit_lamb_fresh(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct lists l;
    struct zpp_onebit_lamb_segment r = { 0 };
    struct results to = { NULL, NULL, NULL, NULL };
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_onebit_lamb_fresh, stack, inputs);
    l.params = zpp_boxed_tensors(&args);
    l.exp_avgs = zpp_boxed_tensors(&args);
    l.befores = zpp_boxed_tensors(&args);
    l.exp_avg_sqs = zpp_boxed_tensors(&args);
    l.fresh_sqs = zpp_boxed_tensors(&args);
    l.steps = zpp_boxed_ints(&args);
    const int64_t freeze_step = zpp_boxed_int(&args);
    l.coefficient = zpp_boxed_floats(&args);
    r.beta1 = zpp_boxed_float(&args);
    r.beta2 = zpp_boxed_float(&args);
    l.eps = zpp_boxed_floats(&args);
    l.weight_decay = zpp_boxed_floats(&args);
    r.freeze_step = (uint64_t)freeze_step;
    if (cuda) zpp_op_on_cuda(&args, l.params->count ? &l.params->at[0] : NULL);
    if (check_lists(&args, &l) && check_numbers(&args, &r, freeze_step) &&
        new_results(&args, l.params->count, &to)) {
        run(&args, &l, &r, &to);
    }
    if (zpp_boxed_ok(&args)) {
        stack[0] = (StableIValue)(uintptr_t)to.sums;
        stack[1] = (StableIValue)(uintptr_t)to.largest;
    } else {
        if (to.sums) zpp_torch.aoti_torch_delete_tensor_object(to.sums);
        if (to.largest) zpp_torch.aoti_torch_delete_tensor_object(to.largest);
    }
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(onebit_lamb_fresh, onebit_lamb_fresh)
