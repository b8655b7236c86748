/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of the exchange of rows: what rows.c, rows_phase.c and rows_device.c share.
 */
#ifndef ZPP_COMM_ROWS_INTERNAL_H
#define ZPP_COMM_ROWS_INTERNAL_H

#include "internal.h"
#include "rows.h"

enum zpp_row_phase_kind {
    ZPP_ROW_DISPATCH = 1, /* choices, and tokens in host memory */
    ZPP_ROW_COMBINE,
    ZPP_ROW_COMBINE_BACKWARD,
    ZPP_ROW_WEIGHTS_BACKWARD,
    ZPP_ROW_DISPATCH_BACKWARD,
    ZPP_ROW_TOKENS, /* on GPUs: tokens, when all ranks know where these go */
    ZPP_ROW_OPEN,
};

struct zpp_rows_slot {
    zpp_block *block;
    uint64_t seq; /* of the phase that it was published for */
};

struct zpp_rows_layer {
    char *name;
    uint64_t calls;
};

struct zpp_rows_device; /* rows_device.c */

struct zpp_rows {
    struct zpp_comm *comm; /* NULL: one rank */
    size_t ranks, rank;
    zpp_desc_ring *ring;
    struct zpp_rows_device *device; /* NULL: none was opened */
    struct zpp_rows_slot slots[2];
    struct zpp_rows_layer *layers;
    uint32_t layers_count;
    _Atomic bool busy;
    bool broken;   /* a phase failed: the ranks' numbers may differ from now on */
    bool gathered; /* no dispatch is half done */
    /* The dispatch in progress. */
    struct zpp_desc desc;
    uint64_t seq;
    const void *bases[ZPP_RANKS_MAX];
    const int32_t *chosen[ZPP_RANKS_MAX];
    size_t tokens[ZPP_RANKS_MAX];
    int64_t rows_of[ZPP_RANKS_MAX], *counts;
    size_t counts_capacity;
};

/* One rank's memory of a phase, before it is published: `count` items of one array or two. */
struct zpp_row_memory {
    const void *first, *second; /* NULL: none */
    size_t count, first_item_bytes, second_item_bytes;
    size_t most_count; /* of all ranks; for device memory */
};

struct zpp_row_phase {
    struct zpp_desc desc;
    uint64_t seq;
    uint64_t number; /* among the phases of a device */
    bool in_place;   /* peers read the caller's own memory */
    const void *first[ZPP_RANKS_MAX], *second[ZPP_RANKS_MAX];
    size_t count[ZPP_RANKS_MAX];
};

/* The second array begins at a line of its own. */
static inline size_t zpp_rows_whole_lines(size_t bytes) {
    return (bytes + ZPP_LINE_BYTES - 1) & ~(size_t)(ZPP_LINE_BYTES - 1);
}

/* --- rows_phase.c ------------------------------------------------------------------------------------------------- */

/* One caller at a time. */
zpp_status zpp_rows_enter(struct zpp_rows *rows, struct zpp_err *err);
zpp_status zpp_rows_enter_phase(struct zpp_rows *rows, struct zpp_err *err); /* and no failure left it half-way */
zpp_status zpp_rows_leave(struct zpp_rows *rows, zpp_status status);         /* returns `status` */
/* Post a descriptor that says how many items this rank has, and nothing of where; read those of all ranks. */
zpp_status zpp_rows_tell(struct zpp_rows *rows, struct zpp_row_phase *phase, size_t count, const struct zpp_wait *wait,
                         struct zpp_err *err);
/* A phase of host memory: publish it, and find where that of all ranks lies. */
zpp_status zpp_rows_host_begin(struct zpp_rows *rows, struct zpp_row_phase *phase, const struct zpp_row_memory *memory,
                               zpp_pool *pool, const struct zpp_wait *wait, struct zpp_err *err);
/* This rank has read what it needs. Memory of the caller is not given back before all peers have. */
zpp_status zpp_rows_host_end(struct zpp_rows *rows, const struct zpp_row_phase *phase, const struct zpp_wait *wait,
                             struct zpp_err *err);

/* --- rows_device.c ------------------------------------------------------------------------------------------------ */

void zpp_rows_device_destroy(struct zpp_rows_device *on); /* NULL is fine */
/* A phase of device memory: publish it, and order the stream after all ranks' doing so. What is published seldom needs
 * more memory than before. Then all ranks make some, and their hosts wait for their streams. */
zpp_status zpp_rows_device_begin(struct zpp_rows *rows, struct zpp_row_phase *phase,
                                 const struct zpp_row_memory *memory, void *native, const struct zpp_wait *wait,
                                 struct zpp_err *err);
void zpp_rows_device_end(struct zpp_rows *rows, const struct zpp_row_phase *phase); /* its kernel is enqueued */
struct zpp_moe_peer_cuda zpp_rows_device_on(const struct zpp_rows *rows, void *native); /* for the kernels */

#endif
