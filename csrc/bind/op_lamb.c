/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.lamb_step_, lamb_step_low_ for moments in bf16 or 8 bits, and lamb_moments_, the first pass alone:
 * read and check lists of tensors, then csrc/ops/lamb. Everything is checked before anything is written.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/lamb/lamb.h"
#include "op_checks.h"
#include "op_entries.h"

struct lists {
    const struct zpp_tensors *params, *grads, *exp_avgs, *exp_avg_sqs;
    const struct zpp_tensors *param_outs;
    const struct zpp_floats *lr, *weight_decay;
    const struct zpp_ints *steps;
    struct zpp_op_low low;
    struct zpp_op_scale scale;
};

static bool check_lists(struct zpp_boxed *args, struct lists *l) {
    const struct zpp_tensors *const written[] = { l->params, l->exp_avgs, l->exp_avg_sqs, l->param_outs,
                                                  l->low.is ? l->low.scales : l->params };
    const unsigned dtypes = l->low.is ? zpp_op_low_dtypes(&l->low, l->exp_avgs) : 1u << ZPP_F32;
    return zpp_op_check_list(args, l->params, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->grads, l->params, ZPP_OP_FLOATS, false) &&
           zpp_op_check_list(args, l->exp_avgs, l->params, dtypes, false) &&
           zpp_op_check_list(args, l->exp_avg_sqs, l->params, dtypes, false) &&
           zpp_op_check_list(args, l->param_outs, l->params, ZPP_OP_FLOATS, true) &&
           (!l->low.is || zpp_op_low_check_scales(args, &l->low, l->params, 2)) &&
           zpp_boxed_check_apart(args, written, l->low.is ? 5 : 4, &l->grads, 1);
}

static bool check_rates(struct zpp_boxed *args, const struct lists *l) {
    return zpp_op_check_steps(args, l->steps, l->params) &&
           zpp_op_check_floats(args, l->lr, l->params, -INFINITY) &&
           zpp_op_check_floats(args, l->weight_decay, l->params, -INFINITY);
}

static bool check_numbers(struct zpp_boxed *args, const struct zpp_lamb_segment *r, const struct zpp_op_scale *scale) {
    const struct zpp_op_rate rates[] = {{"beta1", r->beta1, 0.0, 1.0},
                                        {"beta2", r->beta2, 0.0, 1.0},
                                        {"eps", r->eps, 0.0, INFINITY},
                                        {"trust_least", r->trust_least, 0.0, INFINITY},
                                        {"trust_most", r->trust_most, 0.0, INFINITY}};
    if (!zpp_op_check_rates(args, rates, sizeof rates / sizeof rates[0]) || !zpp_op_check_scale(args, scale))
        return false;
    if (r->trust_least <= r->trust_most) return true;
    return zpp_boxed_fail(args, "trust_least is %g, wanted at most trust_most, %g", r->trust_least, r->trust_most);
}

static void step_on_cpu(struct zpp_boxed *args, const struct zpp_lamb_segment *segments, size_t count,
                        struct zpp_grad_scale scale) {
    struct zpp_err err = ZPP_ERR_INIT;
    float value;
    if (!zpp_grad_scale_read(&scale, &value)) return;
    zpp_pool *pool = zpp_op_pool_take();
    if (zpp_lamb_step(segments, count, value, NULL, pool, &err)) zpp_boxed_fail(args, "%s", err.text);
    zpp_op_pool_give(pool);
}

static void step_on_cuda(struct zpp_boxed *args, const struct zpp_lamb_segment *segments, size_t count,
                         struct zpp_grad_scale scale) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    void *work = NULL;
    AtenTensorHandle memory = NULL;
    if (!zpp_op_find_work(args, &on, zpp_lamb_cuda_work_bytes(segments, count), &memory, &work)) return;
    zpp_op_launched(args, zpp_lamb_step_cuda(on.device, on.native, segments, count, scale, work, &err), &err);
    zpp_torch.aoti_torch_delete_tensor_object(memory);
}

