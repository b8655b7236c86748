/* SPDX-License-Identifier: Apache-2.0
 *
 * The ZeRO coordinator (Rajbhandari et al. 2020, stages 0 to 3): which units are whole on this rank, when they are
 * gathered and released, and how gradients reach the shards. Knows neither torch nor Python; written against
 * base/device.h and comm/comm.h only, so that the simulated device can drive it through any schedule.
 *
 * The order of calls. A unit's states, and which call moves them, are drawn in unit.h.
 *
 *   set-up     create .. set_wire, set_grads_fraction, set_weight_quant, delay_steps .. add_group .. add_unit (each) ..
 *              set_secondary, quantise_param, pool_grads .. seal
 *   forward    need(u) .. compute .. release(u)                  for each unit in use
 *   backward   backward_begin
 *              need(u) .. compute .. grad(u, i, g) ..            any order, gradients as they come
 *              backward_end                                      all reductions are done when it returns
 *   step       step_begin .. write own shards .. step_end
 *   end        close_params, destroy
 *
 * A gradient's path, from the hook of its parameter to the step (grad_store.h has where it lives):
 *
 *   grad(u, i, g)     it is added to the unit's bucket on this rank
 *   (reduction)       when all of the unit's gradients came, in one order of units on all ranks: to this rank's shard
 *   grads_settle      after backward_end, where shards are in a file: all are written
 *   grad_shard(u)     norm and step read it, between grad_open(u) and grad_close(u) where it is in a file
 *   clear_grads       the next step begins without gradients
 *
 *   A step inside the backward, instead of the last three, for each unit u = next_reduced(done):
 *   keep_grads (after backward_begin) .. grad_load(u) .. shard_open(u) .. update the shard ..
 *   shard_write_begin(u) .. drop_grad(u) .. shard_write_wait(u)
 *
 * Bytes on the wire per rank and step, Psi = bytes of all parameters, f = (N-1)/N:
 *   stage 0: 2 f Psi (all-reduce)    1, 2: 2 f Psi (reduce-scatter, all-gather)    3: 3 f Psi; units with one shared
 *   copy on the host: f Psi (the reduction alone). Units in a file: the same f Psi, and from the disk, per host: 2 Psi
 *   read (forward, backward) and Psi written (step); fp32 parameters without a master are read once more, by the step.
 *
 * Threads: one thread at a time. `wait` == NULL tries: ZPP_AGAIN means that nothing was done.
 */
#ifndef ZPP_ZERO_ZERO_H
#define ZPP_ZERO_ZERO_H

#include "../comm/comm.h"
#include "group.h"
#include "offload/unit_file.h"
#include "unit.h"

typedef struct zpp_zero zpp_zero;

/* Memory for gathered units, in the order of the compute stream: what is released may be handed out again at once to an
 * operation that comes later on that stream. NULL functions: the coordinator's own address range (cpu). */
struct zpp_backing {
    void *ctx;
    zpp_status (*acquire)(void *ctx, const struct zpp_unit *unit, void **memory, struct zpp_err *err);
    void (*release)(void *ctx, const struct zpp_unit *unit, void *memory);
};

/* Where the shards of parameters, gradients and optimizer states live, and steps run, where units are whole on an
 * accelerator (docs/design/0038-training-on-gpus.md). */
enum zpp_shards { ZPP_SHARDS_ON_HOST, ZPP_SHARDS_ON_DEVICE };

/* How ranks move shards that live on accelerators (docs/design/0052-gpus-of-several-hosts.md): AUTO copies where all
 * ranks map the memory of all, and is NCCL elsewhere. */
enum zpp_gather { ZPP_GATHER_AUTO, ZPP_GATHER_COPY, ZPP_GATHER_NCCL };

