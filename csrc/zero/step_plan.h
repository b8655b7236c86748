/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan of an optimizer's step: which elements are stepped, with which gradient, states and rates, and where the
 * new values go. All three kinds of step are planned here:
 *
 *   after the backward    zpp_step_plan_make, zpp_step_plan_run        between zpp_zero_step_begin and _end
 *   in the backward       zpp_step_plan_add, zpp_step_plan_run_unit    one unit at a time (step_in_backward.h)
 *   delayed               zpp_delayed_plan, zpp_delayed_begin          in a thread of its own (step_delayed.h)
 *
 * The stepper has what the steps of one coordinator work on. Its units have the numbers of the coordinator's; the
 * caller fills in where their states are, and holds the gradients that are local.
 *
 * Gradients are *local* (whole, at the addresses that the caller gives: one rank, or stage 0 after its all-reduce) or
 * *sharded* (this rank's reduced shard). A plan consists of pieces: the part of one parameter in one shard.
 *
 * Threads: one at a time for each stepper; a plan is run by any one thread.
 */
#ifndef ZPP_ZERO_STEP_PLAN_H
#define ZPP_ZERO_STEP_PLAN_H

#include "../ops/norm/norm.h"
#include "../ops/optim/optim.h"
#include "offload/optim_file.h"
#include "zero.h"

/* Where the optimizer's states of this rank's shard are. All addresses are borrowed; all zero: the unit is not stepped.
 */
struct zpp_unit_states {
    float *master;                /* NULL: the parameters are the master (fp32, fp64), or bf16 has none */
    enum zpp_moments_kind kind;
    struct zpp_moment moments[3]; /* by enum zpp_moments_which; of fp32, `codes` are floats (of an fp64 unit doubles) */
    uint64_t first_param;         /* number of the unit's first parameter in the model */
    int64_t *steps;               /* [params] taken so far; the plan counts them */
    int *groups;                  /* [params]; -1: in no group; from malloc, owned by the stepper */
    bool in_file;                 /* master and moments are shard `file_shard` of the optimizer file */
    int file_shard;
};

struct zpp_step_unit {
    struct zpp_unit *unit; /* borrowed from the coordinator */
    struct zpp_unit_states states;
    const void **local_grads;   /* [params], owned by the stepper; entries are borrowed; NULL: no gradient */
    unsigned char *back_buffer; /* borrowed; where a delayed step puts new values of the shard; fp32: the master */
};

/* Memory for the sums of gradients on a device: made by the first norm, and larger when there are more gradients. */
struct zpp_norm_memory {
    zpp_device *device; /* NULL: there is none yet */
    zpp_event *done;
    void *memory; /* of the device */
    size_t bytes;
    void *host; /* pinned */
    size_t host_bytes;
};

struct zpp_stepper {
    zpp_zero *zero;             /* borrowed */
    zpp_pool *pool;             /* borrowed; NULL: one thread */
    zpp_optim_file *optim_file; /* borrowed; NULL: all states are in memory */
    struct zpp_step_unit *units;
    int units_count;
    struct zpp_norm_memory *norm; /* owned */
};

/* Fill `out` for a sealed coordinator; end with zpp_stepper_fini (all zero is fine). */
zpp_status zpp_stepper_init(zpp_zero *zero, zpp_pool *pool, struct zpp_stepper *out, struct zpp_err *err);
void zpp_stepper_fini(struct zpp_stepper *stepper);

/* True if gradients are local, false if they are sharded. */
bool zpp_zero_grads_are_local(const zpp_zero *zero);

/* norm_memory.c: at least `bytes` on the device and `host_bytes` on the host. */
zpp_status zpp_norm_memory_reserve(struct zpp_norm_memory *norm, zpp_device *device, size_t bytes, size_t host_bytes,
                                   struct zpp_err *err);
void zpp_norm_memory_free(struct zpp_norm_memory *norm); /* after all work on it; NULL is fine */

/* --- shards ------------------------------------------------------------------------------------------------------- */

/* The elements of a unit that this rank steps: its shard, or all of them where gradients are local. */
struct zpp_step_shard {
    const struct zpp_step_unit *owner;
    struct zpp_unit shape;      /* a copy of the unit whose shards are cut that way */
    int rank;                   /* the number of the shard in `shape` */
    size_t begin_elems;         /* of the unit's flat buffer */
    unsigned char *values;
    const unsigned char *grads; /* sharded gradients only; where they are in a file: addresses of its mapping */
    const uint8_t *present;     /* [params], sharded gradients only */
};

/* Return false where the unit has no gradient on this rank. `delayed`: sharded gradients are those in the back buffer.
 */
bool zpp_step_shard_of(const struct zpp_stepper *stepper, int unit, bool delayed, struct zpp_step_shard *out);
/* Return the address of a piece's gradient; NULL where its parameter has none. */
const void *zpp_step_shard_grad(const struct zpp_step_shard *shard, const struct zpp_piece *piece);

/* --- plans -------------------------------------------------------------------------------------------------------- */

/* Adam on parameters in bf16 that have no fp32 copy. */
struct zpp_no_master_piece {
    struct zpp_optim_segment segment; /* param NULL; param_out: the parameter, in bf16, read and written */
    uint64_t stream;                 /* number of the parameter in the model */
    size_t first_elems;              /* place of the piece in its parameter */
};

/* New values in the back buffer, and the place in the shard that they are published to. `fill`: copy the shard's values
 * to the back buffer before the step. */
struct zpp_delayed_copy {
    void *to, *from;
    size_t bytes;
    bool fill;
};

/* Bytes of the file of parameters that a delayed step does not change, in a unit that it flips. */
struct zpp_delayed_rest {
    const void *address; /* in the mapping */
    size_t bytes;
};

/* The arrays are from malloc (NULL: empty); what they point to is borrowed. All zero is an empty plan; end with
 * zpp_step_plan_drop. */
struct zpp_step_plan {
    double grad_scale; /* multiplies every gradient */
    struct zpp_optim_segment *segments; /* states in memory; on a device also bf16 parameters without a master */
    size_t segments_count, segments_capacity;
    struct zpp_optim_file_piece *file_pieces; /* states in the optimizer file */
    size_t file_pieces_count, file_pieces_capacity;
    struct zpp_no_master_piece *no_master; /* bf16 without an fp32 master, on the host */
    size_t no_master_count, no_master_capacity;
    struct zpp_adam_f64_segment *f64;
    size_t f64_count, f64_capacity;
    struct zpp_step_files files; /* where parameters and gradients are */
    zpp_optim_file *optim_file;  /* borrowed; NULL: there are no file_pieces */

    bool delayed; /* new values go to back buffers, and the rest of these fields is used */
    struct zpp_delayed_copy *copies;
    size_t copies_count, copies_capacity;
    struct zpp_delayed_rest *rests;
    size_t rests_count, rests_capacity;
    int *flips; /* units of files.params, by their numbers there, whose two copies are exchanged when published */
    size_t flips_count, flips_capacity;
};

/* Make a plan over all units that have gradients, and count a step of each parameter that is stepped. `groups` have the
 * rates of each parameter group, and which moments the update has (any address that is not NULL). An error leaves
 * nothing to drop. */
zpp_status zpp_step_plan_make(const struct zpp_stepper *stepper, const struct zpp_optim_segment *groups,
                              double grad_scale, bool delayed, struct zpp_step_plan *plan, struct zpp_err *err);
/* The files of a coordinator that a step reads and writes; `next`: the step is delayed. */
struct zpp_step_files zpp_step_files_of(zpp_zero *zero, bool next);
/* Add one unit to a plan whose grad_scale, files and optim_file are set. */
zpp_status zpp_step_plan_add(const struct zpp_stepper *stepper, int unit, const struct zpp_optim_segment *groups,
                             struct zpp_step_plan *plan, struct zpp_err *err);
void zpp_step_plan_drop(struct zpp_step_plan *plan);

/* Do all of it; the segments are changed. `*inconsistent`: some parameters were stepped and others not. `fault` is
 * written on status TIER only. */
zpp_status zpp_step_plan_run(struct zpp_step_plan *plan, zpp_pool *pool, bool *inconsistent,
                             struct zpp_aio_fault *fault, struct zpp_err *err);
/* The same for one unit inside the backward: its parameters and gradients are in memory, and the optimizer file is
 * between zpp_optim_file_backward_step_begin and _end. */
zpp_status zpp_step_plan_run_unit(struct zpp_step_plan *plan, zpp_pool *pool, struct zpp_aio_fault *fault,
                                  struct zpp_err *err);

/* As zpp_optim_step, all pieces one after the other. */
void zpp_no_master_step(const struct zpp_no_master_piece *pieces, size_t count, float grad_scale, zpp_pool *pool);

/* --- the norm (norm.c) -------------------------------------------------------------------------------------------- */
/* The norm of the gradients that a step would use. Sums of squares are made in double for each unit and shard, and
 * added in the order of units and ranks, so the norm has the same bits in every stage at equal numbers of ranks. */

/* One shard of one unit. */
struct zpp_shard_norm {
    double squares;
    int64_t bad_param; /* the first parameter whose gradient is not finite; -1: none */
    int64_t bad_elem;  /* the first such element of it; -1: not looked for (a device measured) */
    uint64_t origins;  /* then: the ranks on which the unit's gradient was not finite before the sum (origin.c) */
};

/* The shard of a unit that this rank steps, whose gradient is in memory. */
zpp_status zpp_norm_of_unit(const struct zpp_stepper *stepper, int unit, struct zpp_shard_norm *out,
                            struct zpp_err *err);
/* Collective: norms[ranks * units], rank after rank. Gradients in a file are read once, from the last unit to the
 * first: the order in which they are read ahead. */
zpp_status zpp_norm_of_all(const struct zpp_stepper *stepper, struct zpp_shard_norm *norms, const struct zpp_wait *wait,
                           struct zpp_err *err);
/* What of which the norm is made, for a device that measures it (step_device.h). Group r * units + u has the pieces of
 * unit u's shard r that have a gradient, in order: segments firsts[g] to firsts[g + 1]. `ranks` is 1 where this rank
 * has its own shards only, and the number of ranks where gradients are local. Free with zpp_norm_pieces_drop. */
struct zpp_norm_pieces {
    struct zpp_norm_segment *segments;
    size_t *params; /* of each segment: its parameter's number in the unit */
    size_t *firsts; /* [groups + 1] */
    size_t groups;
    int ranks;
};
zpp_status zpp_norm_pieces_make(const struct zpp_stepper *stepper, struct zpp_norm_pieces *out, struct zpp_err *err);
/* The same of one unit: one group with the pieces of this rank's shard. */
zpp_status zpp_norm_pieces_of_unit(const struct zpp_stepper *stepper, int unit, struct zpp_norm_pieces *out,
                                   struct zpp_err *err);
void zpp_norm_pieces_drop(struct zpp_norm_pieces *pieces); /* all zero is fine */

/* The sum of `squares` of the units that are no copies, in the order that this file promises. */
double zpp_norm_squares_of(const struct zpp_stepper *stepper, const struct zpp_shard_norm *norms);

/* What the data ranks measured, added over the job. */
struct zpp_job_norm {
    double squares;
    uint64_t bad; /* gradients that are not finite, of all data ranks of the job */
};
/* Collective over the job: add norms[ranks * units] of all data ranks, each set of them once, in order of ranks.
 * Without ranks beyond the data ranks that is zpp_norm_squares_of, and nothing is sent. */
zpp_status zpp_norm_of_job(const struct zpp_stepper *stepper, const struct zpp_shard_norm *norms,
                           struct zpp_job_norm *out, const struct zpp_wait *wait, struct zpp_err *err);

#endif
