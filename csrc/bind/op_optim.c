/* SPDX-License-Identifier: Apache-2.0
 *
 * The steps of the element-wise optimizers: torch.ops.zeropp.adam_step_, lion_step_, adagrad_step_ and sgd_step_, the
 * same with low_ for states in bf16 or 8 bits, frozen_adam_step_ and zero_one_adam_step_. Each is its schema: arguments
 * are found by their names, checked, and become fields of segments for csrc/ops/optim. Everything is checked before
 * anything is written.
 */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/optim/optim.h"
#include "op_checks.h"
#include "op_entries.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
#define FIELD(name) #name, offsetof(struct zpp_optim_segment, name)

/* Numbers, one for all tensors or one a tensor; wanted least <= value < below. */
static const struct {
    const char *name;
    size_t offset; /* in the segment */
    double least, below;
} rates[] = {
    { FIELD(lr), -INFINITY, INFINITY },        { FIELD(weight_decay), -INFINITY, INFINITY },
    { FIELD(step_size), -INFINITY, INFINITY }, { FIELD(decay), -INFINITY, INFINITY },
    { FIELD(beta1), 0.0, 1.0 },                { FIELD(beta2), 0.0, 1.0 },
    { FIELD(eps), 0.0, INFINITY },             { FIELD(lr_decay), 0.0, INFINITY },
    { FIELD(momentum), 0.0, INFINITY },        { FIELD(dampening), -INFINITY, INFINITY },
};
enum { RATES = COUNT(rates) };

static const struct {
    const char *name;
    size_t offset;
} flags[] = { { FIELD(maximize) }, { FIELD(decoupled_decay) }, { FIELD(nesterov) } };

/* Lists of states, by their place in the segment. */
static const struct {
    const char *name;
    int state;
    bool optional;
} states[] = {
    { "exp_avgs", 0, false },         { "exp_avg_sqs", 1, false }, { "max_exp_avg_sqs", 2, true },
    { "momentum_buffers", 0, true },  { "state_sums", 1, false },  { "moved", 2, true },
    { "anchors", 3, true },
};

struct call {
    enum zpp_optimizer optimizer;
    const struct zpp_tensors *params, *grads, *param_outs;
    const struct zpp_tensors *states[ZPP_OPTIM_STATES]; /* NULL: the optimizer has no such state */
    bool optional[ZPP_OPTIM_STATES];
    const struct zpp_ints *steps, *variance_steps;
    const struct zpp_floats *each[RATES]; /* NULL: the rate is not there, or one number, in `common` */
    bool given[RATES];
    struct zpp_optim_segment common;
    struct zpp_op_scale scale;
    struct zpp_op_low low;
};

static void read_list(struct zpp_boxed *args, const char *name, struct call *call) {
    const struct zpp_tensors *list = zpp_boxed_tensors(args);
    if (strcmp(name, "params") == 0) call->params = list;
    else if (strcmp(name, "grads") == 0) call->grads = list;
    else if (strcmp(name, "param_outs") == 0) call->param_outs = list;
    else if (strcmp(name, "scales") == 0) call->low.scales = list;
    else if (strcmp(name, "grad_scales") == 0) call->scale.at = list;
    else if (strcmp(name, "skips") == 0) call->scale.skip = list;
    for (size_t k = 0; k < COUNT(states); ++k) {
        if (strcmp(name, states[k].name) != 0) continue;
        call->states[states[k].state] = list;
        call->optional[states[k].state] = states[k].optional;
    }
}

static void read_ints(struct zpp_boxed *args, const char *name, struct call *call) {
    const struct zpp_ints *ints = zpp_boxed_ints(args);
    if (strcmp(name, "places") == 0) call->low.places = ints;
    else if (strcmp(name, "variance_steps") == 0) call->variance_steps = ints;
    else call->steps = ints;
}

static size_t rate_named(const char *name) {
    size_t k = 0;
    while (k < RATES && strcmp(name, rates[k].name) != 0) ++k;
    return k;
}

static void set_rate(struct zpp_optim_segment *segment, size_t rate, double value) {
    memcpy((char *)segment + rates[rate].offset, &value, sizeof value);
}

static void read_float(struct zpp_boxed *args, const char *name, struct call *call) {
    const double value = zpp_boxed_float(args);
    const size_t rate = rate_named(name);
    if (rate == RATES) {
        call->scale.value = value;
        return;
    }
    call->given[rate] = true;
    set_rate(&call->common, rate, value);
}

static void read_bool(struct zpp_boxed *args, const char *name, struct call *call) {
    const bool value = zpp_boxed_bool(args);
    for (size_t k = 0; k < COUNT(flags); ++k) {
        if (strcmp(name, flags[k].name) == 0) memcpy((char *)&call->common + flags[k].offset, &value, sizeof value);
    }
}