struct zpp_zero_options {
    int stage;               /* 0..3 */
    zpp_comm *comm;          /* the data ranks, which partition the units; borrowed until destroy; NULL: one rank */
    /* All ranks of the job, which decide together: votes and norms. Ranks with other data ranks may have other units
     * (stages of a pipeline). Borrowed until destroy; NULL: the data ranks are the job. */
    zpp_comm *job;
    zpp_device *device;      /* borrowed until destroy: where units are whole, and the computation runs */
    zpp_device *host;        /* the CPU beside an accelerator, borrowed until destroy; NULL: `device` is the CPU */
    enum zpp_shards shards;  /* without `host` it has no meaning */
    enum zpp_gather gather;  /* of shards on an accelerator */
    struct zpp_backing backing;
    size_t prefetch_bytes;   /* gathered ahead of need at most; 0: nothing is */
    size_t bucket_bytes;     /* gradients that may wait in buckets for slower ranks; 0: no bound */
    double params_fraction;  /* of the bytes of units in a file that stay there; 0: there are no such units */
    /* Of this host's ranks, borrowed until destroy: units in a file are only read, and each of several hosts has a
     * copy, as one host alone has. NULL: none, see placement/nvme_net.c. */
    zpp_comm *copy;
};

struct zpp_unit_spec {
    const char *name;         /* for messages; copied */
    zpp_dtype dtype;
    size_t params;
    const size_t *param_elems; /* [params]; copied */
    bool trainable;
    enum zpp_place place;
    zpp_dtype grad_dtype;     /* that gradients come in, add in and stay in: `dtype`, or ZPP_F32 */
    zpp_dtype wire_dtype;     /* that peers read them in: grad_dtype; of ZPP_F32 also ZPP_BF16 or ZPP_F16 */
    bool frozen_reserved; /* not trainable now, but it may be unfrozen: has addresses for gradients, and no memory */
    int group;            /* of zpp_zero_add_group; 0: all data ranks hold it */
    bool held; /* what it has of a file, parameters and gradients, stays in memory: fractions are of other units */
    bool shared;          /* by several modules: it is whole while others come and go between them */
    bool on_host; /* place SHARD, with shards on the device: this unit's are in page-locked memory of the host, which
                   * kernels and copy engines read and write */
};

/* New; free with zpp_zero_destroy (local, never waits; NULL is fine). */
zpp_status zpp_zero_create(const struct zpp_zero_options *options, zpp_zero **out, struct zpp_err *err);
void zpp_zero_destroy(zpp_zero *zero);
/* Units in the same order on every rank. `*index` counts from 0. Before seal. */
zpp_status zpp_zero_add_unit(zpp_zero *zero, const struct zpp_unit_spec *spec, int *index, struct zpp_err *err);
/* What travels in 8 or 4 bits, in blocks of block_elems (0: exactly): gathered sharded units at stage 3, reduced
 * gradients at stages 2 and 3; see wire.c. Before units are added. */
zpp_status zpp_zero_set_wire(zpp_zero *zero, int params_bits, int grads_bits, size_t block_elems, struct zpp_err *err);
/* hpZ over several hosts: `intranode` is a communicator of this host's ranks in the order of their ranks, borrowed
 * until destroy; as many on each host. See placement/sharded_net.c. Before seal. */
zpp_status zpp_zero_set_secondary(zpp_zero *zero, zpp_comm *intranode, struct zpp_err *err);
/* `fraction` of the reduced gradients, above 0 and at most 1, live in a file of this rank's own (grad_file.c). Stages 2
 * and 3. Before units are added. */
zpp_status zpp_zero_set_grads_fraction(zpp_zero *zero, double fraction, struct zpp_err *err);
/* Units in a file are kept in 8 or 4 bits, for a model that is only read (unit_file.h); before units are added. Of a
 * unit that was added, parameter `param` is one of the matrices; before seal. */
zpp_status zpp_zero_set_weight_quant(zpp_zero *zero, int bits, size_t block_elems, bool in_memory, struct zpp_err *err);
zpp_status zpp_zero_quantise_param(zpp_zero *zero, int unit, size_t param, struct zpp_err *err);
/* What errors of files call a parameter, see struct zpp_param_name; `text` is copied. */
zpp_status zpp_zero_name_param(zpp_zero *zero, int unit, size_t param, const char *text, size_t row_elems,
                               size_t first_row, struct zpp_err *err);
/* Collective: makes the memory. Afterwards units that move are SHARDED, the others GATHERED (unit.h), and contents are
 * zero. Units in a file can be needed once zpp_unit_file_open was called. */
zpp_status zpp_zero_seal(zpp_zero *zero, struct zpp_err *err);

/* A reserved unit is trainable from now on; nothing to do where it is. Local, but all ranks unfreeze the same units
 * before their next backward: else the reductions of that one are refused. STATE: in a backward, or not reserved. */
zpp_status zpp_zero_unfreeze(zpp_zero *zero, int unit, struct zpp_err *err);

