/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.frozen_adam_step_: read and check lists of tensors, then csrc/ops/frozen. Everything is checked
 * before anything is written.
 */
#include <math.h>
#include <stdlib.h>

#include "../ops/frozen/frozen.h"
#include "op_checks.h"
#include "op_entries.h"

struct lists {
    const struct zpp_tensors *params, *exp_avgs, *exp_avg_sqs, *param_outs;
    const struct zpp_ints *variance_steps;
    const struct zpp_floats *step_size, *decay, *eps;
};

static bool check_lists(struct zpp_boxed *args, const struct lists *l) {
    const struct zpp_tensors *const written[] = { l->params, l->param_outs };
    const struct zpp_tensors *const read[] = { l->exp_avgs, l->exp_avg_sqs };
    return zpp_op_check_list(args, l->params, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->exp_avgs, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->exp_avg_sqs, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->param_outs, l->params, ZPP_OP_FLOATS, true) &&
           zpp_boxed_check_apart(args, written, 2, read, 2) &&
           zpp_op_check_steps(args, l->variance_steps, l->params) &&
           zpp_op_check_floats(args, l->step_size, l->params, -INFINITY) &&
           zpp_op_check_floats(args, l->decay, l->params, -INFINITY) &&
           zpp_op_check_floats(args, l->eps, l->params, 0.0);
}

static void step(struct zpp_boxed *args, const struct zpp_frozen_segment *segments, size_t count) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_frozen_step(segments, count, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        zpp_op_launched(args, zpp_frozen_step_cuda(on.device, on.native, segments, count, &err), &err);
    }
}

static void run(struct zpp_boxed *args, const struct lists *l, double beta2) {
    struct zpp_frozen_segment *segments = zpp_op_new_segments(args, l->params->count, sizeof *segments);
    if (!segments) return;
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i] = (struct zpp_frozen_segment){
            .param = l->params->at[i].data, .exp_avg = l->exp_avgs->at[i].data,
            .exp_avg_sq = l->exp_avg_sqs->at[i].data, .elems = l->params->at[i].elems,
            .variance_step = (uint64_t)l->variance_steps->at[i], .step_size = zpp_op_float_of(l->step_size, i),
            .decay = zpp_op_float_of(l->decay, i), .beta2 = beta2, .eps = zpp_op_float_of(l->eps, i) };
        if (l->param_outs->count) {
            segments[i].param_out = l->param_outs->at[i].data;
            segments[i].out_dtype = l->param_outs->at[i].dtype;
        }
    }
    step(args, segments, l->params->count);
    free(segments);
}

static void frozen_adam_step(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct lists l;
    zpp_boxed_begin(&args, "zeropp::frozen_adam_step_", stack, inputs);
    l.params = zpp_boxed_tensors(&args, "params", true);
    l.exp_avgs = zpp_boxed_tensors(&args, "exp_avgs", false);
    l.exp_avg_sqs = zpp_boxed_tensors(&args, "exp_avg_sqs", false);
    l.param_outs = zpp_boxed_tensors(&args, "param_outs", true);
    l.variance_steps = zpp_boxed_ints(&args, "variance_steps");
    l.step_size = zpp_boxed_floats(&args, "step_size");
    l.decay = zpp_boxed_floats(&args, "decay");
    const double beta2 = zpp_boxed_float(&args);
    l.eps = zpp_boxed_floats(&args, "eps");
    const struct zpp_op_rate rate = { "beta2", beta2, 0.0, 1.0 };
    if (cuda) zpp_op_on_cuda(&args, l.params->count ? &l.params->at[0] : NULL);
    if (check_lists(&args, &l) && zpp_op_check_rates(&args, &rate, 1)) run(&args, &l, beta2);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(frozen_adam_step, frozen_adam_step)
