/* SPDX-License-Identifier: Apache-2.0
 *
 * The element-wise optimizers: Adam, Lion, Adagrad, SGD, Adam with a frozen variance, and 0/1 Adam. All take the same
 * segment, so that code which cuts, moves or streams a segment need not know which optimizer it is for. A state that
 * an optimizer lacks is NULL:
 *
 *                 state[0]          state[1]     state[2]         state[3]   rates besides lr, weight_decay, maximize
 *   ADAM          exp_avg           exp_avg_sq   max_exp_avg_sq   -          beta1, beta2, eps, decoupled_decay
 *   LION          exp_avg           -            -                -          beta1, beta2
 *   ADAGRAD       -                 sum          -                -          lr_decay, eps, init_sum, initial_sum
 *   SGD           momentum_buffer   -            -                -          momentum, dampening, nesterov
 *
 * max_exp_avg_sq is there with amsgrad, momentum_buffer with a momentum. An optimizer belongs here if it can be stepped
 * chunk by chunk, with no element depending on another. LAMB needs norms of whole tensors before its step and Muon
 * whole matrices, so they have drivers of their own.
 */
#ifndef ZPP_OPS_OPTIM_H
#define ZPP_OPS_OPTIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"
#include "../../base/device.h"
#include "../../base/dtype.h"
#include "../../base/pool.h"
#include "../moments/moments.h"

enum zpp_optimizer { ZPP_OPTIM_ADAM, ZPP_OPTIM_LION, ZPP_OPTIM_ADAGRAD, ZPP_OPTIM_SGD, ZPP_OPTIMIZERS };

enum { ZPP_OPTIM_STATES = 4 };

/* One tensor, or one piece of a shard. Pointers need element alignment only. No two segments overlap. Fields that the
 * segment's optimizer does not use are not read. */
struct zpp_optim_segment {
    float *param;     /* fp32 master, read and written */
    const void *grad; /* F32, BF16 or F16 (grad_dtype); read */
    union {           /* fp32, read and written; NULL: the optimizer has no such state, or `moments` holds it */
        float *state[ZPP_OPTIM_STATES];
        struct { float *exp_avg, *exp_avg_sq, *max_exp_avg_sq; };
        struct { float *momentum_buffer, *sum; };
    };
    void *param_out; /* copy of the new param written (F32, BF16 or F16: out_dtype), or NULL */
    size_t elems;
    zpp_dtype grad_dtype, out_dtype;
    unsigned char optimizer; /* enum zpp_optimizer */
    bool maximize;
    bool decoupled_decay; /* Adam: AdamW */
    bool nesterov;        /* SGD */
    bool init_sum;        /* Adagrad: step 1 sets sum to initial_sum before it adds; else sum is initialised already */
    uint64_t step;        /* number of this update of the tensor, from 1; SGD's first writes its buffer unread */
    double lr, weight_decay;
    double beta1, beta2, eps;
    double lr_decay, initial_sum;
    double momentum, dampening;
    struct zpp_moments how; /* all zero: states are fp32, in `state`. Else that is NULL, and they are here: */
    struct zpp_moment moments[3]; /* by enum zpp_moments_which, which are the first three of `state` */
};

/* Step all segments in one call, split over the threads of `pool` (NULL: this thread only). The bits do not depend on
 * the order or the number of segments, nor on the number of threads. grad_scale multiplies every gradient. Never
 * fails. */
void zpp_optim_step(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool);

#endif