int zpp_zero_units(const zpp_zero *zero);
struct zpp_unit *zpp_zero_unit(zpp_zero *zero, int index); /* borrowed */
int zpp_zero_rank(const zpp_zero *zero);
int zpp_zero_ranks(const zpp_zero *zero);
int zpp_zero_job_ranks(const zpp_zero *zero);
bool zpp_zero_shards_on_device(const zpp_zero *zero); /* true if an accelerator has them, and steps them */
/* COPY or NCCL; AUTO where nothing is moved between accelerators. `why` (may be NULL) gets the reason of an AUTO. */
enum zpp_gather zpp_zero_gather_way(const zpp_zero *zero, const char **why);
zpp_stream *zpp_zero_compute(zpp_zero *zero); /* the HOST stream: the caller's computation goes there */
zpp_unit_file *zpp_zero_param_file(zpp_zero *zero); /* borrowed; NULL without units in a file */
/* End the engine of units in a file; loads fail from then on, and gathers under way are dropped. */
void zpp_zero_close_params(zpp_zero *zero);
/* The fault of the read that failed, after a call that returned TIER. */
const struct zpp_aio_fault *zpp_zero_fault(const zpp_zero *zero);
/* Return the unit in whose gathered memory (released or not) the address lies; -1: none. Own range only. */
int zpp_zero_find(const zpp_zero *zero, const void *address);

/* --- gathering (gather.c) ----------------------------------------------------------------------------------------- */
enum zpp_phase { ZPP_PHASE_FORWARD, ZPP_PHASE_BACKWARD, ZPP_PHASE_EVAL, ZPP_PHASES };
/* Whole before anything launched on the compute stream from now on; starts fetching what came next the last time. */
zpp_status zpp_zero_need(zpp_zero *zero, int unit, enum zpp_phase phase, const struct zpp_wait *wait,
                         struct zpp_err *err);
/* This pass leaves out units (layer dropping): masked[units], or NULL: none. They are not gathered ahead of need, keep
 * their places in the recorded order, and reductions do not wait for their gradients. One that is needed after all is
 * masked no more. */
void zpp_zero_mask(zpp_zero *zero, const uint8_t *masked);
/* True if zpp_zero_mask was called: the units of the next pass are not known yet. */
bool zpp_zero_is_masked(const zpp_zero *zero);
/* True if a forward of units in a file, this one or the next, has still to read some of them ahead of need. */
bool zpp_zero_reads_forward(const zpp_zero *zero);
/* After a step that left units in memory, and before they are released: those that the next forward begins with stay,
 * as far as they could be fetched ahead of it. */
void zpp_zero_keep_for_forward(zpp_zero *zero);
/* Not used any more by what was launched so far; a no-op while pinned, sticky or not full. */
zpp_status zpp_zero_release(zpp_zero *zero, int unit, struct zpp_err *err);
/* End of a pass: release every unit that is neither pinned nor sticky, also prefetched ones. */
zpp_status zpp_zero_end_pass(zpp_zero *zero, struct zpp_err *err);
/* End the pass, and release sticky units too: no graph needs the present values any more. Every step begins so. */
zpp_status zpp_zero_release_all(zpp_zero *zero, struct zpp_err *err);
/* Gathered quantised: read the unit's exact values, where nothing computes with it; a no-op otherwise. */
zpp_status zpp_zero_make_exact(zpp_zero *zero, int unit, struct zpp_err *err);
/* My shards were written outside of a step (step_end does it for itself): what peers gather is made from them, to be
 * called before a barrier. Shards on a device: wait for the writes. */
zpp_status zpp_zero_publish(zpp_zero *zero, struct zpp_err *err);
/* With every shard filled in this rank's gathered copy (in a shared file: on every rank): keep this rank's shard. Of
 * units that are GATHERED; nothing to do for those that never move. */
zpp_status zpp_zero_keep_shard(zpp_zero *zero, int unit, struct zpp_err *err);

/* A step inside the backward, of units in a file (nothing to do for others): this rank's shard in memory, to be changed
 * in place; on one host that gathers the unit. Gathers no other unit. The caller pins it. STATE: it is open already. */
zpp_status zpp_zero_shard_open(zpp_zero *zero, int unit, const struct zpp_wait *wait, struct zpp_err *err);
/* It was changed; begin to write it. Then, before it is unpinned, also where nothing was written: how that ended, and
 * the shard closes. */
