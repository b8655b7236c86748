/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.lion_step_, adagrad_step_ and sgd_step_, and the same with low_ for states in bf16 or 8 bits: read
 * and check lists of tensors, then csrc/ops. Everything is checked before anything is written.
 */
#include <math.h>
#include <stdlib.h>

#include "../ops/adagrad/adagrad.h"
#include "../ops/lion/lion.h"
#include "../ops/sgd/sgd.h"
#include "op_checks.h"
#include "op_entries.h"
#include "op_low.h"

/* What all three have: `states` may be empty for SGD only. */
struct lists {
    const struct zpp_tensors *params, *grads, *states, *param_outs;
    const struct zpp_floats *lr, *weight_decay;
    const struct zpp_ints *steps; /* of those that count them; NULL in fewer bits, whose places have them */
    struct zpp_op_low low;
    struct zpp_place place; /* where all of them are to be: the cpu (device_index -1), or the first one's CUDA device */
};

static void read_lists(struct zpp_boxed *args, struct lists *l, const char *states, bool steps, bool cuda) {
    l->params = zpp_boxed_tensors(args, "params", true);
    l->grads = zpp_boxed_tensors(args, "grads", false);
    l->states = zpp_boxed_tensors(args, states, true);
    if (l->low.is) l->low.scales = zpp_boxed_tensors(args, "scales", true);
    l->param_outs = zpp_boxed_tensors(args, "param_outs", true);
    if (l->low.is) {
        l->low.places = zpp_boxed_ints(args, "places");
        l->low.seed = (uint64_t)zpp_boxed_int(args);
    } else if (steps) {
        l->steps = zpp_boxed_ints(args, "steps");
    }
    l->place = zpp_boxed_cpu();
    if (cuda) {
        const int32_t index = l->params->count ? l->params->at[0].device_index : 0;
        l->place = (struct zpp_place){ zpp_torch.aoti_torch_device_type_cuda(), index };
    }
}

static bool check_list(struct zpp_boxed *args, const struct lists *l, const struct zpp_tensors *list, unsigned dtypes,
                       bool may_be_empty) {
    if (may_be_empty && list->count == 0) return zpp_boxed_ok(args);
    return zpp_boxed_check_like(args, list, l->params) && zpp_boxed_check(args, list, l->place, dtypes);
}

static bool check_steps(struct zpp_boxed *args, const struct lists *l) {
    if (l->low.is) {
        return zpp_op_low_check_places(args, &l->low, l->params) &&
               zpp_op_low_check_scales(args, l->place, &l->low, l->params, 1);
    }
    return !l->steps || zpp_op_check_steps(args, l->steps, l->params);
}

static bool check_lists(struct zpp_boxed *args, struct lists *l, bool may_lack_states) {
    const struct zpp_tensors *const written[] = { l->params, l->states, l->param_outs,
                                                  l->low.is ? l->low.scales : l->params };
    const unsigned kinds = l->low.is ? zpp_op_low_kinds(&l->low, l->states) : 1u << ZPP_F32;
    return check_list(args, l, l->params, 1u << ZPP_F32, false) &&
           check_list(args, l, l->grads, ZPP_OP_FLOATS, false) &&
           check_list(args, l, l->states, kinds, may_lack_states && !l->low.is) &&
           check_list(args, l, l->param_outs, ZPP_OP_FLOATS, true) && check_steps(args, l) &&
           zpp_boxed_check_apart(args, written, l->low.is ? 4 : 3, &l->grads, 1);
}

static bool check_lr(struct zpp_boxed *args, const struct lists *l, double least) {
    return zpp_op_check_floats(args, l->lr, l->params, least) &&
           zpp_op_check_floats(args, l->weight_decay, l->params, -INFINITY);
}

static uint64_t step_of(const struct lists *l, size_t i) {
    return (uint64_t)(l->low.is ? zpp_op_low_place(&l->low, i, ZPP_OP_LOW_STEP) : l->steps->at[i]);
}

/* Device and torch's current stream of the lists; false with a sentence noted. */
static bool find_cuda(struct zpp_boxed *args, const struct lists *l, zpp_device **device, void **stream,
                      struct zpp_err *err) {
    if (zpp_op_cuda(l->place.device_index, device, stream, err) == ZPP_OK) return true;
    return zpp_boxed_fail(args, "%s", err->text);
}

/* Runs an optimizer's step where its lists are. */
#define RUN_STEP(op, args, l, segments, scale)                                                                     \
    do {                                                                                                           \
        struct zpp_err err = ZPP_ERR_INIT;                                                                         \
        zpp_device *device = NULL;                                                                                 \
        void *stream = NULL;                                                                                       \
        if ((l)->place.device_index < 0) {                                                                         \
            zpp_pool *pool = zpp_op_pool_take();                                                                   \
            zpp_##op##_step(segments, (l)->params->count, scale, pool);                                            \
            zpp_op_pool_give(pool);                                                                                \
        } else if (find_cuda(args, l, &device, &stream, &err) &&                                                   \
                   zpp_##op##_step_cuda(device, stream, segments, (l)->params->count, scale, &err) != ZPP_OK) {    \
            zpp_boxed_fail(args, "%s", err.text);                                                                  \
        }                                                                                                          \
    } while (0)

