/* SPDX-License-Identifier: Apache-2.0
 *
 * A unit: parameters of one element kind that are gathered, reduced and stepped together. They lie one after the other
 * in one flat buffer; rank r owns the r-th of N equal shards of it (bandwidth-centric partitioning, ZeRO-Infinity 6.1):
 *
 *   | p0 .. | p1 ...... | p2 . | padding |          elems = N * shard_elems
 *   |  shard of 0   |   shard of 1       |          a shard may cut a parameter anywhere
 *
 * Parameters start at 64 bytes, shards at 64 bytes, or at a page where they are large, so that AVX-512 and O_DIRECT
 * fit.
 */
#ifndef ZPP_ZERO_UNIT_H
#define ZPP_ZERO_UNIT_H

#include <stdbool.h>
#include "../base/device.h"
#include "../base/dtype.h"
#include "../base/status.h"

/* Where a unit's parameters live. */
enum zpp_place {
    ZPP_PLACE_WHOLE, /* every rank holds all of it (stages 0-2, one rank, small units) */
    ZPP_PLACE_HOST,  /* the ranks of this host share one copy in shared memory; nothing is ever gathered */
    ZPP_PLACE_SHARD, /* a rank holds its shard, and gathers the rest when it is needed */
    /* the ranks of this host share a file, and read a unit from it when it is needed (unit_file.h); over several hosts
     * a rank's shard lies in a file of its own, and is gathered (rank_file.h) */
    ZPP_PLACE_FILE,
};

enum zpp_unit_state { ZPP_UNIT_PARTITIONED, ZPP_UNIT_FETCHING, ZPP_UNIT_FULL };

/* A part of one parameter that lies in one shard. */
struct zpp_piece {
    size_t param;        /* index in the unit */
    size_t offset_elems; /* from the start of the unit's flat buffer */
    size_t elems;
};

struct zpp_unit {
    /* what it is: written at zpp_zero_add_unit, read by anybody */
    int index;
    char name[120];
    zpp_dtype dtype;
    size_t elem_bytes;
    zpp_dtype grad_dtype, wire_dtype; /* see struct zpp_unit_spec */
    bool trainable; /* gets gradients; changes in zpp_zero_unfreeze only */
    bool frozen_reserved;    /* does not yet, and has room to */
    enum zpp_place place;
    size_t params;
    size_t *param_elems;  /* [params] */
    size_t *offset_elems; /* [params] in the flat buffer */
    size_t elems, shard_elems;

    /* where it is: written at zpp_zero_seal (whole: also by a gather on devices whose backing moves) */
    unsigned char *whole; /* the flat buffer that the parameters are views of; readable while FULL */
    unsigned char *shard; /* this rank's shard; always readable */
    size_t region_offset_bytes;
    size_t range_offset_bytes;
    size_t image_offset_bytes; /* SHARD units that travel quantised: see wire.h */

    /* gathering: the coordinator's thread only */
    enum zpp_unit_state state;
    int pins;    /* forwards of it that are open now */
    bool sticky; /* whole until values change: a graph needs it, and no hook gathers it again for that graph */
    bool mapped; /* has memory in the range */
    bool kept;   /* FILE units: the backward that follows needs it soon, so that a release keeps its memory, */
    bool kept_over_step; /* ... or the forward after a step inside the backward */
    int file_index;   /* FILE units: their number there, */
    size_t file_offset_bytes;   /* their place in its mapping, or that of this rank's shard, */
    struct zpp_unit_file *rank_file; /* and over several hosts: where that is */
    bool open_shard; /* ... and in memory, for a step inside the backward */
    bool held;   /* a FILE unit that lies in memory for good */
    uint8_t *stored_low; /* FILE units, [params]: is it kept in fewer bits? NULL: none is */
    int uses;    /* forwards since the last backward, of units that nothing is reduced for (one rank, frozen) */
    bool rounded;     /* fetched quantised: see wire.h */
    bool wants_exact; /* the next fetch is not to be */
    zpp_event *allocated, *ready;
    struct zpp_work *arriving; /* over several hosts: the gather under way */
    bool arriving_near;        /* ... among this host's ranks */
    unsigned char *second;     /* hpZ: this rank's part of the host's copy, see secondary.h */
    bool secondary_kept;          /* ... has the values of now */

    /* gradients: see reduce.h */
    struct zpp_unit_grad *grad;
};

/* Lay out `params` parameters of the given sizes for `ranks` ranks. Fills offset_elems; outputs last. */
void zpp_unit_layout(size_t params, const size_t *param_elems, size_t elem_bytes, int ranks, size_t *offset_elems,
                     size_t *elems, size_t *shard_elems);

/* The pieces of shard `rank`, in order; `pieces` has room for unit->params. Returns how many. */
size_t zpp_unit_pieces(const struct zpp_unit *unit, int rank, struct zpp_piece *pieces);

/* words.c, for messages in the user's words: "module 'a'", "modules 'a', 'b'", or "the model" for what lies in no other
 * module. Returns `text`. */
enum { ZPP_UNIT_WORDS = 160 };
const char *zpp_unit_words(const struct zpp_unit *unit, char *text, size_t room);

size_t zpp_unit_bytes(const struct zpp_unit *unit);
/* Does its memory come and go? */
static inline bool zpp_unit_moves(const struct zpp_unit *unit) {
    return unit->place == ZPP_PLACE_SHARD || (unit->place == ZPP_PLACE_FILE && !unit->held);
}
size_t zpp_unit_shard_bytes(const struct zpp_unit *unit);

#endif
