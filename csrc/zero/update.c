/* SPDX-License-Identifier: Apache-2.0
 *
 * From Adam's segments to those of the other updates, some at a time. See update.h.
 */
#include "update.h"

#include <assert.h>

#include "../ops/adagrad/adagrad.h"
#include "../ops/lion/lion.h"
#include "../ops/sgd/sgd.h"

enum { BATCH = 64 }; /* on the stack; enough to keep the threads of a pool busy */

static struct zpp_lion_segment lion_of(const struct zpp_adam_segment *s) {
    return (struct zpp_lion_segment){
        .param = s->param, .grad = s->grad, .exp_avg = s->exp_avg, .param_out = s->param_out, .elems = s->elems,
        .grad_dtype = s->grad_dtype, .out_dtype = s->out_dtype, .lr = s->lr, .beta1 = s->beta1, .beta2 = s->beta2,
        .weight_decay = s->weight_decay, .maximize = s->maximize };
}

static struct zpp_adagrad_segment adagrad_of(const struct zpp_adam_segment *s) {
    for (size_t i = 0; s->step == 1 && i < s->elems; i++) s->exp_avg_sq[i] = (float)s->beta2;
    return (struct zpp_adagrad_segment){
        .param = s->param, .grad = s->grad, .sum = s->exp_avg_sq, .param_out = s->param_out, .elems = s->elems,
        .grad_dtype = s->grad_dtype, .out_dtype = s->out_dtype, .step = s->step, .lr = s->lr, .lr_decay = s->beta1,
        .eps = s->eps, .weight_decay = s->weight_decay, .maximize = s->maximize };
}

static struct zpp_sgd_segment sgd_of(const struct zpp_adam_segment *s) {
    return (struct zpp_sgd_segment){
        .param = s->param, .grad = s->grad, .momentum_buffer = s->exp_avg, .param_out = s->param_out,
        .elems = s->elems, .grad_dtype = s->grad_dtype, .out_dtype = s->out_dtype, .lr = s->lr,
        .momentum = s->beta1, .dampening = s->beta2, .weight_decay = s->weight_decay,
        .nesterov = s->update == ZPP_UPDATE_NESTEROV, .maximize = s->maximize, .first = s->step == 1 };
}

static void step_lion(const struct zpp_adam_segment *segments, size_t count, float grad_scale, zpp_pool *pool) {
    struct zpp_lion_segment batch[BATCH];
    for (size_t i = 0; i < count; i++) batch[i] = lion_of(&segments[i]);
    zpp_lion_step(batch, count, grad_scale, pool);
}

static void step_adagrad(const struct zpp_adam_segment *segments, size_t count, float grad_scale, zpp_pool *pool) {
    struct zpp_adagrad_segment batch[BATCH];
    for (size_t i = 0; i < count; i++) batch[i] = adagrad_of(&segments[i]);
    zpp_adagrad_step(batch, count, grad_scale, pool);
}

static void step_sgd(const struct zpp_adam_segment *segments, size_t count, float grad_scale, zpp_pool *pool) {
    struct zpp_sgd_segment batch[BATCH];
    for (size_t i = 0; i < count; i++) batch[i] = sgd_of(&segments[i]);
    zpp_sgd_step(batch, count, grad_scale, pool);
}

static const struct update {
    void (*step)(const struct zpp_adam_segment *segments, size_t count, float grad_scale, zpp_pool *pool);
    size_t batch; /* segments of a call, at most */
} updates[ZPP_UPDATES] = {
    [ZPP_UPDATE_ADAM] = { zpp_adam_step, SIZE_MAX },
    [ZPP_UPDATE_LION] = { step_lion, BATCH },
    [ZPP_UPDATE_ADAGRAD] = { step_adagrad, BATCH },
    [ZPP_UPDATE_SGD] = { step_sgd, BATCH },
    [ZPP_UPDATE_NESTEROV] = { step_sgd, BATCH },
};

void zpp_update_step(const struct zpp_adam_segment *segments, size_t segments_count, float grad_scale,
                     zpp_pool *pool) {
    for (size_t at = 0, run; at < segments_count; at += run) {
        const struct zpp_adam_segment *first = &segments[at];
        assert(first->update < ZPP_UPDATES);
        const struct update *update = &updates[first->update];
        const size_t left = segments_count - at, most = left < update->batch ? left : update->batch;
        for (run = 1; run < most && first[run].update == first->update; run++) {}
        update->step(first, run, grad_scale, pool);
    }
}