static void read_argument(struct zpp_boxed *args, const struct zpp_argument *argument, struct call *call) {
    switch (argument->type) {
    case ZPP_ARGUMENT_TENSORS: read_list(args, argument->name, call); return;
    case ZPP_ARGUMENT_INTS: read_ints(args, argument->name, call); return;
    case ZPP_ARGUMENT_FLOATS: call->each[rate_named(argument->name)] = zpp_boxed_floats(args); return;
    case ZPP_ARGUMENT_FLOAT: read_float(args, argument->name, call); return;
    case ZPP_ARGUMENT_BOOL: read_bool(args, argument->name, call); return;
    default: call->low.seed = (uint64_t)zpp_boxed_int(args);
    }
}

static size_t states_count(const struct call *call) {
    size_t count = 0;
    for (int k = 0; k < ZPP_OPTIM_STATES; ++k) count += call->states[k] && call->states[k]->count;
    return count;
}

static bool check_states(struct zpp_boxed *args, struct call *call) {
    unsigned dtypes = 1u << ZPP_F32;
    for (int k = ZPP_OPTIM_STATES - 1; call->low.is && k >= 0; --k) {
        if (call->states[k] && !call->optional[k]) dtypes = zpp_op_low_dtypes(&call->low, call->states[k]);
    }
    if (call->optimizer == ZPP_OPTIM_SGD && call->low.is) dtypes = zpp_op_low_dtypes(&call->low, call->states[0]);
    for (int k = 0; k < ZPP_OPTIM_STATES; ++k) {
        if (!call->states[k]) continue;
        const bool may_be_empty = call->optional[k] && !(call->optimizer == ZPP_OPTIM_SGD && call->low.is);
        if (!zpp_op_check_list(args, call->states[k], call->params, dtypes, may_be_empty)) return false;
    }
    return zpp_boxed_ok(args);
}

static bool check_apart(struct zpp_boxed *args) {
    const struct zpp_tensors *written[ZPP_BOXED_LISTS], *read[ZPP_BOXED_LISTS];
    size_t written_count = 0, read_count = 0;
    for (size_t k = 0; k < args->lists_count; ++k) {
        if (args->lists[k].write) written[written_count++] = &args->lists[k];
        else read[read_count++] = &args->lists[k];
    }
    return zpp_boxed_check_apart(args, written, written_count, read, read_count);
}

static bool check_steps(struct zpp_boxed *args, const struct call *call) {
    if (call->steps && !zpp_op_check_steps(args, call->steps, call->params)) return false;
    if (call->variance_steps && !zpp_op_check_steps(args, call->variance_steps, call->params)) return false;
    if (!call->low.is) return zpp_boxed_ok(args);
    return (!call->low.places || zpp_op_low_check_places(args, &call->low, call->params)) &&
           zpp_op_low_check_scales(args, &call->low, call->params, states_count(call));
}

static bool check_rates(struct zpp_boxed *args, const struct call *call) {
    for (size_t k = 0; k < RATES; ++k) {
        /* Lion's step takes the sign of the learning rate away. */
        const bool lion_lr = call->optimizer == ZPP_OPTIM_LION && strcmp(rates[k].name, "lr") == 0;
        if (call->each[k] && !zpp_op_check_floats(args, call->each[k], call->params, lion_lr ? 0.0 : rates[k].least)) {
            return false;
        }
        double value;
        memcpy(&value, (const char *)&call->common + rates[k].offset, sizeof value);
        const struct zpp_op_rate rate = { rates[k].name, value, rates[k].least, rates[k].below };
        if (call->given[k] && !zpp_op_check_rates(args, &rate, 1)) return false;
    }
    return zpp_op_check_scale(args, &call->scale);
}

static bool check_momentum(struct zpp_boxed *args, const struct call *call) {
    const struct zpp_optim_segment *common = &call->common;
    if (!zpp_boxed_ok(args)) return false;
    if (call->optimizer != ZPP_OPTIM_SGD) return true;
    if (common->momentum != 0.0 && call->states[0]->count == 0 && call->params->count > 0) {
        return zpp_boxed_fail(args, "momentum is %g and momentum_buffers is empty, wanted one buffer a tensor of "
                              "params", common->momentum);
    }
    if (common->nesterov && (common->momentum <= 0.0 || common->dampening != 0.0)) {
        return zpp_boxed_fail(args, "nesterov with momentum %g and dampening %g, wanted momentum > 0 and dampening 0",
                              common->momentum, common->dampening);
    }
    return true;
}

static bool check(struct zpp_boxed *args, struct call *call) {
    return zpp_op_check_list(args, call->params, call->params, 1u << ZPP_F32, false) &&
           (!call->grads || zpp_op_check_list(args, call->grads, call->params, ZPP_OP_FLOATS, false)) &&
           check_states(args, call) &&
           zpp_op_check_list(args, call->param_outs, call->params, ZPP_OP_FLOATS, true) && check_apart(args) &&
           check_steps(args, call) && check_rates(args, call) && check_momentum(args, call);
}