zpp_status zpp_zero_shard_write_begin(zpp_zero *zero, int unit, struct zpp_err *err);
zpp_status zpp_zero_shard_write_wait(zpp_zero *zero, int unit, struct zpp_err *err);

/* --- units that several graphs use (evict.c) ---------------------------------------------------------------------- */
/* Both before a unit is needed in a backward. */
void zpp_zero_note_read(zpp_zero *zero, int unit, const struct zpp_reader *reader);
/* The unit to release next before this one is needed; -1: none. */
int zpp_zero_next_to_evict(const zpp_zero *zero, int unit, const struct zpp_reader *now);
/* Before a unit is needed for a graph that no hook gathers it for again: it stays whole until values change, where
 * possible in memory of its own. */
zpp_status zpp_zero_make_sticky(zpp_zero *zero, int unit, struct zpp_err *err);

/* --- gradients (reduce.c) ----------------------------------------------------------------------------------------- */
/* A parameter's gradient, `param_elems` elements of the unit's grad_dtype, on the compute stream. Added to what this
 * rank has not reduced yet. `uses` > 1 or `partial`: more may come, so the unit is reduced at the end. */
/* reduce == false: the gradients of this backward stay on this rank, and the next backward adds to them. */
zpp_status zpp_zero_backward_begin(zpp_zero *zero, bool reduce, struct zpp_err *err);
/* Until this backward ends: another coordinator is in it, too, or may come into it, and on another rank perhaps first.
 * So a bucket beyond bucket_bytes is waited for a moment only. */
void zpp_zero_share_backward(zpp_zero *zero);
/* Several graphs in one pass (pass.c): between pass_open and pass_close, in the place of backward_begin and _end.
 * `each`: every graph is reduced at its end; else all in one, whose end settle waits for. */
zpp_status zpp_zero_pass_open(zpp_zero *zero, bool reduce, bool each, struct zpp_err *err);
enum { ZPP_GRAPH_WITHOUT, ZPP_GRAPH_WITH, ZPP_GRAPH_LAST };
/* units[units]: a graph with gradients of the unit begins, or the last such of the pass, or one without. `forwards`: of
 * its part of the model in this pass, all of which used a unit equally often. */
zpp_status zpp_zero_graph_begin(zpp_zero *zero, const uint8_t *units, int forwards, struct zpp_err *err);
zpp_status zpp_zero_graph_end(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err);
zpp_status zpp_zero_pass_close(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err);
/* Wait for the reductions of a pass that was closed. To be called before anything reads or clears gradients, steps, or
 * begins another backward; a no-op after a backward that is a pass of its own. */
zpp_status zpp_zero_settle(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err);
/* For zpp_idle_set: run a sum of gradients that waits for its turn; true if some is left. Never waits. */
bool zpp_zero_drive(zpp_zero *zero);
void zpp_zero_pass_forget(zpp_zero *zero); /* part of close and of zpp_zero_backward_abort */
zpp_status zpp_zero_grad(zpp_zero *zero, int unit, size_t param, const void *grad, bool partial,
                         const struct zpp_wait *wait, struct zpp_err *err);
/* True if that was refused because the unit's gradients are being reduced already. */
bool zpp_zero_came_late(const zpp_zero *zero, int unit);
/* In this backward no gradient of that parameter comes on this rank; the unit does not wait for one. */
void zpp_zero_skip(zpp_zero *zero, int unit, size_t param);
/* Count a forward of the unit since the last backward. `unseen`: one without a graph, inside a forward that has one. A
 * nested backward repeats it, and has gradients of its own then. */
void zpp_zero_count_use(zpp_zero *zero, int unit, bool unseen);
void zpp_zero_reset_uses(zpp_zero *zero);
int zpp_zero_uses(const zpp_zero *zero, int unit);
bool zpp_zero_used_once(const zpp_zero *zero, int unit); /* and no part of its gradient came alone */
/* True if each parameter's gradient comes once in a backward: autograd adds those of several graphs before it hands
 * them out, but for those of nested backwards. */
bool zpp_zero_gets_gradients_once(const zpp_zero *zero, int unit);
zpp_status zpp_zero_backward_end(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err);
/* A backward that ended by an exception: what was not reduced is dropped. One rank drops what is being reduced, too,
 * and all gradients so far with it. */
