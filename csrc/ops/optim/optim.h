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
 *   FROZEN        exp_avg           exp_avg_sq   -                -          step_size, decay, beta2, eps
 *   ZERO_ONE      exp_avg           exp_avg_sq   moved            anchor     step_size, decay, beta1, beta2, eps
 *
 * max_exp_avg_sq is there with amsgrad, momentum_buffer with a momentum, moved and anchor where they are kept. FROZEN
 * (Adam with a frozen variance) reads its states only and has no gradient; ZERO_ONE (0/1 Adam) only reads exp_avg_sq.
 * Both have step_size and decay in place of lr and weight_decay.
 *
 * What does not depend on the element is computed in double and rounded to fp32 once. Every operation on elements
 * rounds once, in the order that the optimizer's header in this folder states. So every CPU level, split and number of
 * threads gives the same bits (a NaN is a NaN: its payload is not promised).
 *
 * An optimizer belongs here if it can be stepped
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
#include "../grad_scale.h"
#include "../moments/moments.h"

enum zpp_optimizer {
#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) ZPP_OPTIM_##NAME,
#include "optimizers.def"
#undef ZPP_OPTIMIZER
    ZPP_OPTIMIZERS
};

enum { ZPP_OPTIM_STATES = 4 };

/* One tensor, or one piece of a shard. Pointers need element alignment only. No two segments overlap. Fields that the
 * segment's optimizer does not use are not read. */
struct zpp_optim_segment {
    float *param;     /* fp32 master, read and written */
    const void *grad; /* F32, BF16 or F16 (grad_dtype); read */
    union {           /* fp32, read and written; NULL: the optimizer has no such state, or `moments` holds it */
        float *state[ZPP_OPTIM_STATES];
        struct { float *exp_avg, *exp_avg_sq, *max_exp_avg_sq; };
        struct { float *momentum_buffer, *sum, *moved, *anchor; };
    };
    void *param_out; /* copy of the new param written (F32, BF16 or F16: out_dtype), or NULL */
    size_t elems;
    zpp_dtype grad_dtype, out_dtype;
    unsigned char optimizer; /* enum zpp_optimizer */
    bool maximize;
    bool decoupled_decay; /* Adam: AdamW */
    bool nesterov;        /* SGD */
    bool init_sum;        /* Adagrad: step 1 sets sum to initial_sum before it adds; else sum is initialised already */
    uint64_t step;          /* number of this update of the tensor, from 1; SGD's first ignores the buffer's value */
    uint64_t variance_step; /* FROZEN, ZERO_ONE: number of updates that exp_avg_sq has had, from 1 */
    double lr, weight_decay;
    double beta1, beta2, eps;
    double lr_decay, initial_sum;
    double momentum, dampening;
    double step_size, decay; /* as a rule lr / (1 - beta1^t), and lr * weight_decay */
    struct zpp_moments how; /* all zero: states are fp32, in `state`. Else that is NULL, and they are here: */
    struct zpp_moment moments[3]; /* by enum zpp_moments_which, which are the first three of `state` */
    uint64_t param_key; /* `param` NULL (Adam on CUDA only): random bits with which param_out is rounded, see below */
};

/* Return elements [begin, begin + elems) of a segment; its states are left as they are. */
struct zpp_optim_segment zpp_optim_part(const struct zpp_optim_segment *whole, size_t begin, size_t elems);
/* The same with the part's states. Of states in 8 bits, `begin` is 0 or the border of a block. */
struct zpp_optim_segment zpp_optim_part_with_states(const struct zpp_optim_segment *whole, size_t begin, size_t elems);

/* Step all segments in one call, split over the threads of `pool` (NULL: this thread only). The bits do not depend on
 * the order or the number of segments, nor on the number of threads. grad_scale multiplies every gradient. Never
 * fails. */
void zpp_optim_step(const struct zpp_optim_segment *segments, size_t segments_count, float grad_scale, zpp_pool *pool);

/* The same with the version of one level, for tests and benchmarks; false, and nothing done, where this machine or
 * build lacks it. */
bool zpp_optim_step_at(enum zpp_cpu_level level, const struct zpp_optim_segment *segments, size_t segments_count,
                       float grad_scale, zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory, which must live until the stream has passed: enqueued on
 * `native` (torch's current stream). All segments are of one optimizer, and their states of one kind. Same bits. Adam
 * also steps parameters without an fp32 copy: `param` is NULL in all segments, and param_out is bf16, which is read
 * and rounded stochastically with param_key (moments.h), as an element of a moment is.
 * The words of `scale`, too, are read when the kernels run. NOT_BUILT without the kernel, DEVICE if a launch fails. */
zpp_status zpp_optim_step_cuda(zpp_device *device, void *native, const struct zpp_optim_segment *segments,
                               size_t segments_count, struct zpp_grad_scale scale, struct zpp_err *err);

/* Adam on one tensor whose parameter, gradient and moments are float64: every operation rounds once, to float64. */
struct zpp_adam_f64_segment {
    struct zpp_optim_segment rates; /* elems, step, lr and what follows it; its pointers are not read */
    double *param;
    const double *grad;
    double *exp_avg, *exp_avg_sq;
    double *max_exp_avg_sq; /* amsgrad only, else NULL */
};
void zpp_adam_step_f64(const struct zpp_adam_f64_segment *segments, size_t segments_count, double grad_scale,
                       zpp_pool *pool);
/* The same on CUDA, as zpp_optim_step_cuda. */
zpp_status zpp_adam_step_f64_cuda(zpp_device *device, void *native, const struct zpp_adam_f64_segment *segments,
                                  size_t segments_count, struct zpp_grad_scale_f64 scale, struct zpp_err *err);

#endif
