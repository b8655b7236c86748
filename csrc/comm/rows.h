/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange of a mixture of experts between the ranks of one host (DeepSpeed-MoE, Rajbhandari et al. 2022), in which
 * no rank sends anything: tokens, choices and results are published in the arenas of their ranks, and whoever needs a
 * row reads it where it lies (csrc/ops/moe/peers.h).
 *
 *   dispatch           tokens and choices are published; each rank sorts everybody's choices and gathers the rows of
 *                      its own experts
 *   combine            rows that the experts made are published; a token's owner takes their weighted sum
 *   combine backward   gradients of the sums and weights are published; an expert's rank gathers w grad, and the
 *                      products <row, grad>, which the owners of the weights read in a phase of their own
 *   dispatch backward  gradients of the gathered rows are published; a token's owner sums them
 *
 * The weight is applied by the token's owner: what an expert makes does not depend on it, so an expert may be any
 * module. It costs the experts' rank the rows that they made, which stay until the backward.
 *
 * A phase is a descriptor of each rank with layer, call and format of the rows, which all ranks compare. A rank writes
 * to published memory again when all peers have acknowledged it. One rank reads (k + 1) / R of what a single rank would
 * move, and its own tokens are copied once more than there. Sums are taken in fp32 in order of the choices: the same
 * bits on every run, and for every number of ranks.
 *
 * On GPUs whose memory the ranks map (zpp_rows_open_device) choices cross in host memory, since the host plans the
 * rows, and all else in device memory: a phase is enqueued on the caller's stream, which waits for the peers' streams.
 * No host waits for a GPU there, but where the published memory has to grow.
 *
 * Threads: one at a time for each object; a second one gets STATE.
 */
#ifndef ZPP_COMM_ROWS_H
#define ZPP_COMM_ROWS_H

#include "../ops/moe/peers.h"
#include "comm.h"

typedef struct zpp_rows zpp_rows;
/* Collective. comm NULL: one rank, without a peer. Over several hosts it is the exchange of this host's ranks
 * (zpp_comm_here). `comm` is borrowed and has to be alive in every call but destroy. New; free with zpp_rows_destroy,
 * which is local. */
zpp_status zpp_rows_create(zpp_comm *comm, zpp_rows **out, struct zpp_err *err);
void zpp_rows_destroy(zpp_rows *rows); /* NULL is fine */
int zpp_rows_ranks(const zpp_rows *rows);
/* Add a layer; `name` is used in messages and copied. All ranks add the same ones in the same order. */
zpp_status zpp_rows_add_layer(zpp_rows *rows, const char *name, uint32_t *layer, struct zpp_err *err);

/* Numbers that a dispatch leaves for the later phases of the same rows: ZPP_ROWS_NUMBERS, then `starts` [ranks + 1] of
 * the plan, then the tokens of each rank [ranks], then the rows of each rank's buffer [ranks]. */
enum {
    ZPP_ROWS_LAYER,
    ZPP_ROWS_CALL, /* counts the dispatches of the layer from 1 */
    ZPP_ROWS_EXPERTS,
    ZPP_ROWS_K,
    ZPP_ROWS_WIDTH,
    ZPP_ROWS_DTYPE,
    ZPP_ROWS_FOREIGN, /* this rank's assignments to experts of other ranks */
    ZPP_ROWS_NUMBERS
};
static inline size_t zpp_rows_numbers(size_t ranks) { return ZPP_ROWS_NUMBERS + 3 * ranks + 1; }

/* Arrays of the caller: a dispatch fills them, in host memory; later phases read them, on a device `taken` and `slots`
 * there. */
struct zpp_rows_plan {
    int64_t *numbers;            /* [zpp_rows_numbers]; always in host memory */
    int32_t *ends;               /* [experts / ranks], see peers.h; the later phases do not read them */
    struct zpp_moe_taken *taken; /* [rows here] */
    int64_t *slots;              /* [tokens * k] */
};

/* Collective, once. Let the ranks read each other's rows in memory of their GPUs. `*opened` false: some rank's GPU
 * cannot, `err` says why, and rows of the GPU have to cross in host memory. The device is borrowed until the end. */
zpp_status zpp_rows_open_device(zpp_rows *rows, zpp_device *device, const struct zpp_wait *wait, bool *opened,
                                struct zpp_err *err);
/* What computes a call: NULL is this thread. */
struct zpp_rows_by {
    zpp_pool *pool; /* of threads; may be NULL */
    bool on_device; /* the opened device, where all arrays are then but those named; the same on all ranks */
    void *native;   /* its stream for this call: torch's current one */
};

struct zpp_rows_dispatch {
    uint32_t layer;
    size_t tokens, width_elems, k, experts; /* all but tokens: the same on all ranks; experts: a multiple of ranks */
    zpp_dtype dtype;                        /* F32, BF16 or F16; the same on all ranks */
    const void *x;                          /* [tokens][width]; on a device not read */
    const int32_t *chosen; /* [tokens][k] in host memory, each -1 (dropped) or an expert; one twice counts twice */
};
/* Publish tokens and choices, wait for those of all ranks, and count. The second half follows, with memory for
 * `*rows_here` rows; nothing but the plan has to stay after it. On a device both halves are about choices and the plan,
 * and zpp_rows_take follows, with `x` of the dispatch. */
zpp_status zpp_rows_dispatch_begin(zpp_rows *rows, const struct zpp_rows_dispatch *dispatch,
                                   const struct zpp_rows_by *by, const struct zpp_wait *wait, size_t *rows_here,
                                   struct zpp_err *err);
zpp_status zpp_rows_dispatch_end(zpp_rows *rows, const struct zpp_rows_plan *plan, void *buffer,
                                 const struct zpp_rows_by *by, struct zpp_err *err);
zpp_status zpp_rows_take(zpp_rows *rows, const struct zpp_rows_plan *plan, const void *x, void *buffer,
                         const struct zpp_rows_by *by, const struct zpp_wait *wait, struct zpp_err *err);
/* y_t = sum_j w_tj row_tj, here and in its backward of the dtype that the numbers have, which may be another one than
 * that of the dispatch. made: [rows here][width]; where it lies in an arena it is read in place, and the call waits
 * until all peers have read it. weights: [tokens * k], or NULL, on all ranks: all 1. */
zpp_status zpp_rows_combine(zpp_rows *rows, const struct zpp_rows_plan *plan, const void *made, const float *weights,
                            void *y, const struct zpp_rows_by *by, const struct zpp_wait *wait, struct zpp_err *err);
struct zpp_rows_grads {
    const void *grad_y;   /* [tokens][width] */
    const float *weights; /* [tokens * k], or NULL: all 1; whether there are weights is the same on all ranks */
    bool of_weights;      /* with weights only: they get a gradient; the same on all ranks */
    const void *made;     /* of_weights: [rows here][width], as in the forward */
    void *grad_made;      /* out */
    float *grad_weights;  /* of_weights: out */
    float *dots;          /* of_weights, on a device: [rows here] to work in */
};
zpp_status zpp_rows_combine_backward(zpp_rows *rows, const struct zpp_rows_plan *plan,
                                     const struct zpp_rows_grads *grads, const struct zpp_rows_by *by,
                                     const struct zpp_wait *wait, struct zpp_err *err);
zpp_status zpp_rows_dispatch_backward(zpp_rows *rows, const struct zpp_rows_plan *plan, const void *grad_buffer,
                                      void *grad_x, const struct zpp_rows_by *by, const struct zpp_wait *wait,
                                      struct zpp_err *err);

#endif
