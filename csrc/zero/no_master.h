/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on parameters in bf16 that have no fp32 copy. A tile of them is decoded to fp32, stepped by the kernel of
 * ops/optim with its moments and gradient, and rounded stochastically (ops/moments: up with a probability of the share
 * of the way up). So an element becomes one of the two bf16 numbers around what fp32 Adam makes of it, and its mean is
 * that; rounded to nearest, it would keep no change below 1/256 of it. The random bits are a function of (parameter,
 * step, place in the parameter): every stage, number of ranks and threads, and a resumed run, gives the same.
 *
 * Bytes touched per parameter: 4 (read and written), its gradient, and its moments.
 */
#ifndef ZPP_ZERO_NO_MASTER_H
#define ZPP_ZERO_NO_MASTER_H

#include "../ops/optim/optim.h"

struct zpp_no_master_piece {
    struct zpp_optim_segment segment; /* param NULL; param_out: the parameter, in bf16, read and written */
    uint64_t stream;                 /* number of the parameter in the model */
    size_t first_elems;              /* place of the piece in its parameter */
};

/* As zpp_optim_step, all pieces one after the other. */
void zpp_no_master_step(const struct zpp_no_master_piece *pieces, size_t count, float grad_scale, zpp_pool *pool);

#endif