void zpp_zero_backward_abort(zpp_zero *zero);
/* After a backward that reduces: this rank's reduced gradient, `shard_elems` of grad_dtype (stage 0: `elems`, all
 * shards). *present[params]: 1 if any rank had a gradient. NULL where no parameter of the unit had one. */
const void *zpp_zero_grad_shard(const zpp_zero *zero, int unit, const uint8_t **present);
/* The same where it can be read at any time; NULL in a file (zpp_zero_grad_copy reads there), or without a gradient. */
const void *zpp_zero_grad_address(const zpp_zero *zero, int unit);
/* Steps will be delayed: files hold two copies of every shard of gradients, and of every unit that is trained. Before
 * units are added. */
void zpp_zero_delay_steps(zpp_zero *zero);
size_t zpp_zero_back_bytes(const zpp_zero *zero); /* memory of the second shards */
/* Gradients in a file: addresses of shards can be read between open and close only, and are otherwise names for
 * struct zpp_step_files. Local. */
zpp_unit_file *zpp_zero_grad_file(const zpp_zero *zero); /* borrowed; NULL: they are in memory */
zpp_status zpp_zero_grad_open(zpp_zero *zero, int unit, struct zpp_err *err); /* a no-op where they are in memory */
zpp_status zpp_zero_grad_close(zpp_zero *zero, int unit, struct zpp_err *err);
/* All are written; nothing to do where they are in memory. The first failure since the last zpp_zero_clear_grads;
 * `fault` is written on status TIER only. */
