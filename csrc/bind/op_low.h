/* SPDX-License-Identifier: Apache-2.0
 *
 * What the steps of optimizers share whose moments are in bf16 or 8 bits (csrc/ops/moments): the arguments beside those
 * of fp32, and their checks. Codes of one call are of one kind, bfloat16 or uint8.
 */
#ifndef ZPP_BIND_OP_LOW_H
#define ZPP_BIND_OP_LOW_H

#include "../ops/moments/moments.h"
#include "boxed.h"

struct zpp_op_low {
    bool is; /* else all that follows is of no meaning */
    const struct zpp_tensors *scales; /* of 8 bits only: one for each parameter's first moment, then second, ... */
    const struct zpp_ints *places;    /* three numbers a parameter: step, stream, first; NULL: first is 0 everywhere */
    uint64_t seed;
    enum zpp_moments_kind kind;
};
enum { ZPP_OP_LOW_STEP, ZPP_OP_LOW_STREAM, ZPP_OP_LOW_FIRST, ZPP_OP_LOW_PLACE };

/* The kinds that codes may have, as a set of dtypes: what the first has, which sets `kind`; or all that are allowed,
 * where that one is not. */
unsigned zpp_op_low_dtypes(struct zpp_op_low *low, const struct zpp_tensors *codes);

/* A scale for each block of each of `moments` moments, of 8 bits; none of bf16. */
bool zpp_op_low_check_scales(struct zpp_boxed *args, const struct zpp_op_low *low, const struct zpp_tensors *params,
                             size_t moments);

/* As many places as parameters, steps from 1, the others from 0. */
bool zpp_op_low_check_places(struct zpp_boxed *args, const struct zpp_op_low *low, const struct zpp_tensors *params);

int64_t zpp_op_low_place(const struct zpp_op_low *low, size_t param, int which);

/* How the moments of a parameter are held in this step, where there are places. */
struct zpp_moments zpp_op_low_how(const struct zpp_op_low *low, size_t param);

#endif