/* States of the i-th parameter that are not fp32. */
static void fill_moments(struct zpp_optim_segment *segment, const struct call *call, size_t i) {
    segment->how = call->low.places
                       ? zpp_op_low_how(&call->low, i)
                       : (struct zpp_moments){ .kind = call->low.kind,
                                               .key = zpp_moments_key(call->low.seed, i, segment->step) };
    size_t place = 0; /* among the states that are there */
    for (int k = 0; k < 3; ++k) {
        if (!call->states[k] || call->states[k]->count == 0) continue;
        segment->moments[k].codes = call->states[k]->at[i].data;
        if (call->low.scales->count) {
            segment->moments[k].scales = call->low.scales->at[place * call->params->count + i].data;
        }
        ++place;
    }
}

static void fill_tensors(struct zpp_optim_segment *segment, const struct call *call, size_t i) {
    segment->param = call->params->at[i].data;
    segment->elems = call->params->at[i].elems;
    if (call->grads) {
        segment->grad = call->grads->at[i].data;
        segment->grad_dtype = call->grads->at[i].dtype;
    }
    if (call->param_outs->count) {
        segment->param_out = call->param_outs->at[i].data;
        segment->out_dtype = call->param_outs->at[i].dtype;
    }
    for (int k = 0; !call->low.is && k < ZPP_OPTIM_STATES; ++k) {
        if (call->states[k] && call->states[k]->count) segment->state[k] = call->states[k]->at[i].data;
    }
}

static void fill_segment(struct zpp_optim_segment *segment, const struct call *call, size_t i) {
    *segment = call->common;
    segment->optimizer = (unsigned char)call->optimizer;
    fill_tensors(segment, call, i);
    if (call->steps) segment->step = (uint64_t)call->steps->at[i];
    if (call->low.places) segment->step = (uint64_t)zpp_op_low_place(&call->low, i, ZPP_OP_LOW_STEP);
    if (call->variance_steps) segment->variance_step = (uint64_t)call->variance_steps->at[i];
    for (size_t k = 0; k < RATES; ++k) if (call->each[k]) set_rate(segment, k, zpp_op_float_of(call->each[k], i));
    if (call->low.is) fill_moments(segment, call, i);
}

static void run(struct zpp_boxed *args, const struct call *call) {
    const size_t count = call->params->count;
    struct zpp_optim_segment *segments = zpp_op_new_segments(args, count, sizeof *segments);
    struct zpp_op_stream on;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!segments) return;
    for (size_t i = 0; i < count; ++i) fill_segment(&segments[i], call, i);
    const struct zpp_grad_scale scale = zpp_op_scale_of(&call->scale);
    float value;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        if (zpp_grad_scale_read(&scale, &value)) zpp_optim_step(segments, count, value, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        zpp_op_launched(args, zpp_optim_step_cuda(on.device, on.native, segments, count, scale, &err), &err);
    }
    free(segments);
}

static void step(enum zpp_op op, enum zpp_optimizer optimizer, StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct call call = { .optimizer = optimizer };
    zpp_boxed_begin(&args, op, stack, inputs);
    for (size_t k = 0; k < args.schema->count; ++k) read_argument(&args, &args.schema->arguments[k], &call);
    call.low.is = call.low.scales != NULL;
    assert(call.params && call.param_outs); /* every schema here has them */
    if (cuda) zpp_op_on_cuda(&args, call.params->count ? &call.params->at[0] : NULL);
    if (check(&args, &call)) run(&args, &call);
    zpp_boxed_end(&args);
}

#define OPTIMIZER_OP(op, NAME)                                                                     \
    static void op(StableIValue *stack, uint64_t inputs, bool cuda) {                              \
        step(ZPP_SCHEMA_zpp_op_##op, ZPP_OPTIM_##NAME, stack, inputs, cuda);                       \
    }                                                                                              \
    ZPP_OP_BOTH(op, op)

OPTIMIZER_OP(adam_step, ADAM)
OPTIMIZER_OP(adam_step_low, ADAM)
OPTIMIZER_OP(lion_step, LION)
OPTIMIZER_OP(lion_step_low, LION)
OPTIMIZER_OP(adagrad_step, ADAGRAD)
OPTIMIZER_OP(adagrad_step_low, ADAGRAD)
OPTIMIZER_OP(sgd_step, SGD)
OPTIMIZER_OP(sgd_step_low, SGD)
OPTIMIZER_OP(frozen_adam_step, FROZEN)
OPTIMIZER_OP(zero_one_adam_step, ZERO_ONE)
