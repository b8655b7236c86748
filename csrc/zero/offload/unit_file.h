/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters in a tier: units whose values live in a scratch file and come to memory while they are needed (the
 * infinity offload engine of ZeRO-Infinity, arXiv:2104.07857, section 5).
 *
 * All such units lie one after the other, at pages, in one range of addresses, their *mapping*; what the optimizer and
 * the modules see are views of it. Its first resident_bytes stay in memory, the rest is in the file, in the same order,
 * without the gaps that the mapping has before large units.
 *
 *   mapping   | unit 0 .... | unit 1 ...... | unit 2 ........... |
 *             | resident in memory     | in the file              |
 *                                      resident_bytes: (1 - fraction) of the bytes, whole pages
 *
 * A load reads the unit's bytes from the file straight to their mapping, without a copy. The ranks of a host share the
 * mapping and the file: the first rank that needs a unit reads it for all, the last one that releases it gives the
 * memory back. So a pass reads every byte once however many ranks there are, no rank waits for a partner's call, and
 * what is gathered is held once a host.
 *
 *   users of a unit   0 --acquire--> 1 .. ranks --release--> 0      -1: the last one is giving its pages back
 *   its contents      EMPTY --one rank begins--> LOADING --> LOADED
 *
 * Writers: each rank its own shards, between zpp_zero_step_begin and _end, while no rank has acquired a unit.
 *
 * For a step that runs while units are loaded (step_delayed.h) the file has two copies of a unit: loads and copies use
 * the *current* one, the step writes the *next* one, and a flip exchanges the two.
 *
 *   file   | first copies of all units | second ones of those that were asked for |
 *
 * With several folders, one for each disk, the file is striped over them (aio/file.h): a unit's bytes come from all.
 *
 * Threads: one thread a rank at a time; beside it another one that steps (the windows, zpp_unit_file_carry), and
 * figures from any.
 */
#ifndef ZPP_ZERO_UNIT_FILE_H
#define ZPP_ZERO_UNIT_FILE_H

#include "../../aio/engine.h"
#include "../../comm/comm.h"
#include "../../ops/optim/optim.h"
#include "pipeline.h"

typedef struct zpp_unit_file zpp_unit_file;

/* `fraction` of the bytes goes to the file, above 0 and at most 1. `comm`: borrowed until destroy; NULL: one rank. New;
 * free with zpp_unit_file_destroy (NULL is fine). */
zpp_status zpp_unit_file_create(zpp_comm *comm, double fraction, zpp_unit_file **out, struct zpp_err *err);
void zpp_unit_file_destroy(zpp_unit_file *unit_file);
/* All units so far stay in memory, and `fraction` is of those that come now. Before seal, once; not with quantised
 * copies. */
zpp_status zpp_unit_file_hold(zpp_unit_file *unit_file, struct zpp_err *err);
/* One unit; the same on every rank. `*unit` counts from 0, `*offset_bytes` is its place in the mapping. Before seal. */
zpp_status zpp_unit_file_add(zpp_unit_file *unit_file, size_t bytes, int *unit, size_t *offset_bytes,
                             struct zpp_err *err);
/* Units that are only read, kept in fewer bits (unit_file_qcopy.c): matrices as codes of 8 or 4 bits with an fp32 scale
 * for every `block_elems` (ops/quant/quant.h, symmetric), everything else as it is. What is at mapping after a load is
 * rounded; bytes read are those of the quantised copies. Of their bytes `fraction` is in the file, and the first ones
 * in memory, which the ranks of the host share. `in_memory`: there is no file, all quantised copies are there, and none
 * of the first units, whole ones, which are held as values (rounded alike). Before units are added. */
zpp_status zpp_unit_file_set_qcopies(zpp_unit_file *unit_file, int bits, size_t block_elems, bool in_memory,
                                     struct zpp_err *err);
bool zpp_unit_file_keeps_qcopies(const zpp_unit_file *unit_file);
/* The file has two copies of that unit. Before seal; not with quantised copies. */
zpp_status zpp_unit_file_double_buffer(zpp_unit_file *unit_file, int unit, struct zpp_err *err);
/* Elements of a unit that are to be kept so, in ascending order. Before seal. */
zpp_status zpp_unit_file_add_span(zpp_unit_file *unit_file, int unit, size_t offset_bytes, size_t elems,
                                  zpp_dtype dtype, struct zpp_err *err);
/* Rank 0 (`any_rank`: this one, alone of those that have the unit) keeps what it has at mapping of a unit that is
 * acquired; the other ranks do nothing. */
zpp_status zpp_unit_file_keep_qcopy(zpp_unit_file *unit_file, int unit, bool any_rank, struct zpp_aio_fault *fault,
                                    struct zpp_err *err);
