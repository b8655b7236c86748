/* SPDX-License-Identifier: Apache-2.0
 *
 * See optim.h. Runs of segments of one optimizer are converted to the segments of its own driver, some at a time.
 */
#include "optim.h"

#include <assert.h>

#include "../adagrad/adagrad.h"
#include "../adam/adam.h"
#include "../lion/lion.h"
#include "../sgd/sgd.h"

enum { BATCH = 64 }; /* on the stack; enough to keep the threads of a pool busy */

static struct zpp_lion_segment lion_of(const struct zpp_optim_segment *s) {
    return (struct zpp_lion_segment){
        .param = s->param, .grad = s->grad, .exp_avg = s->exp_avg, .param_out = s->param_out, .elems = s->elems,
        .grad_dtype = s->grad_dtype, .out_dtype = s->out_dtype, .lr = s->lr, .beta1 = s->beta1, .beta2 = s->beta2,
        .weight_decay = s->weight_decay, .maximize = s->maximize };
}

static struct zpp_adagrad_segment adagrad_of(const struct zpp_optim_segment *s) {
    for (size_t i = 0; s->init_sum && s->step == 1 && i < s->elems; i++) s->sum[i] = (float)s->initial_sum;
    return (struct zpp_adagrad_segment){
        .param = s->param, .grad = s->grad, .sum = s->sum, .param_out = s->param_out, .elems = s->elems,
        .grad_dtype = s->grad_dtype, .out_dtype = s->out_dtype, .step = s->step, .lr = s->lr, .lr_decay = s->lr_decay,
        .eps = s->eps, .weight_decay = s->weight_decay, .maximize = s->maximize };
}

static struct zpp_sgd_segment sgd_of(const struct zpp_optim_segment *s) {
    return (struct zpp_sgd_segment){
        .param = s->param, .grad = s->grad, .momentum_buffer = s->momentum_buffer, .param_out = s->param_out,
        .elems = s->elems, .grad_dtype = s->grad_dtype, .out_dtype = s->out_dtype, .lr = s->lr,
        .momentum = s->momentum, .dampening = s->dampening, .weight_decay = s->weight_decay,
        .nesterov = s->nesterov, .maximize = s->maximize, .first = s->step == 1 };
}

static void step_lion(const struct zpp_optim_segment *segments, size_t count, float grad_scale, zpp_pool *pool) {
    struct zpp_lion_segment batch[BATCH];
    for (size_t i = 0; i < count; i++) batch[i] = lion_of(&segments[i]);
    zpp_lion_step(batch, count, grad_scale, pool);
}

static void step_adagrad(const struct zpp_optim_segment *segments, size_t count, float grad_scale, zpp_pool *pool) {
    struct zpp_adagrad_segment batch[BATCH];
    for (size_t i = 0; i < count; i++) batch[i] = adagrad_of(&segments[i]);
    zpp_adagrad_step(batch, count, grad_scale, pool);
}

static void step_sgd(const struct zpp_optim_segment *segments, size_t count, float grad_scale, zpp_pool *pool) {
    struct zpp_sgd_segment batch[BATCH];
    for (size_t i = 0; i < count; i++) batch[i] = sgd_of(&segments[i]);
    zpp_sgd_step(batch, count, grad_scale, pool);
}

static const struct driver {
    void (*step)(const struct zpp_optim_segment *segments, size_t count, float grad_scale, zpp_pool *pool);
    size_t batch; /* segments of a call, at most */
} drivers[ZPP_OPTIMIZERS] = {
    [ZPP_OPTIM_ADAM] = { zpp_adam_step, SIZE_MAX },
    [ZPP_OPTIM_LION] = { step_lion, BATCH },
    [ZPP_OPTIM_ADAGRAD] = { step_adagrad, BATCH },
    [ZPP_OPTIM_SGD] = { step_sgd, BATCH },
};

void zpp_optim_step(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale,
                    zpp_pool *pool) {
    for (size_t at = 0, run; at < segments_count; at += run) {
        const struct zpp_optim_segment *first = &segments[at];
        assert(first->optimizer < ZPP_OPTIMIZERS);
        const struct driver *driver = &drivers[first->optimizer];
        const size_t left = segments_count - at, most = left < driver->batch ? left : driver->batch;
        for (run = 1; run < most && first[run].optimizer == first->optimizer; run++) {}
        driver->step(first, run, grad_scale, pool);
    }
}
