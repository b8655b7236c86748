/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.adam_step_, and adam_step_low_ for moments in bf16 or 8 bits: read and check lists of tensors, then
 * csrc/ops/adam. Everything is checked before anything is written.
 */
#include <math.h>
#include <stdlib.h>

#include "../ops/adam/adam.h"
#include "../ops/adam/adam_low_cuda.h"
#include "op_checks.h"
#include "op_entries.h"
#include "op_low.h"

static const unsigned FLOATS = 1u << ZPP_F32 | 1u << ZPP_BF16 | 1u << ZPP_F16;

struct lists {
    const struct zpp_tensors *params, *grads, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs, *param_outs;
    const struct zpp_floats *lr, *weight_decay;
    const struct zpp_ints *steps;
    struct zpp_place place; /* where all of them must be */
    struct zpp_op_low low;  /* adam_step_low_ */
};

static bool check_list(struct zpp_boxed *args, const struct zpp_tensors *list, const struct lists *l, unsigned dtypes,
                       bool may_be_empty) {
    if (may_be_empty && list->count == 0) return zpp_boxed_ok(args);
    return zpp_boxed_check_like(args, list, l->params) && zpp_boxed_check(args, list, l->place, dtypes);
}

static bool check_tensors(struct zpp_boxed *args, struct lists *l) {
    const struct zpp_tensors *const written[] = { l->params, l->exp_avgs, l->exp_avg_sqs, l->max_exp_avg_sqs,
                                                  l->param_outs, l->low.is ? l->low.scales : l->params };
    const unsigned kinds = l->low.is ? zpp_op_low_kinds(&l->low, l->exp_avgs) : 1u << ZPP_F32;
    const size_t moments = l->max_exp_avg_sqs->count ? 3 : 2;
    return check_list(args, l->params, l, 1u << ZPP_F32, false) &&
           check_list(args, l->grads, l, FLOATS, false) &&
           check_list(args, l->exp_avgs, l, kinds, false) &&
           check_list(args, l->exp_avg_sqs, l, kinds, false) &&
           check_list(args, l->max_exp_avg_sqs, l, kinds, true) &&
           check_list(args, l->param_outs, l, FLOATS, true) &&
           (!l->low.is || zpp_op_low_check_scales(args, l->place, &l->low, l->params, moments)) &&
           zpp_boxed_check_apart(args, written, l->low.is ? 6 : 5, &l->grads, 1);
}

static bool check_steps(struct zpp_boxed *args, const struct lists *l) {
    if (l->steps->count != l->params->count) {
        return zpp_boxed_fail(args, "steps has %zu numbers, wanted %zu as params has tensors", l->steps->count,
                              l->params->count);
    }
    for (size_t i = 0; i < l->steps->count; ++i) {
        if (l->steps->at[i] >= 1) continue;
        return zpp_boxed_fail(args, "steps[%zu] is %lld, wanted the number of this update, counted from 1", i,
                              (long long)l->steps->at[i]);
    }
    return true;
}

static bool check_numbers(struct zpp_boxed *args, const struct lists *l, const struct zpp_optim_segment *rates,
                          double grad_scale) {
    if (!zpp_op_check_floats(args, l->lr, l->params, -INFINITY)) return false;
    if (!zpp_op_check_floats(args, l->weight_decay, l->params, -INFINITY)) return false;
    const struct { const char *name; double value; } betas[] = { { "beta1", rates->beta1 }, { "beta2", rates->beta2 } };
    for (int b = 0; b < 2; ++b) {
        if (betas[b].value >= 0.0 && betas[b].value < 1.0) continue;
        return zpp_boxed_fail(args, "%s is %g, wanted 0 <= %s < 1", betas[b].name, betas[b].value, betas[b].name);
    }
    if (!(rates->eps >= 0.0)) return zpp_boxed_fail(args, "eps is %g, wanted eps >= 0", rates->eps);
    if (!isfinite(grad_scale)) return zpp_boxed_fail(args, "grad_scale is %g, wanted a finite number", grad_scale);
    return zpp_boxed_ok(args);
}

/* Moments of the i-th parameter where they are not fp32. */
static void fill_moments(struct zpp_optim_segment *segment, const struct lists *l, size_t i) {
    const struct zpp_tensors *const lists[] = { l->exp_avgs, l->exp_avg_sqs, l->max_exp_avg_sqs };
    segment->how = (struct zpp_moments){ .kind = l->low.kind, .key = zpp_moments_key(l->low.seed, i, segment->step) };
    for (size_t k = 0; k < 3 && lists[k]->count; ++k) {
        segment->moments[k].codes = lists[k]->at[i].data;
        if (l->low.scales->count) segment->moments[k].scales = l->low.scales->at[k * l->params->count + i].data;
    }
}

