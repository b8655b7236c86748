/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizer states in an optimizer file: fp32 master weights and moments live in a scratch file, and the step streams
 * them through a few buffers (ZeRO-Infinity, arXiv:2104.07857, section 5: the infinity offload engine).
 *
 * All shards of this rank lie one after the other on a *record stream* of elements; those with a master copy and those
 * without (fp32, whose parameters are the master themselves) on a record stream each. A record stream is cut in chunks,
 * and a chunk is one record of the file, its kinds one after the other:
 *
 *   stream    | unit 0 ..... | unit 1 . | unit 2 ............ |
 *             | in memory |  chunk 0  |  chunk 1  |  chunk 2  |       fraction: the part of the stream in the file
 *   record    | master | exp_avg | exp_avg_sq | max_exp_avg_sq |      each a multiple of 4096 bytes
 *
 * That is Adam's; of other updates a record has the moments that they have (ops/optim/optim.h). A shard of 65,536
 * elements or more has records of its own, so the states of a unit that is not stepped do not move.
 *
 * A step moves whole records, while chunk k is stepped chunk k+1 is read and chunk k-1 written, so bytes per element
 * and step are 4 * kinds read and 4 * kinds written, and memory is `buffers` records. The copy in the parameters' own
 * dtype is written in the same pass. Moments of a chunk that was never stepped are zeros, neither written nor read.
 *
 * A step that fails half-way leaves some chunks stepped and others not: the optimizer file is *inconsistent*, and
 * refuses every step until zpp_optim_file_recovered (the caller has loaded all of it anew).
 *
 * Threads: one at a time; inconsistent and figures from any.
 */
#ifndef ZPP_ZERO_OPTIM_FILE_H
#define ZPP_ZERO_OPTIM_FILE_H

#include "../../aio/engine.h"
#include "pipeline.h"
#include "unit_file.h"
#include "../../ops/optim/optim.h"

typedef struct zpp_optim_file zpp_optim_file;

enum zpp_optim_file_kind {
    ZPP_TIER_MASTER,
    ZPP_TIER_EXP_AVG,
    ZPP_TIER_EXP_AVG_SQ,
    ZPP_TIER_MAX_EXP_AVG_SQ,
    ZPP_TIER_KINDS
};

struct zpp_optim_file_options {
    struct zpp_scratch_options file; /* made by seal */
    double fraction;    /* of the bytes that go to the file, above 0 and at most 1 */
    unsigned moments;   /* which there are: bit 0 EXP_AVG, 1 EXP_AVG_SQ, 2 MAX_EXP_AVG_SQ */
    bool backward_step; /* steps are unit by unit (zpp_optim_file_backward_step_unit) */
    size_t chunk_elems; /* of a record, about; a multiple of 1024; 0: chosen by seal */
    unsigned buffers;   /* records in memory, at least 3; 0: 4, or with backward_step for two shards, at most 64 */
};

/* New; end with zpp_optim_file_destroy, which leaves the file to its owner (NULL is fine). */
zpp_status zpp_optim_file_create(const struct zpp_optim_file_options *options, zpp_optim_file **out,
                                 struct zpp_err *err);
void zpp_optim_file_destroy(zpp_optim_file *optim_file);
/* One shard. `*shard` counts from 0. Before seal. */
zpp_status zpp_optim_file_add(zpp_optim_file *optim_file, size_t elems, bool master, int *shard, struct zpp_err *err);
/* All shards so far stay in memory, and the fraction is of those that come now. Before seal, once. */
void zpp_optim_file_hold(zpp_optim_file *optim_file);
/* Makes the file, all of its blocks reserved where the file system can: a full disk is found here. `fault` is written
 * on status TIER only, here and below. */
zpp_status zpp_optim_file_seal(zpp_optim_file *optim_file, struct zpp_aio_fault *fault, struct zpp_err *err);

/* What seal would make of these shards, with no file and no memory: of `options` the fraction, the moments and
 * `backward_step` count. */