/* Fields that all kinds of segment have. */
#define FILL_SEGMENT(segment, l, i)                                   \
    do {                                                              \
        (segment)->param = (l)->params->at[i].data;                   \
        (segment)->grad = (l)->grads->at[i].data;                     \
        (segment)->grad_dtype = (l)->grads->at[i].dtype;              \
        (segment)->elems = (l)->params->at[i].elems;                  \
        (segment)->lr = zpp_op_float_of((l)->lr, i);                  \
        (segment)->weight_decay = zpp_op_float_of((l)->weight_decay, i); \
        if ((l)->low.is) {                                            \
            (segment)->how = zpp_op_low_how(&(l)->low, i);            \
            (segment)->moment.codes = (l)->states->at[i].data;        \
            if ((l)->low.scales->count) (segment)->moment.scales = (l)->low.scales->at[i].data; \
        }                                                             \
        if ((l)->param_outs->count) {                                 \
            (segment)->param_out = (l)->param_outs->at[i].data;       \
            (segment)->out_dtype = (l)->param_outs->at[i].dtype;      \
        }                                                             \
    } while (0)

#define RATE_ANY(name, value) { name, value, -INFINITY, INFINITY }
#define RATE_NOT_NEGATIVE(name, value) { name, value, 0.0, INFINITY }
#define RATE_BELOW_ONE(name, value) { name, value, 0.0, 1.0 }
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* --- Lion --------------------------------------------------------------------------------------------------------- */
static void run_lion(struct zpp_boxed *args, const struct lists *l, const struct zpp_lion_segment *rates, float scale) {
    struct zpp_lion_segment *segments = zpp_op_new_segments(args, l->params->count, sizeof *segments);
    if (!segments) return;
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i] = *rates;
        FILL_SEGMENT(&segments[i], l, i);
        if (!l->low.is) segments[i].exp_avg = l->states->at[i].data;
    }
    RUN_STEP(lion, args, l, segments, scale);
    free(segments);
}

static void lion(StableIValue *stack, uint64_t inputs, bool cuda, bool low) {
    struct zpp_boxed args;
    struct lists l = { .low.is = low };
    struct zpp_lion_segment r = { 0 };
    zpp_boxed_begin(&args, "zeropp::lion_step_", stack, inputs); /* both have one door, which knows this name */
    read_lists(&args, &l, "exp_avgs", false, cuda);
    l.lr = zpp_boxed_floats(&args, "lr");
    r.beta1 = zpp_boxed_float(&args);
    r.beta2 = zpp_boxed_float(&args);
    l.weight_decay = zpp_boxed_floats(&args, "weight_decay");
    r.maximize = zpp_boxed_bool(&args);
    const double grad_scale = zpp_boxed_float(&args);
    const struct zpp_op_rate rates[] = {
        RATE_BELOW_ONE("beta1", r.beta1), RATE_BELOW_ONE("beta2", r.beta2), RATE_ANY("grad_scale", grad_scale) };
    if (check_lists(&args, &l, false) && check_lr(&args, &l, 0.0) && zpp_op_check_rates(&args, rates, COUNT(rates))) {
        run_lion(&args, &l, &r, (float)grad_scale);
    }
    zpp_boxed_end(&args);
}

static void lion_step(StableIValue *stack, uint64_t inputs, bool cuda) { lion(stack, inputs, cuda, false); }
static void lion_step_low(StableIValue *stack, uint64_t inputs, bool cuda) { lion(stack, inputs, cuda, true); }

ZPP_OP_BOTH(lion_step, lion_step)
ZPP_OP_BOTH(lion_step_low, lion_step_low)

/* --- Adagrad ------------------------------------------------------------------------------------------------------ */
static void run_adagrad(struct zpp_boxed *args, const struct lists *l, const struct zpp_adagrad_segment *rates,
                        float scale) {
    struct zpp_adagrad_segment *segments = zpp_op_new_segments(args, l->params->count, sizeof *segments);
    if (!segments) return;
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i] = *rates;
        FILL_SEGMENT(&segments[i], l, i);
        if (!l->low.is) segments[i].sum = l->states->at[i].data;
        segments[i].step = step_of(l, i);
    }
    RUN_STEP(adagrad, args, l, segments, scale);
    free(segments);
}

