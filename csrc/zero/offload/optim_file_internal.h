/* SPDX-License-Identifier: Apache-2.0
 *
 * The tier's own state, shared by optim_file.c (life, layout, copies), optim_file_step.c (the streamed step) and
 * optim_file_step_in_backward.c (the step unit by unit), and by no other file.
 */
#ifndef ZPP_ZERO_OPTIM_FILE_INTERNAL_H
#define ZPP_ZERO_OPTIM_FILE_INTERNAL_H

#include <stdatomic.h>

#include "optim_file.h"
#include "pipeline.h"

enum { TIER_PAGE_ELEMS = 1024, TIER_PAGE_BYTES = 4096 };

struct record_stream {
    int kinds[ZPP_TIER_KINDS]; /* of the record, in order */
    int plane[ZPP_TIER_KINDS]; /* place of a kind in the record; -1: the stream has none of it */
    size_t planes;
    size_t elems;          /* of all shards, rounded up to pages */
    size_t used_elems;     /* of all shards */
    size_t hold_elems;     /* of the first shards, all of which stay in memory; whole pages */
    size_t held_elems;     /* the first ones, in memory; whole pages */
    size_t *begins;        /* [chunks + 1]: the first element of each chunk, counted from the first one in the file */
    size_t begins_capacity;
    size_t chunks;
    size_t chunk_elems; /* of the longest chunk */
    uint64_t offset_bytes; /* of chunk 0 in the file */
    bool *stepped;         /* [chunks]: true once its moments were written */
    float *held;           /* [planes * held_elems] */
};

struct optim_file_shard {
    int stream;
    size_t begin_elems, elems; /* on the record stream */
    bool unexpected;           /* in the next steps unit by unit */
};

/* The state of a buffer in a step unit by unit. */
enum optim_file_buffer_state { BUFFER_FREE, BUFFER_CLEAN, BUFFER_DIRTY, BUFFER_WRITING };

struct optim_file_buffer {
    float *memory; /* of the engine's arena; one record of the stream with the largest ones */
    zpp_aio_request *read, *write;
    /* a step unit by unit: which record it has, and since when */
    enum optim_file_buffer_state state;
    int stream;
    size_t chunk;
    uint64_t since;
};

/* A step unit by unit. */
struct optim_file_record {
    int stream;
    size_t chunk;
};
struct optim_file_backward_step {
    struct optim_file_record *order; /* of all records, as they are expected */
    size_t order_count;
    size_t next;     /* the first of them that was not read ahead */
    size_t *left[2]; /* [chunks] of each stream: shards that are still to be stepped */
    size_t *expected[2]; /* [chunks]: shards that are expected; of a record without any nothing is read ahead */
    uint64_t clock;
    bool open; /* between begin and end */
};

/* A chunk that is touched, and its cuts. */
struct optim_file_visit {
    int stream;
    size_t chunk, first_cut, cuts;
};

/* Cuts carry, in place of addresses that are not known yet, their place in the chunk. */
struct optim_file_cut {
    struct zpp_optim_segment segment;
    size_t inside;
};

struct optim_file_plan {
    struct optim_file_cut *cuts;
    size_t cuts_count, cuts_capacity;
    struct optim_file_visit *visits; /* in ascending order of the record stream */
    size_t visits_count, visits_capacity;
    struct zpp_optim_segment *segments; /* of what is held, held_count; then of the visit under way */
    size_t segments_capacity, held_count;
    struct zpp_step_files files;
    bool windows; /* true if parameters or gradients are in files */
};

struct zpp_optim_file {
    struct zpp_optim_file_options options;
    struct zpp_scratch_file file;
    bool sealed;
    atomic_bool inconsistent; /* this and the figures are read while a delayed step runs in a thread of its own */
    struct record_stream streams[2]; /* 0: with a master */
    struct optim_file_shard *shards;
    int shards_count;
    size_t shards_capacity;
    struct optim_file_buffer *buffers;
    size_t record_bytes; /* of a buffer */
    uint64_t file_bytes;
    struct optim_file_backward_step backward_step;
    atomic_uint_fast64_t steps, step_ns, waited_ns;
};

static inline size_t optim_file_chunk_elems(const struct record_stream *stream, size_t chunk) {
    return stream->begins[chunk + 1] - stream->begins[chunk];
}

static inline uint64_t optim_file_record_offset(const struct record_stream *stream, size_t chunk) {
    return stream->offset_bytes + (uint64_t)stream->begins[chunk] * stream->planes * sizeof(float);
}

/* Return the chunk of an element of the record stream that is in the file; *inside: its place in the chunk. */
size_t optim_file_chunk_at(const struct record_stream *stream, size_t at, size_t *inside);

/* As zpp_scratch_finish_after, counted as waiting inside a step. */
zpp_status optim_file_finish(zpp_optim_file *optim_file, zpp_status status, zpp_aio_request **request,
                             struct zpp_aio_fault *fault, struct zpp_err *err);

/* What a step over the pieces touches; end with optim_file_plan_drop, also after NOMEM. */
zpp_status optim_file_plan_make(const zpp_optim_file *optim_file, const struct zpp_optim_file_piece *pieces,
                                size_t pieces_count, struct optim_file_plan *plan, struct zpp_err *err);
void optim_file_plan_drop(struct optim_file_plan *plan);
/* plan->segments = the visit's, whose record is in `memory`. */
void optim_file_plan_bind(const zpp_optim_file *optim_file, struct optim_file_plan *plan,
                          const struct optim_file_visit *visit, float *memory);

/* Part of seal and destroy (optim_file_step_in_backward.c). */
void optim_file_backward_step_choose_buffers(zpp_optim_file *optim_file);
zpp_status optim_file_backward_step_seal(zpp_optim_file *optim_file, struct zpp_err *err);
void optim_file_backward_step_drop(zpp_optim_file *optim_file);
/* Forget what was read ahead, because the file has changed. */
void optim_file_backward_step_forget(zpp_optim_file *optim_file);

#endif