/* Collective: the mapping. `warm_bytes` of pages that were given back may be kept for the next load (one rank only). */
zpp_status zpp_unit_file_seal(zpp_unit_file *unit_file, size_t warm_bytes, struct zpp_err *err);
unsigned char *zpp_unit_file_mapping(const zpp_unit_file *unit_file);
/* True if all of a unit is resident: it is never acquired. */
bool zpp_unit_file_is_held(const zpp_unit_file *unit_file, int unit);
/* True if the address is of the mapping, and its bytes are in the file and not resident. */
bool zpp_unit_file_on_disk(const zpp_unit_file *unit_file, const void *address);

/* Start the engine on the file, whose owner removes it. Local; zeros are its contents. `make`: make it, on one rank
 * before the others open it, at its full length with every block reserved. Stripes are at most ZPP_AIO_STRIPE_BYTES.
 * The ranks of a host keep the checksums together. */
zpp_status zpp_unit_file_open(zpp_unit_file *unit_file, const struct zpp_scratch_options *options, bool make,
                              struct zpp_aio_fault *fault, struct zpp_err *err);
/* End the engine; loads fail from then on. The mapping stays. */
void zpp_unit_file_close(zpp_unit_file *unit_file);

/* --- loading ------------------------------------------------------------------------------------------------------ */
/* Memory for the unit at its mapping. */
zpp_status zpp_unit_file_acquire(zpp_unit_file *unit_file, int unit, struct zpp_err *err);
/* This rank reads it no more. */
zpp_status zpp_unit_file_release(zpp_unit_file *unit_file, int unit, struct zpp_err *err);
/* After acquire: begin to read, unless another rank does. zpp_unit_file_read_status returns what fails here. */
void zpp_unit_file_read_begin(zpp_unit_file *unit_file, int unit);
/* One rank only, of a unit that it has acquired: begin to write it. It arrives as a load does. */
void zpp_unit_file_write_unit(zpp_unit_file *unit_file, int unit);
/* OK: the load has ended, well or badly. AGAIN (`wait` NULL only): it has not. */
zpp_status zpp_unit_file_read_wait(zpp_unit_file *unit_file, int unit, const struct zpp_wait *wait);
/* The byte of the unit whose value is at byte `into_bytes` of what a load reads, as a fault counts them. */
size_t zpp_unit_file_value_at(const zpp_unit_file *unit_file, int unit, size_t into_bytes);
/* How the last load, or write, ended. `*fault` (may be NULL) is written on status TIER only. */
zpp_status zpp_unit_file_read_status(const zpp_unit_file *unit_file, int unit, struct zpp_aio_fault *fault,
                                     struct zpp_err *err);

/* True if nothing is under way between this rank and the file. Any thread. */
bool zpp_unit_file_is_idle(const zpp_unit_file *unit_file);

/* --- parts of units (unit_file_part.c) --------------------------------------------------------------------------- */
/* Some bytes of a unit on their way to memory, such as the parameters of one expert; the rest of it is not read. */
typedef struct zpp_unit_file_part zpp_unit_file_part;
/* Begin to read [offset_bytes, offset_bytes + bytes) of a unit, acquired or not, to `memory`, which is borrowed until
 * _end. What is kept in fewer bits is read in whole blocks of one matrix, and rounded like the whole unit. */
zpp_status zpp_unit_file_part_begin(zpp_unit_file *unit_file, int unit, size_t offset_bytes, void *memory,
                                    size_t bytes, zpp_unit_file_part **out, struct zpp_aio_fault *fault,
                                    struct zpp_err *err);
/* Where memory for parts comes from that the engine knows: reads then need not look up its pages. NULL: no engine. */
zpp_aio_arena *zpp_unit_file_part_arena(const zpp_unit_file *unit_file);
/* Wait, and free the part: the values are at `memory`. NULL is fine. */
zpp_status zpp_unit_file_part_end(zpp_unit_file_part *part, struct zpp_aio_fault *fault, struct zpp_err *err);

/* --- shards ------------------------------------------------------------------------------------------------------- */
/* Bytes of the mapping to (write: from) `memory`, which is not in the mapping; units need not be acquired. */
zpp_status zpp_unit_file_copy(zpp_unit_file *unit_file, size_t offset_bytes, void *memory, size_t bytes, bool write,
                              struct zpp_aio_fault *fault, struct zpp_err *err);
/* Bytes of a unit that this rank has acquired, to the file. */
zpp_status zpp_unit_file_write_back(zpp_unit_file *unit_file, size_t offset_bytes, size_t bytes,
                                    struct zpp_aio_fault *fault, struct zpp_err *err);

