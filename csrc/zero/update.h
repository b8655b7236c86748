/* SPDX-License-Identifier: Apache-2.0
 *
 * The element-wise updates that shards are stepped with, in memory and streamed from files. All of them travel as
 * Adam's segment, because it has the most moments and rates; whoever cuts, moves or reads a segment need not know which
 * it is. A moment that an update has not is NULL:
 *
 *                    exp_avg           exp_avg_sq   max_exp_avg_sq   rates, besides lr, weight_decay and maximize
 *   ADAM             m                 v            where amsgrad    as they are named
 *   LION             momentum          -            -                beta1, beta2
 *   ADAGRAD          -                 sum          -                eps; beta1: lr_decay, beta2: what sum begins with
 *   SGD, NESTEROV    where momentum    -            -                beta1: momentum, beta2: dampening
 *
 * They are what can be stepped chunk by chunk: no element asks for another. LAMB wants norms of whole tensors before
 * its step, Muon whole matrices.
 */
#ifndef ZPP_ZERO_UPDATE_H
#define ZPP_ZERO_UPDATE_H

#include "../ops/adam/adam.h"

/* The field `update` of a segment. */
enum zpp_update {
    ZPP_UPDATE_ADAM,
    ZPP_UPDATE_LION,
    ZPP_UPDATE_ADAGRAD,
    ZPP_UPDATE_SGD,
    ZPP_UPDATE_NESTEROV,
    ZPP_UPDATES
};

/* zpp_adam_step, and its like of the others: same bits as their own (ops/lion, ops/adagrad, ops/sgd). The first step
 * of SGD reads no momentum, that of Adagrad no sum. */
void zpp_update_step(const struct zpp_adam_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool);

#endif