struct zpp_optim_file_shard_plan {
    size_t elems;
    bool master;
    bool held; /* it comes before zpp_optim_file_hold */
};
struct zpp_optim_file_plan {
    size_t buffer_bytes; /* as in the figures */
    size_t chunk_elems;  /* of the longest record; 0: nothing is in the file */
};
zpp_status zpp_optim_file_plan(const struct zpp_optim_file_options *options,
                               const struct zpp_optim_file_shard_plan *shards, size_t count,
                               struct zpp_optim_file_plan *out, struct zpp_err *err);

/* Elements [first, first + elems) of one kind of a shard, to `memory` or (write) from it. */
zpp_status zpp_optim_file_copy(zpp_optim_file *optim_file, int shard, enum zpp_optim_file_kind kind, size_t first,
                               size_t elems, float *memory,
                               bool write, struct zpp_aio_fault *fault, struct zpp_err *err);

/* Elements [first, first + segment.elems) of a shard. The tier fills in `segment`'s states: param (where the shard has
 * a master), and those of its moments that are not NULL. */
struct zpp_optim_file_piece {
    struct zpp_optim_segment segment;
    int shard;
    size_t first;
};
/* One step over the pieces, in ascending order of (shard, first), but for shards before hold. Same bits as
 * zpp_optim_step on states in memory.
 * `files`: where the parameters or gradients of some pieces are. */
zpp_status zpp_optim_file_step(zpp_optim_file *optim_file, const struct zpp_optim_file_piece *pieces,
                               size_t pieces_count,
                               const struct zpp_step_files *files, float grad_scale, zpp_pool *pool,
                               struct zpp_aio_fault *fault, struct zpp_err *err);

/* The same step shard by shard, as gradients become complete (optim_file_step_in_backward.c). Between the calls records
 * are read and written. Shards come best from the last to the first, and each at most once; those that do not come stay
 * as they are. The call that meets a failure returns it, once: the optimizer file is inconsistent then, and no
 * step is open. */
/* A failure here changes no state. */
zpp_status zpp_optim_file_backward_step_begin(zpp_optim_file *optim_file, struct zpp_aio_fault *fault,
                                              struct zpp_err *err);
/* Pieces of one shard, in ascending order. Their parameters and gradients are in memory. */
zpp_status zpp_optim_file_backward_step_unit(zpp_optim_file *optim_file, const struct zpp_optim_file_piece *pieces,
                                             size_t pieces_count,
                                             float grad_scale, zpp_pool *pool, struct zpp_aio_fault *fault,
                                             struct zpp_err *err);
/* Where writes have ended meanwhile: read on ahead into their buffers. Never waits; nothing to do where no step is
 * open. */
zpp_status zpp_optim_file_backward_step_poll(zpp_optim_file *optim_file, struct zpp_aio_fault *fault,
                                             struct zpp_err *err);
/* Whether the shard is expected in the next steps: records without any that is are not read ahead. At first all are. */
void zpp_optim_file_backward_step_expect(zpp_optim_file *optim_file, int shard, bool expected);
/* All is written. Nothing to do where no step is open. */
zpp_status zpp_optim_file_backward_step_end(zpp_optim_file *optim_file, struct zpp_aio_fault *fault,
                                            struct zpp_err *err);
/* Between two steps: begin to read what the next one needs first. If that fails, the next step returns it. */
void zpp_optim_file_backward_step_ahead(zpp_optim_file *optim_file);
bool zpp_optim_file_inconsistent(const zpp_optim_file *optim_file);
void zpp_optim_file_recovered(zpp_optim_file *optim_file);

struct zpp_optim_file_figures {
    size_t file_bytes[ZPP_TIER_KINDS]; /* states in the file, without what rounds them up */
    size_t held_bytes[ZPP_TIER_KINDS]; /* states in memory */
    size_t reserved_bytes;             /* the file */
    size_t buffer_bytes;
    uint64_t read_bytes, written_bytes; /* so far */
    uint64_t checked_bytes;             /* of those read */
    size_t sums_bytes;                  /* of checksums, in memory */
    uint64_t steps, step_ns, waited_ns; /* waited: for the file, inside steps */
    bool uring;
};
void zpp_optim_file_figures(const zpp_optim_file *optim_file, struct zpp_optim_file_figures *out);

#endif
