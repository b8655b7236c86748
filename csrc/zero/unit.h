/* SPDX-License-Identifier: Apache-2.0
 *
 * A unit: parameters of one dtype that are gathered, reduced and stepped together. They lie one after the other in one
 * flat buffer; rank r of its group's N owns the r-th of N equal shards of it (bandwidth-centric partitioning,
 * ZeRO-Infinity 6.1; group.h says which ranks):
 *
 *   | p0 .. | p1 ...... | p2 . | padding |          elems = N * shard_elems
 *   |  shard of 0   |   shard of 1       |          a shard may cut a parameter anywhere
 *
 * Parameters start at 64 bytes, shards at 64 bytes, or at a page where they are large, so that AVX-512 and O_DIRECT
 * fit.
 *
 * Its life. Parameters, gradient and shard change state independently: a unit can be gathered while its gradient is
 * accumulated. unit.c makes every move and is the only file that writes these states; how a unit is gathered is the
 * business of its placement (placement.h).
 *
 *   parameters       gather_begin            gather_end
 *         SHARDED ----------------> GATHERING ---------> GATHERED
 *            ^                       |     ^               |  |
 *            +--- its read failed ---+     +-- release of a   |
 *            |                                 kept unit      |
 *            +------------------ release ---------------------+
 *
 *   Units that never move (placement->moves is false) are GATHERED from zpp_zero_seal on. A release does nothing while
 *   a unit is pinned, sticky, or not GATHERED. A kept unit has its values already: gather_end only waits for `ready`.
 *
 *   gradient         accumulate               reduce              reduced
 *           EMPTY ----------------> ACCUMULATING --------> REDUCING -----> REDUCED
 *             ^  |                    |  ^   |                |             |   |
 *             |  +----- reduce (no gradient on this rank) --->+<------------+   |
 *             +------- discard -------+  +-------------- accumulate ------------+
 *
 *   accumulate: the first gradient of a backward.  reduce: the bucket goes out, in the order of reductions.
 *   reduced: zpp_zero_backward_end, on all ranks.  discard: the backward was aborted, or the gradients were cleared.
 *   Errors (status STATE): a gradient while REDUCING; a backward that begins while one is REDUCING, because the last
 *   one ended by an exception; unfreezing inside a backward. With one rank nothing is reduced, and units stay EMPTY.
 *
 *   shard            zpp_zero_step_begin, zpp_zero_shard_open
 *         AT REST <-------------------------------------------> STEPPING
 *                    zpp_zero_step_end, zpp_zero_shard_write_wait
 *
 *   step_begin and step_end move the shards of all units, the other two the shard of one (`stepping`), inside a
 *   backward. Errors: to open a shard twice. No unit is gathered between step_begin and step_end.
 */
#ifndef ZPP_ZERO_UNIT_H
#define ZPP_ZERO_UNIT_H

#include <assert.h>
#include <stdbool.h>
#include "../base/device.h"
#include "../base/dtype.h"
#include "../base/status.h"

struct zpp_zero;
struct zpp_group;
struct zpp_unit_grad;

/* Where a unit's parameters are to live; zero.c chooses the placement from it (placement.h). */
enum zpp_place {
    ZPP_PLACE_WHOLE, /* every rank holds all of it (stages 0-2, one rank, small units) */
    ZPP_PLACE_HOST,  /* the ranks of this host share one copy in shared memory; nothing is ever gathered */
    ZPP_PLACE_SHARD, /* a rank holds its shard, and gathers the rest when it is needed */
    ZPP_PLACE_FILE,  /* in a file: of the host, or of this rank (placement/nvme.c, placement/nvme_net.c) */
};

enum zpp_unit_state { ZPP_UNIT_SHARDED, ZPP_UNIT_GATHERING, ZPP_UNIT_GATHERED };
enum zpp_grad_state { ZPP_GRAD_EMPTY, ZPP_GRAD_ACCUMULATING, ZPP_GRAD_REDUCING, ZPP_GRAD_REDUCED };

/* A part of one parameter that lies in one shard. */
struct zpp_piece {
    size_t param;        /* index in the unit */
    size_t offset_elems; /* from the start of the unit's flat buffer */
    size_t elems;
};

/* The node of autograd that reads a unit: its number, the task that it runs in, and the outermost task around that. */
struct zpp_reader {
    long outermost, task;
    unsigned long long node;
};

