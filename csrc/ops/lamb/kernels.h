/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/lamb: what a build of lamb_isa.c offers.
 */
#ifndef ZPP_OPS_LAMB_KERNELS_H
#define ZPP_OPS_LAMB_KERNELS_H

#include "../isa.h"
#include "lamb.h"
#include "lamb_body.h"

enum { ZPP_LAMB_LANES = 16 };

struct zpp_lamb_sums {
    float params[ZPP_LAMB_LANES], updates[ZPP_LAMB_LANES]; /* sums of squares */
};

struct zpp_lamb_kernels {
    /* First pass over elements [begin, end), begin a multiple of the lanes: moments, and squares added to `sums`. */
    void (*moments)(const struct zpp_lamb_segment *segment, const struct zpp_lamb_consts *consts, size_t begin,
                    size_t end, struct zpp_lamb_sums *sums);
    /* Second pass; a caller may cut anywhere. */
    void (*move)(const struct zpp_lamb_segment *segment, const struct zpp_lamb_consts *consts, size_t begin,
                 size_t end);
};
ZPP_ISA_DECLARE(struct zpp_lamb_kernels, zpp_lamb);

/* All but the rate. */
struct zpp_lamb_consts zpp_lamb_consts_of(const struct zpp_lamb_segment *segment, float grad_scale);

/* CUDA's launches, for lamb_cuda.c and the test that runs its kernels on a CPU: as many segments as fit one, empty ones
 * left out, from consts and dtypes to blocks; returns how many it took. Then where its work lies. */
struct zpp_lamb_cuda_batch;
size_t zpp_lamb_cuda_fill(const struct zpp_lamb_segment *segments, size_t segments_count,
                          struct zpp_grad_scale scale, struct zpp_lamb_cuda_batch *batch);
void zpp_lamb_cuda_place(struct zpp_lamb_cuda_batch *batch, void *work);

/* What moments in fewer bits need `beside` a batch that was placed, of the same segments; the blocks of the last
 * kernel's grid. */
struct zpp_lamb_low_cuda_batch;
unsigned int zpp_lamb_low_cuda_fill(const struct zpp_lamb_segment *segments, size_t segments_count,
                                    const struct zpp_lamb_cuda_batch *beside, struct zpp_lamb_low_cuda_batch *batch);

#endif