zpp_status zpp_zero_grads_settle(zpp_zero *zero, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Elements of this rank's shard to (write: from) `memory`. */
zpp_status zpp_zero_grad_copy(zpp_zero *zero, int unit, size_t first, size_t elems, void *memory, bool write,
                              struct zpp_aio_fault *fault, struct zpp_err *err);
/* The model's buffers (exchange.c). Collective, once, after seal: memory for `count` buffers. */
zpp_status zpp_zero_make_buffers(zpp_zero *zero, const size_t *bytes, size_t count, struct zpp_err *err);
struct zpp_buffer {
    void *data; /* borrowed; NULL: not there, and left alone */
    size_t bytes;
};
/* Rank 0's to all; the sizes are those of make_buffers. Rank 0 waits only for ranks that still read the message
 * before. */
zpp_status zpp_zero_sync_buffers(zpp_zero *zero, const struct zpp_buffer *buffers, size_t count,
                                 const struct zpp_wait *wait, struct zpp_err *err);
/* Stage 0: where the unit's whole gradient lies, at the parameters' offsets; fixed from seal on. */
unsigned char *zpp_zero_whole_gradient(const zpp_zero *zero, int unit);
/* This rank's own gradient, not reduced: `elems` of the unit's kind at the parameters' offsets, zeros where `touched`
 * is 0; what lies between parameters is undefined. Until the next backward or clear. NULL: none. */
const void *zpp_zero_held_grad(const zpp_zero *zero, int unit, const uint8_t **touched);
/* Ranks on which the unit's gradient was not finite before the last sum, one bit each, the last for rank 63 and above
 * (origin.c). Stages 1 to 3: as far as this rank's shard shows. */
uint64_t zpp_zero_origins(const zpp_zero *zero, int unit);
/* True if gradients are given to zpp_zero_grad; else (one rank, memory) they stay with the caller. */
bool zpp_zero_takes_grads(const zpp_zero *zero);
/* False: one rank whose shards are where it computes, so its own gradients are the reduced ones. */
bool zpp_zero_reduces(const zpp_zero *zero);
/* True if gradients are to be reduced in every backward of a step, because held back they would fill the memory. */
bool zpp_zero_reduces_each_backward(const zpp_zero *zero);
zpp_dtype zpp_zero_grad_dtype(const zpp_zero *zero, int unit);
bool zpp_zero_has_grad(const zpp_zero *zero);
bool zpp_zero_grads_pending(const zpp_zero *zero); /* accumulated on this rank, not reduced */
void zpp_zero_set_grad_scale(zpp_zero *zero, double scale); /* multiplies the mean over ranks at the next reductions */
void zpp_zero_clear_grad(zpp_zero *zero, int unit, size_t param);
void zpp_zero_clear_grads(zpp_zero *zero);
/* A step inside the backward takes each unit's gradient when it is reduced. Stages 2 and 3: shards have memory from
 * their reduction until zpp_zero_drop_grad, and it is used again by the next units. Before seal. */
void zpp_zero_pool_grads(zpp_zero *zero);
/* Return the unit that this backward, or the one that has ended, reduced after the first `done` ones; -1: not yet, or
 * none is left. No rank reads it any more in this backward, and every rank finds the same order. */
int zpp_zero_next_reduced(zpp_zero *zero, int done);
/* The same in *unit, which is waited for if it went out. */
zpp_status zpp_zero_wait_reduced(zpp_zero *zero, int done, const struct zpp_wait *wait, int *unit, struct zpp_err *err);
zpp_status zpp_zero_drop_grad(zpp_zero *zero, int unit, struct zpp_err *err);
/* Shards in a file (nothing to do for others), after backward_begin: what this backward reduces is stepped inside it,
 * so a unit's shard is kept in memory from its reduction until zpp_zero_drop_grad, and not written. */
void zpp_zero_keep_grads(zpp_zero *zero);
/* Bring the shard of a unit to memory, once it is reduced, or at the end of that backward. Return the first failure of
 * a read or write before; `fault` is written on status TIER only. */
zpp_status zpp_zero_grad_load(zpp_zero *zero, int unit, struct zpp_aio_fault *fault, struct zpp_err *err);
bool zpp_zero_loads_grads(const zpp_zero *zero); /* true if zpp_zero_grad_load may have to wait for a file */

/* --- step (exchange.c) -------------------------------------------------------------------------------------------- */
/* Collective over the job: returns when no rank reads parameters any more, so that shards may be written. `vote`
 * travels along: votes[job ranks] (may be NULL) receives what every rank gave. */
zpp_status zpp_zero_step_begin(zpp_zero *zero, uint64_t vote, uint64_t *votes, const struct zpp_wait *wait,
                               struct zpp_err *err);
/* Collective over the job, after the data ranks have come to the same place, so that ranks that differ are noticed:
 * all[job ranks * bytes] = every rank's `mine`, in order of ranks; `bytes` is equal on all of them. */
zpp_status zpp_zero_agree(zpp_zero *zero, const void *mine, size_t bytes, void *all, const struct zpp_wait *wait,
                          struct zpp_err *err);
/* Collective: every data rank's sums of squares, a record a unit; all[ranks * bytes], in rank order. */
zpp_status zpp_zero_gather_norms(zpp_zero *zero, const void *mine, size_t bytes, void *all, const struct zpp_wait *wait,
                                 struct zpp_err *err);
/* Collective: returns when every shard is written, and replicated units are whole again everywhere. */
/* `by_grads`: the step changed units that have a gradient on some rank, and no others, which then are not sent. */
zpp_status zpp_zero_step_end(zpp_zero *zero, bool by_grads, const struct zpp_wait *wait, struct zpp_err *err);

/* --- what it holds ------------------------------------------------------------------------------------------------ */
struct zpp_zero_memory {
    size_t param_bytes;      /* shards, whole units, and this rank's share of shared copies */
    size_t gathered_bytes;   /* units that are full now, and warm slots */
    size_t grad_bytes;       /* reduced shards (stages 0, 1: whole gradients) */
    size_t bucket_bytes;     /* gradients not reduced yet, now */
    size_t bucket_peak_bytes, gathered_peak_bytes;
    size_t on_disk_bytes;      /* this rank's share of what is in the file of parameters */
    size_t pinned_bytes;       /* page-locked here for the accelerator: of all ranks' shards and buckets */
    size_t on_host_bytes;      /* of param_bytes: shards of units that are on the host, where the others' are not */
    size_t resident_bytes;     /* on an accelerator beside shards on the host: units that stay whole */
    size_t block_bytes;        /* there, too: gradients on their way down */
};
void zpp_zero_memory(const zpp_zero *zero, struct zpp_zero_memory *out);
/* Memory of the host that streams of the accelerator read and write, page-locked until destroy, which frees it. */
zpp_status zpp_zero_page_locked(zpp_zero *zero, size_t bytes, void **out, struct zpp_err *err);
/* Nanoseconds for which zpp_zero_need kept its callers, since the beginning. */
uint64_t zpp_zero_gather_ns(const zpp_zero *zero);

#endif