static void fill_segments(struct zpp_optim_segment *segments, const struct lists *l,
                          const struct zpp_optim_segment *rates) {
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i] = *rates;
        segments[i].param = l->params->at[i].data;
        segments[i].grad = l->grads->at[i].data;
        segments[i].grad_dtype = l->grads->at[i].dtype;
        segments[i].step = (uint64_t)l->steps->at[i];
        segments[i].lr = zpp_op_float_of(l->lr, i);
        segments[i].weight_decay = zpp_op_float_of(l->weight_decay, i);
        if (l->low.is) {
            fill_moments(&segments[i], l, i);
        } else {
            segments[i].exp_avg = l->exp_avgs->at[i].data;
            segments[i].exp_avg_sq = l->exp_avg_sqs->at[i].data;
            if (l->max_exp_avg_sqs->count) segments[i].max_exp_avg_sq = l->max_exp_avg_sqs->at[i].data;
        }
        if (l->param_outs->count) {
            segments[i].param_out = l->param_outs->at[i].data;
            segments[i].out_dtype = l->param_outs->at[i].dtype;
        }
        segments[i].elems = l->params->at[i].elems;
    }
}

static void step_on_cpu(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale) {
    zpp_pool *pool = zpp_op_pool_take();
    zpp_adam_step(segments, segments_count, grad_scale, pool);
    zpp_op_pool_give(pool);
}

static void step_on_cuda(struct zpp_boxed *args, int32_t index, const struct zpp_optim_segment *segments,
                         size_t segments_count, float grad_scale) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = NULL;
    void *stream = NULL;
    zpp_status status = zpp_op_cuda(index, &device, &stream, &err);
    const bool low = segments_count && segments[0].how.kind != ZPP_MOMENTS_F32; /* all are alike */
    if (status == ZPP_OK && low) {
        status = zpp_adam_low_step_cuda(device, stream, segments, segments_count, grad_scale, &err);
    } else if (status == ZPP_OK) {
        status = zpp_adam_step_cuda(device, stream, segments, segments_count, grad_scale, &err);
    }
    if (status != ZPP_OK) zpp_boxed_fail(args, "%s", err.text);
}

static void run(struct zpp_boxed *args, const struct lists *l, const struct zpp_optim_segment *rates, float grad_scale) {
    const size_t count = l->params->count;
    struct zpp_optim_segment *segments = malloc((count + 1) * sizeof *segments);
    if (!segments) {
        zpp_boxed_fail(args, "no memory for %zu segments", count);
        return;
    }
    fill_segments(segments, l, rates);
    if (l->place.device_index < 0) step_on_cpu(segments, count, grad_scale);
    else step_on_cuda(args, l->place.device_index, segments, count, grad_scale);
    free(segments);
}

static void adam(StableIValue *stack, uint64_t inputs, bool cuda, bool low) {
    struct zpp_boxed args;
    struct lists l = { .low.is = low };
    struct zpp_optim_segment rates = { 0 };
    zpp_boxed_begin(&args, "zeropp::adam_step_", stack, inputs); /* both have one door, which knows this name */
    l.params = zpp_boxed_tensors(&args, "params", true);
    l.grads = zpp_boxed_tensors(&args, "grads", false);
    l.exp_avgs = zpp_boxed_tensors(&args, "exp_avgs", true);
    l.exp_avg_sqs = zpp_boxed_tensors(&args, "exp_avg_sqs", true);
    l.max_exp_avg_sqs = zpp_boxed_tensors(&args, "max_exp_avg_sqs", true);
    if (low) l.low.scales = zpp_boxed_tensors(&args, "scales", true);
    l.param_outs = zpp_boxed_tensors(&args, "param_outs", true);
    l.steps = zpp_boxed_ints(&args, "steps");
    if (low) l.low.seed = (uint64_t)zpp_boxed_int(&args);
    l.lr = zpp_boxed_floats(&args, "lr");
    rates.beta1 = zpp_boxed_float(&args);
    rates.beta2 = zpp_boxed_float(&args);
    rates.eps = zpp_boxed_float(&args);
    l.weight_decay = zpp_boxed_floats(&args, "weight_decay");
    rates.decoupled_decay = zpp_boxed_bool(&args);
    rates.maximize = zpp_boxed_bool(&args);
    const double grad_scale = zpp_boxed_float(&args);
    l.place = zpp_boxed_cpu();
    if (cuda) {
        const int32_t index = l.params->count ? l.params->at[0].device_index : 0;
        l.place = (struct zpp_place){ zpp_torch.aoti_torch_device_type_cuda(), index };
    }
    if (check_tensors(&args, &l) && check_steps(&args, &l) && check_numbers(&args, &l, &rates, grad_scale)) {
        run(&args, &l, &rates, (float)grad_scale);
    }
    zpp_boxed_end(&args);
}

static void adam_step(StableIValue *stack, uint64_t inputs, bool cuda) { adam(stack, inputs, cuda, false); }
static void adam_step_low(StableIValue *stack, uint64_t inputs, bool cuda) { adam(stack, inputs, cuda, true); }

ZPP_OP_BOTH(adam_step, adam_step)
ZPP_OP_BOTH(adam_step_low, adam_step_low)