static void adagrad(StableIValue *stack, uint64_t inputs, bool cuda, bool low) {
    struct zpp_boxed args;
    struct lists l = { .low.is = low };
    struct zpp_adagrad_segment r = { 0 };
    zpp_boxed_begin(&args, "zeropp::adagrad_step_", stack, inputs);
    read_lists(&args, &l, "state_sums", true, cuda);
    l.lr = zpp_boxed_floats(&args, "lr");
    r.lr_decay = zpp_boxed_float(&args);
    r.eps = zpp_boxed_float(&args);
    l.weight_decay = zpp_boxed_floats(&args, "weight_decay");
    r.maximize = zpp_boxed_bool(&args);
    const double grad_scale = zpp_boxed_float(&args);
    const struct zpp_op_rate rates[] = {
        RATE_NOT_NEGATIVE("lr_decay", r.lr_decay), RATE_NOT_NEGATIVE("eps", r.eps),
        RATE_ANY("grad_scale", grad_scale) };
    if (check_lists(&args, &l, false) && check_lr(&args, &l, -INFINITY) &&
        zpp_op_check_rates(&args, rates, COUNT(rates))) {
        run_adagrad(&args, &l, &r, (float)grad_scale);
    }
    zpp_boxed_end(&args);
}

static void adagrad_step(StableIValue *stack, uint64_t inputs, bool cuda) { adagrad(stack, inputs, cuda, false); }
static void adagrad_step_low(StableIValue *stack, uint64_t inputs, bool cuda) { adagrad(stack, inputs, cuda, true); }

ZPP_OP_BOTH(adagrad_step, adagrad_step)
ZPP_OP_BOTH(adagrad_step_low, adagrad_step_low)

/* --- SGD ---------------------------------------------------------------------------------------------------------- */
static void run_sgd(struct zpp_boxed *args, const struct lists *l, const struct zpp_sgd_segment *rates, float scale) {
    struct zpp_sgd_segment *segments = zpp_op_new_segments(args, l->params->count, sizeof *segments);
    if (!segments) return;
    for (size_t i = 0; i < l->params->count; ++i) {
        segments[i] = *rates;
        FILL_SEGMENT(&segments[i], l, i);
        if (l->states->count && !l->low.is) segments[i].momentum_buffer = l->states->at[i].data;
        segments[i].first = step_of(l, i) == 1;
    }
    RUN_STEP(sgd, args, l, segments, scale);
    free(segments);
}

static bool check_momentum(struct zpp_boxed *args, const struct lists *l, const struct zpp_sgd_segment *r) {
    if (!zpp_boxed_ok(args)) return false;
    if (r->momentum != 0.0 && l->states->count == 0 && l->params->count > 0) {
        return zpp_boxed_fail(args, "momentum is %g and momentum_buffers is empty, wanted one buffer a tensor of "
                              "params", r->momentum);
    }
    if (r->nesterov && (r->momentum <= 0.0 || r->dampening != 0.0)) {
        return zpp_boxed_fail(args, "nesterov with momentum %g and dampening %g, wanted momentum > 0 and dampening 0",
                              r->momentum, r->dampening);
    }
    return true;
}

static void sgd(StableIValue *stack, uint64_t inputs, bool cuda, bool low) {
    struct zpp_boxed args;
    struct lists l = { .low.is = low };
    struct zpp_sgd_segment r = { 0 };
    zpp_boxed_begin(&args, "zeropp::sgd_step_", stack, inputs);
    read_lists(&args, &l, "momentum_buffers", true, cuda);
    l.lr = zpp_boxed_floats(&args, "lr");
    r.momentum = zpp_boxed_float(&args);
    r.dampening = zpp_boxed_float(&args);
    l.weight_decay = zpp_boxed_floats(&args, "weight_decay");
    r.nesterov = zpp_boxed_bool(&args);
    r.maximize = zpp_boxed_bool(&args);
    const double grad_scale = zpp_boxed_float(&args);
    const struct zpp_op_rate rates[] = {
        RATE_NOT_NEGATIVE("momentum", r.momentum), RATE_ANY("dampening", r.dampening),
        RATE_ANY("grad_scale", grad_scale) };
    if (check_lists(&args, &l, true) && check_lr(&args, &l, -INFINITY) &&
        zpp_op_check_rates(&args, rates, COUNT(rates)) &&
        check_momentum(&args, &l, &r)) {
        run_sgd(&args, &l, &r, (float)grad_scale);
    }
    zpp_boxed_end(&args);
}

static void sgd_step(StableIValue *stack, uint64_t inputs, bool cuda) { sgd(stack, inputs, cuda, false); }
static void sgd_step_low(StableIValue *stack, uint64_t inputs, bool cuda) { sgd(stack, inputs, cuda, true); }

ZPP_OP_BOTH(sgd_step, sgd_step)
ZPP_OP_BOTH(sgd_step_low, sgd_step_low)
