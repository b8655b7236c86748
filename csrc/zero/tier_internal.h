/* SPDX-License-Identifier: Apache-2.0
 *
 * The tier's own state, shared by tier.c (life, layout, copies) and tier_step.c (the streamed step), and by nobody
 * else.
 */
#ifndef ZPP_ZERO_TIER_INTERNAL_H
#define ZPP_ZERO_TIER_INTERNAL_H

#include <stdatomic.h>

#include "tier.h"

enum { TIER_PAGE_ELEMS = 1024, TIER_PAGE_BYTES = 4096 };

struct tier_line {
    int kinds[ZPP_TIER_KINDS]; /* of the record, in order */
    int plane[ZPP_TIER_KINDS]; /* place of a kind in the record; -1: the line has none of it */
    size_t planes;
    size_t elems;          /* of all slices, rounded up to pages */
    size_t used_elems;     /* of all slices */
    size_t held_elems;     /* the first ones, in memory; whole pages */
    size_t chunk_elems;    /* of every chunk but the last */
    size_t chunks;
    uint64_t offset_bytes; /* of chunk 0 in the file */
    bool *stepped;         /* [chunks]: have its moments ever been written? */
    float *held;           /* [planes * held_elems] */
};

struct tier_slice {
    int line;
    size_t begin_elems, elems; /* on the line */
};

struct tier_buffer {
    float *memory; /* of the engine's arena; one record of the line with the largest */
    zpp_aio_request *read, *write;
};

struct zpp_tier {
    struct zpp_tier_options options;
    char *path;
    struct zpp_aio_sys sys;
    zpp_aio *aio;
    bool sealed;
    atomic_bool torn; /* this and the figures are read while a delayed step runs in a thread of its own */
    struct tier_line lines[2]; /* 0: with a master */
    struct tier_slice *slices;
    int slices_count, slices_room;
    struct tier_buffer *buffers;
    size_t record_bytes; /* of a buffer */
    uint64_t file_bytes;
    atomic_uint_fast64_t steps, step_ns, waited_ns;
};

static inline size_t tier_chunk_elems(const struct tier_line *line, size_t chunk) {
    const size_t left = line->elems - line->held_elems - chunk * line->chunk_elems;
    return left < line->chunk_elems ? left : line->chunk_elems;
}

static inline uint64_t tier_record_offset(const struct tier_line *line, size_t chunk) {
    return line->offset_bytes + (uint64_t)chunk * line->chunk_elems * line->planes * sizeof(float);
}

/* Submit one read or write of whole pages, or of anything else. */
zpp_status tier_submit(zpp_tier *tier, uint64_t offset_bytes, void *memory, size_t bytes, bool write,
                       zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Wait for *request (NULL is fine), release it and forget it. */
zpp_status tier_finish(zpp_aio_request **request, struct zpp_aio_fault *fault, struct zpp_err *err);

#endif