/* Begin to write bytes of a unit that this rank has acquired, and does not release before zpp_unit_file_write_wait; one
 * range at a time. */
zpp_status zpp_unit_file_write_begin(zpp_unit_file *unit_file, int unit, size_t offset_bytes, size_t bytes,
                                     struct zpp_aio_fault *fault, struct zpp_err *err);
/* How that ended; OK where nothing is under way. */
zpp_status zpp_unit_file_write_wait(zpp_unit_file *unit_file, int unit, struct zpp_aio_fault *fault,
                                    struct zpp_err *err);

/* --- the step (unit_file_step.c) ---------------------------------------------------------------------------------- */
/* How many of `elems` elements at `address` are all resident, or all in the file; all of them where `address` is not in
 * the mapping. */
size_t zpp_unit_file_run(const zpp_unit_file *unit_file, const void *address, size_t elems, size_t elem_bytes);

/* The files of a step's parameters and gradients; NULL: they are in memory. */
struct zpp_step_files {
    zpp_unit_file *params;
    zpp_unit_file *grads; /* see grad_file.c */
    bool next;        /* parameters are written to the units' next copies (zpp_unit_file_double_buffer) */
};
/* Windows: segments whose parameters or gradients are in a file are stepped in buffers instead, ZPP_UNIT_FILE_WINDOWS
 * of them, so that reads, computation and writes overlap. A segment's parameters are `param` where that is an address
 * of the mapping (fp32, read and written), or else `param_out` (a low-precision copy, only written). Gradients are
 * read. */
enum { ZPP_UNIT_FILE_WINDOWS = 4 };
/* Waits for what the window wrote before; gives the segments (`count`, `stride_bytes` apart) addresses in its buffer;
 * begins to read what they need. No segment is partly resident. */
zpp_status zpp_unit_file_window_open(const struct zpp_step_files *files, size_t window, struct zpp_optim_segment *first,
                                     size_t count, size_t stride_bytes, struct zpp_aio_fault *fault,
                                     struct zpp_err *err);
/* Before the segments are stepped. */
zpp_status zpp_unit_file_window_ready(const struct zpp_step_files *files, size_t window, struct zpp_aio_fault *fault,
                                      struct zpp_err *err);
/* After: begins to write. */
zpp_status zpp_unit_file_window_write(const struct zpp_step_files *files, size_t window, struct zpp_aio_fault *fault,
                                      struct zpp_err *err);
/* Nothing is under way afterwards. A failure, unless `status` is one already. */
zpp_status zpp_unit_file_settle(const struct zpp_step_files *files, zpp_status status, struct zpp_aio_fault *fault,
                                struct zpp_err *err);

/* zpp_optim_step for segments whose states are in memory, through windows where there are files; the same bits.
 * `*inconsistent`: some parameters were stepped and others not. `segments` is changed. */
zpp_status zpp_unit_file_step(const struct zpp_step_files *files, struct zpp_optim_segment *segments, size_t count,
                              float grad_scale, zpp_pool *pool, bool *inconsistent, struct zpp_aio_fault *fault,
                              struct zpp_err *err);

/* Beside a step that writes next copies: these bytes of the mapping, of one unit and in the file, are not stepped, and
 * stay as they are. Goes through a small buffer, and waits. */
zpp_status zpp_unit_file_carry(zpp_unit_file *unit_file, const void *address, size_t bytes, struct zpp_aio_fault *fault,
                               struct zpp_err *err);
/* Exchange the unit's current and next copy. On every rank that has the file in common, while no rank has acquired the
 * unit and no step runs. */
void zpp_unit_file_flip(zpp_unit_file *unit_file, int unit);

struct zpp_unit_file_figures {
    size_t mapping_bytes, resident_bytes; /* of this host's ranks together */
    size_t acquired_bytes, acquired_peak_bytes; /* this rank reads now, in the file's part */
    size_t memory_bytes; /* of what was acquired, and of warm pages */
    size_t second_bytes; /* in the file, of second copies */
    size_t window_bytes;
    size_t qcopies_bytes, staging_bytes; /* of all units; of quantised copies on their way */
    size_t qcopies_held_bytes;           /* of those of all units, in memory */
    uint64_t read_bytes, written_bytes; /* by this rank, so far */
    uint64_t checked_bytes;             /* of those read */
    size_t sums_bytes;                  /* of checksums, in memory; of this host's ranks together */
    uint64_t loads, load_wait_ns;       /* waited for loads */
    uint64_t step_wait_ns;              /* waited inside steps */
    bool uring;
};
void zpp_unit_file_figures(const zpp_unit_file *unit_file, struct zpp_unit_file_figures *out);

#endif