static void fill_moments(struct zpp_lamb_segment *segment, const struct lists *l, size_t i) {
    const struct zpp_tensors *const lists[] = { l->exp_avgs, l->exp_avg_sqs };
    if (!l->low.is) {
        segment->exp_avg = l->exp_avgs->at[i].data;
        segment->exp_avg_sq = l->exp_avg_sqs->at[i].data;
        return;
    }
    segment->how = (struct zpp_moments){ .kind = l->low.kind, .key = zpp_moments_key(l->low.seed, i, segment->step) };
    for (size_t k = 0; k < 2; ++k) {
        segment->moments[k].codes = lists[k]->at[i].data;
        if (l->low.scales->count) segment->moments[k].scales = l->low.scales->at[k * l->params->count + i].data;
    }
}

/* New; free it. NULL, with a message noted, without memory. */
static struct zpp_lamb_segment *segments_of(struct zpp_boxed *args, const struct lists *l,
                                            const struct zpp_lamb_segment *rates) {
    struct zpp_lamb_segment *segments = zpp_op_new_segments(args, l->params->count, sizeof *segments);
    if (!segments) return NULL;
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i] = *rates;
        segments[i].param = l->params->at[i].data;
        segments[i].grad = l->grads->at[i].data;
        segments[i].grad_dtype = l->grads->at[i].dtype;
        segments[i].elems = l->params->at[i].elems;
        segments[i].step = (uint64_t)l->steps->at[i];
        segments[i].weight_decay = zpp_op_float_of(l->weight_decay, i);
        fill_moments(&segments[i], l, i);
    }
    return segments;
}

static void run(struct zpp_boxed *args, const struct lists *l, const struct zpp_lamb_segment *rates) {
    const struct zpp_grad_scale scale = zpp_op_scale_of(&l->scale);
    struct zpp_lamb_segment *segments = segments_of(args, l, rates);
    if (!segments) return;
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i].lr = zpp_op_float_of(l->lr, i);
        if (l->param_outs->count) {
            segments[i].param_out = l->param_outs->at[i].data;
            segments[i].out_dtype = l->param_outs->at[i].dtype;
        }
    }
    if (zpp_op_is_on_cuda(args)) step_on_cuda(args, segments, l->params->count, scale);
    else step_on_cpu(args, segments, l->params->count, scale);
    free(segments);
}

static void lamb(StableIValue *stack, uint64_t inputs, bool cuda, bool low) {
    struct zpp_boxed args;
    struct lists l = { .low.is = low };
    struct zpp_lamb_segment r = { 0 };
    zpp_boxed_begin(&args, low ? ZPP_SCHEMA_zpp_op_lamb_step_low : ZPP_SCHEMA_zpp_op_lamb_step, stack, inputs);
    l.params = zpp_boxed_tensors(&args);
    l.grads = zpp_boxed_tensors(&args);
    l.exp_avgs = zpp_boxed_tensors(&args);
    l.exp_avg_sqs = zpp_boxed_tensors(&args);
    if (low) l.low.scales = zpp_boxed_tensors(&args);
    l.param_outs = zpp_boxed_tensors(&args);
    l.steps = zpp_boxed_ints(&args);
    if (low) l.low.seed = (uint64_t)zpp_boxed_int(&args);
    l.lr = zpp_boxed_floats(&args);
    r.beta1 = zpp_boxed_float(&args);
    r.beta2 = zpp_boxed_float(&args);
    r.eps = zpp_boxed_float(&args);
    l.weight_decay = zpp_boxed_floats(&args);
    r.trust_least = zpp_boxed_float(&args);
    r.trust_most = zpp_boxed_float(&args);
    r.maximize = zpp_boxed_bool(&args);
    l.scale.value = zpp_boxed_float(&args);
    l.scale.at = zpp_boxed_tensors(&args);
    l.scale.skip = zpp_boxed_tensors(&args);
    if (cuda) zpp_op_on_cuda(&args, l.params->count ? &l.params->at[0] : NULL);
    if (check_lists(&args, &l) && check_rates(&args, &l) && check_numbers(&args, &r, &l.scale)) {
        run(&args, &l, &r);
    }
    zpp_boxed_end(&args);
}

static void lamb_step(StableIValue *stack, uint64_t inputs, bool cuda) { lamb(stack, inputs, cuda, false); }
static void lamb_step_low(StableIValue *stack, uint64_t inputs, bool cuda) { lamb(stack, inputs, cuda, true); }

ZPP_OP_BOTH(lamb_step, lamb_step)
ZPP_OP_BOTH(lamb_step_low, lamb_step_low)

