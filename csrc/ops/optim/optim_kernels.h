/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/optim: the constants of a segment, and the tables of loops that optim_isa.c is compiled to.
 */
#ifndef ZPP_OPS_OPTIM_KERNELS_H
#define ZPP_OPS_OPTIM_KERNELS_H

#include "adagrad.h"
#include "adam.h"
#include "frozen.h"
#include "lion.h"
#include "sgd.h"
#include "zero_one.h"

/* What is equal for all elements of a segment. All structs begin with `options`: bit k is set where the segment has
 * the optimizer's k-th state; bits from 4 on are the optimizer's own. */
union zpp_optim_consts {
    uint32_t options;
#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) struct zpp_##name##_consts name;
#include "optimizers.def"
#undef ZPP_OPTIMIZER
};

union zpp_optim_consts zpp_optim_consts_of(const struct zpp_optim_segment *segment, float grad_scale);

/* The states of an optimizer: a row of optimizers.def. */
struct zpp_optim_shape {
    unsigned char first, states, written;
};
extern const struct zpp_optim_shape zpp_optim_shapes[ZPP_OPTIMIZERS];

/* Elements [begin, end) of one segment with fp32 states; thread-free, no alignment asked for. A caller may cut a
 * segment anywhere. */
typedef void (*zpp_optim_kernel)(const struct zpp_optim_segment *segment, const union zpp_optim_consts *consts,
                                 size_t begin, size_t end);
struct zpp_optim_kernels {
    zpp_optim_kernel step[ZPP_OPTIMIZERS];
};
ZPP_ISA_DECLARE(struct zpp_optim_kernels, zpp_optim);

#endif