/* What messages call a parameter. One with experts has `row_elems` elements of each, and the first of them has the
 * number first_row; else row_elems is 0. */
struct zpp_param_name {
    char *text; /* owned; NULL: not known */
    size_t row_elems, first_row;
};

struct zpp_unit {
    /* what it is: written at zpp_zero_add_unit, read by any file */
    struct zpp_zero *zero;
    int index;
    char name[120];
    zpp_dtype dtype;
    size_t elem_bytes;
    zpp_dtype grad_dtype, wire_dtype; /* see struct zpp_unit_spec */
    bool trainable;       /* gets gradients; changes in zpp_zero_unfreeze only */
    bool frozen_reserved; /* gets none yet, and has addresses for them */
    bool held, on_host;   /* see struct zpp_unit_spec */
    bool is_copy;         /* other ranks of the job have the same parameters, and count them in the norm */
    enum zpp_place place;
    const struct zpp_placement *placement;
    const struct zpp_group *group; /* the ranks that partition it; borrowed from the coordinator */
    size_t params;
    size_t *param_elems;  /* [params] */
    size_t *offset_elems; /* [params] in the flat buffer */
    size_t elems, shard_elems;
    struct zpp_param_name *names; /* [params]; NULL: not known */

    /* where it is: written at zpp_zero_seal (whole: also by a gather on devices whose backing moves) */
    unsigned char *whole; /* the flat buffer that the parameters are views of; readable while GATHERED */
    unsigned char *shard; /* this rank's shard; readable always, or while open where it lives in a file */
    size_t region_offset_bytes;
    bool shared; /* by several modules */
    size_t range_offset_bytes; /* from zero->moving_base */
    int wrap_at;               /* its number in zero->wrap */
    size_t qcopy_offset_bytes; /* of the shard's quantised copy: see wire.c */

    /* gathering: the coordinator's thread only, by unit.c and the placement */
    enum zpp_unit_state state;
    int pins;            /* calls that compute with it now; see zpp_unit_pin */
    bool sticky;         /* whole until values change: a graph needs it, and no hook gathers it again for that graph */
    bool mapped;         /* has memory in the range */
    bool kept;           /* its release keeps its memory, because the backward that follows needs it soon, */
    bool kept_over_step; /* ... or the forward after a step inside the backward */
    bool masked;         /* the layers that read it are left out of this pass (layer dropping) */
    bool stepping;       /* its shard is open, for a step inside the backward */
    int uses;            /* forwards since the last backward, of units that nothing is reduced for (one rank, frozen) */
    bool used_unseen;    /* one of them was in a forward without a graph of its own, which a nested backward repeats */
    struct zpp_reader reader; /* what read it last in a backward, where several graphs use units (evict.c) */
    uint64_t read_number;     /* ... in the order of reads */
    int forwards;        /* ... of the model in an open pass, that the uses were counted in; 0: one (pass.c) */
    bool awaits_graphs;  /* ... other graphs of it give this unit gradients, too */
    bool quantised;      /* gathered quantised: see wire.c */
    bool wants_exact;    /* the next gather is not to be */
    zpp_event *allocated, *ready;
    zpp_event *staged; /* of the host (placement/nvme_up.c); NULL elsewhere */
    int staging_at;    /* where the collective under way ends (placement/offloaded_net.c) */
    struct zpp_work *gather_work; /* over several hosts: the collective under way */
    bool gathers_intranode;       /* ... among this host's ranks */
    unsigned char *secondary;     /* hpZ: this rank's secondary shard (placement/sharded_net.c) */
    bool secondary_kept;          /* ... has the values of now */

    /* in a file (placement/nvme.c): which, its number there, and the place of this rank's shard in the file's mapping;
     * the file has `file_elems` elements of the unit, from `file_first_elem` on, at file_offset_bytes */
    struct zpp_unit_file *file; /* NULL: in none */
    int file_index;
    size_t file_offset_bytes, file_first_elem, file_elems, shard_offset_bytes;
    uint8_t *quantised_params; /* [params]: 1 if it is kept in fewer bits; NULL: none is */

    /* gradients: see reduce.h */
    struct zpp_unit_grad *grad;
};