/* --- the first pass alone ----------------------------------------------------------------------------------------- */
static bool check_piece_lists(struct zpp_boxed *args, const struct lists *l) {
    const struct zpp_tensors *const written[] = { l->exp_avgs, l->exp_avg_sqs };
    const struct zpp_tensors *const read[] = { l->params, l->grads };
    return zpp_op_check_list(args, l->params, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->grads, l->params, ZPP_OP_FLOATS, false) &&
           zpp_op_check_list(args, l->exp_avgs, l->params, 1u << ZPP_F32, false) &&
           zpp_op_check_list(args, l->exp_avg_sqs, l->params, 1u << ZPP_F32, false) &&
           zpp_boxed_check_apart(args, written, 2, read, 2) && zpp_op_check_steps(args, l->steps, l->params) &&
           zpp_op_check_floats(args, l->weight_decay, l->params, -INFINITY);
}

static void moments_on_cpu(struct zpp_boxed *args, const struct zpp_lamb_segment *segments, size_t count,
                           struct zpp_grad_scale scale, double *sums) {
    struct zpp_err err = ZPP_ERR_INIT;
    float value;
    memset(sums, 0, 2 * count * sizeof *sums);
    if (!zpp_grad_scale_read(&scale, &value)) return;
    zpp_pool *pool = zpp_op_pool_take();
    if (zpp_lamb_norms(segments, count, value, sums, pool, &err)) zpp_boxed_fail(args, "%s", err.text);
    zpp_op_pool_give(pool);
}

static void moments_on_cuda(struct zpp_boxed *args, const struct zpp_lamb_segment *segments, size_t count,
                            struct zpp_grad_scale scale, double *sums) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    void *work = NULL;
    AtenTensorHandle memory = NULL;
    if (!zpp_op_find_work(args, &on, zpp_lamb_cuda_work_bytes(segments, count), &memory, &work)) return;
    zpp_op_launched(args, zpp_lamb_norms_cuda(on.device, on.native, segments, count, scale, sums, work, &err), &err);
    zpp_torch.aoti_torch_delete_tensor_object(memory);
}

static void run_moments(struct zpp_boxed *args, const struct lists *l, const struct zpp_lamb_segment *rates,
                        double *sums) {
    const struct zpp_grad_scale scale = zpp_op_scale_of(&l->scale);
    struct zpp_lamb_segment *segments = segments_of(args, l, rates);
    if (!segments) return;
    if (zpp_op_is_on_cuda(args)) moments_on_cuda(args, segments, l->params->count, scale, sums);
    else moments_on_cpu(args, segments, l->params->count, scale, sums);
    free(segments);
}

static void lamb_moments(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct lists l = { .low.is = false };
    struct zpp_lamb_segment r = { 0 };
    AtenTensorHandle sums = NULL;
    void *data = NULL;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_lamb_moments, stack, inputs);
    l.params = zpp_boxed_tensors(&args);
    l.grads = zpp_boxed_tensors(&args);
    l.exp_avgs = zpp_boxed_tensors(&args);
    l.exp_avg_sqs = zpp_boxed_tensors(&args);
    l.steps = zpp_boxed_ints(&args);
    r.beta1 = zpp_boxed_float(&args);
    r.beta2 = zpp_boxed_float(&args);
    r.eps = zpp_boxed_float(&args);
    l.weight_decay = zpp_boxed_floats(&args);
    r.maximize = zpp_boxed_bool(&args);
    l.scale.value = zpp_boxed_float(&args);
    l.scale.at = zpp_boxed_tensors(&args);
    l.scale.skip = zpp_boxed_tensors(&args);
    if (cuda) zpp_op_on_cuda(&args, l.params->count ? &l.params->at[0] : NULL);
    const int64_t sizes[] = { (int64_t)l.params->count, 2 };
    if (check_piece_lists(&args, &l) && check_numbers(&args, &r, &l.scale) &&
        zpp_boxed_new_sized(&args, ZPP_F64, sizes, 2, &sums, &data)) {
        run_moments(&args, &l, &r, data);
    }
    if (zpp_boxed_ok(&args)) stack[0] = (StableIValue)(uintptr_t)sums;
    else if (sums) zpp_torch.aoti_torch_delete_tensor_object(sums);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(lamb_moments, lamb_moments)
