/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts over several ranks whose memory this process maps: rows are read where they lie, with a base
 * address for each rank. Nothing is packed on the way, and nobody has to be told how many rows come, because each rank
 * reads what all of them chose.
 *
 *   plan     a counting sort of the choices of all ranks: which tokens this rank's experts take, and where the results
 *            of this rank's own tokens will lie
 *   gather   tokens of all ranks into this rank's buffer, grouped by its experts
 *   sum      the rows that a token's experts made, out of the buffers of all ranks
 *
 * Rank r of R has the experts r E / R to (r + 1) E / R - 1. Its buffer has no empty rows: expert after expert, within
 * an expert rank after rank, within a rank in order of the assignments. An assignment is a pair (token t, choice j) of
 * one rank, numbered t k + j.
 *
 * Sums are taken in fp32 in order of j and rounded once, so the results have the same bits for any number of ranks, CPU
 * level and number of threads.
 */
#ifndef ZPP_OPS_MOE_PEERS_H
#define ZPP_OPS_MOE_PEERS_H

#include "moe.h"

/* What all ranks chose. */
struct zpp_moe_choices {
    const int32_t *const *chosen;   /* [ranks][tokens * k]: -1 (dropped) or an expert; others are taken for -1 */
    const size_t *tokens;           /* [ranks] */
    size_t ranks, rank, experts, k; /* experts: a multiple of ranks, at most ZPP_MOE_MAX_EXPERTS */
};
/* Count the assignments of each rank and expert into counts [ranks * experts], and the rows of each rank's buffer into
 * rows [ranks]. */
void zpp_moe_choices_count(const struct zpp_moe_choices *choices, int64_t *counts, int64_t *rows);

struct zpp_moe_taken {
    int32_t assignment, row; /* of the owner's assignments; of this rank's buffer */
};
struct zpp_moe_peer_plan {
    int32_t *ends; /* [experts / ranks]: rows of this rank's buffer up to the end of each of its experts */
    struct zpp_moe_taken *taken; /* [rows here]: by owner, then by assignment */
    int64_t *starts;             /* [ranks + 1]: where the owners' parts of `taken` begin */
    int64_t *slots;              /* [tokens here * k]: rank * 2^32 + row of its buffer, or -1 */
};
/* Fill the plan. `counts`: of zpp_moe_choices_count; they are overwritten. */
void zpp_moe_peer_plan(const struct zpp_moe_choices *choices, int64_t *counts, const struct zpp_moe_peer_plan *plan);

struct zpp_moe_peer_rows {
    const void *const *bases; /* [ranks]: each rank's tokens for a gather, its buffer for a sum */
    size_t ranks, k, width_elems;
    zpp_dtype dtype; /* F32, BF16 or F16 */
};
/* buffer[row] = the owner's token, bit for bit. */
void zpp_moe_peer_gather(const struct zpp_moe_peer_rows *rows, const struct zpp_moe_taken *taken, const int64_t *starts,
                         void *buffer, zpp_pool *pool);
/* Backward of a weighted sum, where `bases` has the gradients of the sums: buffer[row] = w grad, dots[row] =
 * <made[row], grad>, with w out of weights [ranks][tokens * k]. made, dots: NULL, or what the forward summed, and [rows
 * here]. */
struct zpp_moe_peer_scale {
    const float *const *weights;
    const void *made;
    float *dots;
};
void zpp_moe_peer_gather_scaled(const struct zpp_moe_peer_rows *rows, const struct zpp_moe_taken *taken,
                                const int64_t *starts, const struct zpp_moe_peer_scale *scale, void *buffer,
                                zpp_pool *pool);
/* y_t = sum_j w_tj bases[slot_tj] over those not dropped; weights [tokens * k] or NULL: all 1. */
void zpp_moe_peer_sum(const struct zpp_moe_peer_rows *rows, const int64_t *slots, size_t tokens, const float *weights,
                      void *y, zpp_pool *pool);
/* Copy what peers are to read, or large memory of any kind. */
void zpp_moe_peer_copy(void *to, const void *from, size_t bytes, zpp_pool *pool);
/* values[t, j] = bases[slot_tj], of one fp32 number a row; dropped: 0 */
void zpp_moe_peer_pick(const float *const *bases, const int64_t *slots, size_t assignments, float *values);

/* --- on CUDA -------------------------------------------------------------------------------------------------------
 * The same bits, where what is pointed at is device memory, but for `bases` and `weights` of the structs and `starts`,
 * which are copied. Enqueued on `native` (torch's current stream). NOT_BUILT without the kernels, DEVICE if a launch
 * fails. */
enum { ZPP_MOE_PEER_CUDA_RANKS = 64 };
struct zpp_moe_peer_cuda {
    zpp_device *device;
    void *native;
    const uint64_t *halt; /* NULL, or a word that is not 0 once the group has failed: then nothing is written */
};
/* OK if the device has the kernels. */
zpp_status zpp_moe_peer_cuda_find(zpp_device *device, struct zpp_err *err);
/* scale NULL: plain copies */
zpp_status zpp_moe_peer_gather_cuda(const struct zpp_moe_peer_cuda *on, const struct zpp_moe_peer_rows *rows,
                                    const struct zpp_moe_taken *taken, const int64_t *starts,
                                    const struct zpp_moe_peer_scale *scale, void *buffer, struct zpp_err *err);
zpp_status zpp_moe_peer_sum_cuda(const struct zpp_moe_peer_cuda *on, const struct zpp_moe_peer_rows *rows,
                                 const int64_t *slots, size_t tokens, const float *weights, void *y,
                                 struct zpp_err *err);
zpp_status zpp_moe_peer_pick_cuda(const struct zpp_moe_peer_cuda *on, const struct zpp_moe_peer_rows *rows,
                                  const int64_t *slots, size_t assignments, float *values, struct zpp_err *err);

#endif
