/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.zero_one_adam_step_: read and check lists of tensors, then csrc/ops/zero_one. Everything is checked
 * before anything is written.
 */
#include <math.h>
#include <stdlib.h>

#include "../ops/zero_one/zero_one.h"
#include "op_checks.h"
#include "op_entries.h"

struct lists {
    const struct zpp_tensors *params, *grads, *exp_avgs, *exp_avg_sqs, *moved, *anchors, *param_outs;
    const struct zpp_ints *variance_steps;
    const struct zpp_floats *step_size, *decay, *eps;
};

static bool check_lists(struct zpp_boxed *args, const struct lists *l) {
    const struct zpp_tensors *const written[] = { l->params, l->exp_avgs, l->moved, l->anchors, l->param_outs };
    const struct zpp_tensors *const read[] = { l->grads, l->exp_avg_sqs };
    return zpp_op_check_list(args, l->params, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->grads, l->params, ZPP_OP_FLOATS, false) &&
           zpp_op_check_list(args, l->exp_avgs, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->exp_avg_sqs, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->moved, l->params, 1u << ZPP_F32, true) &&
           zpp_op_check_list(args, l->anchors, l->params, 1u << ZPP_F32, true) &&
           zpp_op_check_list(args, l->param_outs, l->params, ZPP_OP_FLOATS, true) &&
           zpp_boxed_check_apart(args, written, 5, read, 2) &&
           zpp_op_check_steps(args, l->variance_steps, l->params) &&
           zpp_op_check_floats(args, l->step_size, l->params, -INFINITY) &&
           zpp_op_check_floats(args, l->decay, l->params, -INFINITY) &&
           zpp_op_check_floats(args, l->eps, l->params, 0.0);
}

static void step(struct zpp_boxed *args, const struct zpp_zero_one_segment *segments, size_t count, float grad_scale) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_zero_one_step(segments, count, grad_scale, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        zpp_op_launched(args, zpp_zero_one_step_cuda(on.device, on.native, segments, count, grad_scale, &err), &err);
    }
}

static void run(struct zpp_boxed *args, const struct lists *l, const struct zpp_zero_one_segment *rates,
                float grad_scale) {
    struct zpp_zero_one_segment *segments = zpp_op_new_segments(args, l->params->count, sizeof *segments);
    if (!segments) return;
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i] = *rates;
        segments[i].param = l->params->at[i].data;
        segments[i].exp_avg = l->exp_avgs->at[i].data;
        segments[i].exp_avg_sq = l->exp_avg_sqs->at[i].data;
        segments[i].grad = l->grads->at[i].data;
        segments[i].grad_dtype = l->grads->at[i].dtype;
        segments[i].elems = l->params->at[i].elems;
        segments[i].variance_step = (uint64_t)l->variance_steps->at[i];
        segments[i].step_size = zpp_op_float_of(l->step_size, i);
        segments[i].decay = zpp_op_float_of(l->decay, i);
        segments[i].eps = zpp_op_float_of(l->eps, i);
        if (l->moved->count) segments[i].moved = l->moved->at[i].data;
        if (l->anchors->count) segments[i].anchor = l->anchors->at[i].data;
        if (l->param_outs->count) {
            segments[i].param_out = l->param_outs->at[i].data;
            segments[i].out_dtype = l->param_outs->at[i].dtype;
        }
    }
    step(args, segments, l->params->count, grad_scale);
    free(segments);
}

static void zero_one_adam_step(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct lists l;
    struct zpp_zero_one_segment r = { 0 };
    zpp_boxed_begin(&args, "zeropp::zero_one_adam_step_", stack, inputs);
    l.params = zpp_boxed_tensors(&args, "params", true);
    l.grads = zpp_boxed_tensors(&args, "grads", false);
    l.exp_avgs = zpp_boxed_tensors(&args, "exp_avgs", true);
    l.exp_avg_sqs = zpp_boxed_tensors(&args, "exp_avg_sqs", false);
    l.moved = zpp_boxed_tensors(&args, "moved", true);
    l.anchors = zpp_boxed_tensors(&args, "anchors", true);
    l.param_outs = zpp_boxed_tensors(&args, "param_outs", true);
    l.variance_steps = zpp_boxed_ints(&args, "variance_steps");
    l.step_size = zpp_boxed_floats(&args, "step_size");
    l.decay = zpp_boxed_floats(&args, "decay");
    r.beta1 = zpp_boxed_float(&args);
    r.beta2 = zpp_boxed_float(&args);
    l.eps = zpp_boxed_floats(&args, "eps");
    const double grad_scale = zpp_boxed_float(&args);
    const struct zpp_op_rate rates[] = { { "beta1", r.beta1, 0.0, 1.0 }, { "beta2", r.beta2, 0.0, 1.0 },
                                         { "grad_scale", grad_scale, -INFINITY, INFINITY } };
    if (cuda) zpp_op_on_cuda(&args, l.params->count ? &l.params->at[0] : NULL);
    if (check_lists(&args, &l) && zpp_op_check_rates(&args, rates, 3)) run(&args, &l, &r, (float)grad_scale);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(zero_one_adam_step, zero_one_adam_step)