/* --- layout ------------------------------------------------------------------------------------------------------- */
/* Lay out `params` parameters of the given sizes for `ranks` ranks. Fills offset_elems; outputs last. */
void zpp_unit_layout(size_t params, const size_t *param_elems, size_t elem_bytes, int ranks, size_t *offset_elems,
                     size_t *elems, size_t *shard_elems);
/* Return the place of `bytes` bytes behind *used_bytes, which grows: at a page for units of some size, for O_DIRECT
 * and huge pages, else at a cache line. */
size_t zpp_unit_next_offset(size_t *used_bytes, size_t bytes);

/* The pieces of shard `rank`, in order; `pieces` has capacity for unit->params. Returns how many. */
size_t zpp_unit_pieces(const struct zpp_unit *unit, int rank, struct zpp_piece *pieces);

/* A unit for messages, by the names of modules that the user gave: "module 'a'", "modules 'a', 'b'", or "the model" for
 * what lies in no other module. Returns `text`. */
enum { ZPP_UNIT_WORDS = 160 };
const char *zpp_unit_words(const struct zpp_unit *unit, char *text, size_t capacity);
/* The parameter that has a byte of the unit, with the number of its expert: "'mlp.experts.down_proj[5]'". False: not
 * known. */
bool zpp_unit_words_at(const struct zpp_unit *unit, size_t offset_bytes, char *text, size_t capacity);
/* Return `status`. To the error of a device, say at which unit it was noticed, or only in what if `unit` is NULL: the
 * driver does not tell what was at fault, only that something before the call was. `doing`: such as "the forward". */
zpp_status zpp_unit_noticed(const struct zpp_unit *unit, const char *doing, zpp_status status, struct zpp_err *err);

size_t zpp_unit_bytes(const struct zpp_unit *unit);
size_t zpp_unit_shard_bytes(const struct zpp_unit *unit);
bool zpp_unit_moves(const struct zpp_unit *unit);   /* true if it is gathered and released */
bool zpp_unit_in_file(const struct zpp_unit *unit); /* true if its values live in a file */
/* True if a step inside the backward opens the shard, and writes it to its file. */
bool zpp_unit_opens_shard(const struct zpp_unit *unit);

/* --- moves of the parameters -------------------------------------------------------------------------------------- */
/* SHARDED -> GATHERING: the memory of the whole unit, and begin to fill it. Stays SHARDED where that fails. */
zpp_status zpp_unit_gather_begin(struct zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* GATHERING -> GATHERED: the computation may use it. AGAIN (`wait` NULL only), timeouts and interrupts leave it
 * GATHERING; a read that failed gives its memory back, SHARDED, and is returned. */
zpp_status zpp_unit_gather_end(struct zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                               struct zpp_err *err);
/* GATHERED -> SHARDED, or GATHERING where it is kept; nothing to do for units that are pinned, sticky or in another
 * state. */
zpp_status zpp_unit_release(struct zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* GATHERING -> SHARDED: nothing needs what was read ahead. */
zpp_status zpp_unit_drop_ahead(struct zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err);
/* Whether a release keeps the unit's memory. */
void zpp_unit_set_kept(struct zpp_zero *zero, struct zpp_unit *unit, bool kept);
/* True if the unit is counted in ahead_bytes already, or fits into prefetch_bytes besides what is. */
bool zpp_unit_fits_ahead(const struct zpp_zero *zero, const struct zpp_unit *unit);

static inline void zpp_unit_pin(struct zpp_unit *unit) { unit->pins++; }
static inline void zpp_unit_unpin(struct zpp_unit *unit) {
    assert(unit->pins > 0);
    unit->pins--;
}
static inline bool zpp_unit_is_gathered(const struct zpp_unit *unit) { return unit->state == ZPP_UNIT_GATHERED; }

/* --- moves of the gradient ---------------------------------------------------------------------------------------- */
void zpp_unit_grad_accumulate(struct zpp_unit_grad *grad); /* EMPTY, REDUCED -> ACCUMULATING */
void zpp_unit_grad_reduce(struct zpp_unit_grad *grad);     /* EMPTY, ACCUMULATING, REDUCED -> REDUCING */
void zpp_unit_grad_reduced(struct zpp_unit_grad *grad);    /* REDUCING -> REDUCED */
void zpp_unit_grad_discard(struct zpp_unit_grad *grad);    /* ACCUMULATING -> EMPTY */

#endif
