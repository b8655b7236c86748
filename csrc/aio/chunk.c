/* SPDX-License-Identifier: Apache-2.0
 *
 * Cutting requests into chunks, and judging their results. Short results are continued, interruptions repeated, and a
 * refused O_DIRECT falls back to the page cache. Bytes with a wrong checksum are read once more. Every other error
 * becomes the request's failure.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "internal.h"

enum {
    BACKGROUND_TURN = 8,    /* of that many chunks, one is the background's */
    PATIENT_TRIES = 16,     /* EAGAIN and EINTR are repeated at once that often, then a millisecond apart */
    MAX_TRIES = 16 + 30000, /* half a minute of "try again" is an error */
    MAX_EMPTY_WRITES = 8,
};

/* --- taking ------------------------------------------------------------------------------------------------------- */

static bool bounce_ready(zpp_aio *aio, zpp_aio_request *request) {
    if (aio->bounce_memory) return aio->bounce_free_count > 0;
    void *memory = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    const size_t bytes = aio->bounce_bytes * aio->bounce_count;
    if (zpp_aio_arena_alloc(aio->arena, bytes, &memory, &err) != ZPP_OK) {
        struct zpp_aio_failure *failure = zpp_aio_new_failure(request);
        if (failure) failure->err = err;
        if (request->flying == 0) zpp_aio_complete(aio, request);
        else zpp_aio_unqueue(aio, request);
        return false;
    }
    aio->bounce_memory = memory;
    aio->bounce_slab = zpp_aio_arena_find(aio->arena, memory, bytes);
    for (unsigned index = 0; index < aio->bounce_count; ++index) {
        aio->bounce_free[index] = aio->bounce_memory + index * aio->bounce_bytes;
    }
    aio->bounce_free_count = aio->bounce_count;
    return true;
}

/* Take a chunk of the queue's first request; NULL: it needs a bounce buffer and none is free, or the request failed. */
static struct zpp_aio_chunk *take_from(zpp_aio *aio, struct zpp_aio_queue *queue) {
    zpp_aio_request *request = queue->first;
    struct zpp_aio_chunk *chunk = aio->free_chunks;
    struct zpp_file_piece piece;
    zpp_file_piece(request->file, request->write, request->memory + request->taken_bytes,
                   request->offset_bytes + request->taken_bytes, request->bytes - request->taken_bytes,
                   aio->config.block_bytes, aio->bounce_bytes, &piece);
    if (piece.bounce && !bounce_ready(aio, request)) return NULL;
    aio->free_chunks = chunk->next;
    *chunk = (struct zpp_aio_chunk){.request = request, .piece = piece, .direct = piece.direct};
    chunk->memory = request->memory + request->taken_bytes;
    if (piece.bounce) {
        chunk->bounce = aio->bounce_free[--aio->bounce_free_count];
        aio->bounced_bytes += piece.wanted_bytes;
    }
    request->taken_bytes += piece.wanted_bytes;
    ++request->flying;
    ++aio->inflight;
    aio->inflight_bytes += piece.wanted_bytes;
    ++aio->operations;
    if (request->taken_bytes == request->bytes) zpp_aio_unqueue(aio, request);
    return chunk;
}

static struct zpp_aio_queue *next_queue(zpp_aio *aio) {
    if (!aio->urgent.first) return aio->background.first ? &aio->background : NULL;
    if (!aio->background.first) return &aio->urgent;
    if (++aio->urgent_taken < BACKGROUND_TURN) return &aio->urgent;
    aio->urgent_taken = 0;
    return &aio->background;
}

static bool may_fly(const zpp_aio *aio) {
    return !aio->config.flight_bytes || aio->inflight_bytes < aio->config.flight_bytes;
}

size_t zpp_aio_take(zpp_aio *aio, struct zpp_aio_chunk **out, size_t capacity) {
    size_t count = 0;
    while (count < capacity && aio->free_chunks && may_fly(aio)) {
        struct zpp_aio_queue *queue = next_queue(aio);
        if (!queue) break;
        struct zpp_aio_queue *other = queue == &aio->urgent ? &aio->background : &aio->urgent;
        const zpp_aio_request *head = queue->first;
        struct zpp_aio_chunk *chunk = take_from(aio, queue);
        if (!chunk && queue->first != head) continue; /* the request failed and was removed */
        if (!chunk && other->first) chunk = take_from(aio, other);
        if (!chunk) break; /* bounce buffers come back with the chunks that have them */
        out[count++] = chunk;
    }
    return count;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

/* Fill a bounce buffer, and record sums before a byte is written: a process that reads a page while another one writes
 * bytes of it that the reader does not want finds no sum over both. */
static void fill(struct zpp_aio_chunk *chunk) {
    const struct zpp_file_piece *piece = &chunk->piece;
    if (piece->part->checksums) {
        zpp_checksums_set(piece->part->checksums, piece->offset_bytes, chunk->memory, piece->wanted_bytes,
                          chunk->bounce);
    } else if (chunk->bounce) {
        memcpy(chunk->bounce, chunk->memory, piece->wanted_bytes);
    }
    chunk->filled = true;
}

void zpp_aio_chunk_op(struct zpp_aio_chunk *chunk, struct zpp_aio_op *out) {
    const struct zpp_file_piece *piece = &chunk->piece;
    const bool write = chunk->request->write;
    if (write && !chunk->filled) fill(chunk);
    *out = (struct zpp_aio_op){
        .memory = (chunk->bounce ? chunk->bounce : chunk->memory) + chunk->have_bytes,
        .bytes = piece->op_bytes - chunk->have_bytes,
        .offset_bytes = piece->offset_bytes + chunk->have_bytes,
        .fd = chunk->direct ? piece->part->direct_fd : piece->part->buffered_fd,
        .file_slot = -1,
        .buffer_slot = -1,
        .write = write,
    };
}

static void pause_1ms(void) {
    const struct timespec pause = {.tv_nsec = 1000000};
    nanosleep(&pause, NULL);
}

/* Return true to repeat the operation. */
static bool repeats(zpp_aio *aio, struct zpp_aio_chunk *chunk) {
    atomic_fetch_add_explicit(&aio->retries, 1, memory_order_relaxed);
    if (++chunk->tries > MAX_TRIES) return false;
    if (chunk->tries > PATIENT_TRIES) pause_1ms();
    return true;
}

static bool settle_error(zpp_aio *aio, struct zpp_aio_chunk *chunk, int os_errno) {
    if ((os_errno == EINTR || os_errno == EAGAIN) && repeats(aio, chunk)) return true;
    if (os_errno == EINVAL && chunk->direct) {
        /* The file took O_DIRECT at open and refuses the operation (FUSE and others): the page cache serves it. */
        atomic_store_explicit(&chunk->piece.part->direct_refused, true, memory_order_relaxed);
        chunk->direct = false;
        if (!atomic_exchange(&aio->told_direct, true)) {
            char text[640];
            snprintf(text, sizeof text, "aio: \"%s\" refuses O_DIRECT; reading and writing it through the page cache",
                     chunk->piece.part->path);
            zpp_aio_log(aio, text);
        }
        return true;
    }
    chunk->os_errno = os_errno;
    return false;
}

/* End a complete read. Return true if its checksum is wrong for the first time: it is read once more. */
static bool settle_read(zpp_aio *aio, struct zpp_aio_chunk *chunk) {
    const struct zpp_file_piece *piece = &chunk->piece;
    const uint64_t wanted = piece->offset_bytes + piece->head_bytes;
    const unsigned char *data = chunk->bounce ? chunk->bounce : chunk->memory;
    struct zpp_checksums_bad bad;
    if (piece->part->checksums &&
        !zpp_checksums_check(piece->part->checksums, piece->offset_bytes, data, chunk->have_bytes, wanted,
                             piece->wanted_bytes, &chunk->checked_bytes, &bad)) {
        if (chunk->reread) {
            chunk->bad = bad;
            return false;
        }
        atomic_fetch_add_explicit(&aio->retries, 1, memory_order_relaxed);
        chunk->reread = true;
        chunk->have_bytes = 0;
        chunk->tries = 0;
        chunk->direct = piece->direct;
        return true;
    }
    if (chunk->bounce) memcpy(chunk->memory, chunk->bounce + piece->head_bytes, piece->wanted_bytes);
    return false;
}

/* An operation that moved nothing. Return true to repeat it. */
static bool settle_empty(struct zpp_aio_chunk *chunk) {
    if (!chunk->request->write) {
        chunk->ended = true;
        return false;
    }
    if (++chunk->tries <= MAX_EMPTY_WRITES) return true;
    chunk->os_errno = EIO; /* a device that writes nothing and reports no error */
    return false;
}

bool zpp_aio_settle(zpp_aio *aio, struct zpp_aio_chunk *chunk, ssize_t result) {
    const struct zpp_file_piece *piece = &chunk->piece;
    const bool write = chunk->request->write;
    const size_t least_bytes = write ? piece->op_bytes : piece->head_bytes + piece->wanted_bytes;
    const size_t needed_bytes = piece->part->checksums ? piece->op_bytes : least_bytes;
    if (result < 0) return settle_error(aio, chunk, (int)-result);
    chunk->have_bytes += (size_t)result;
    const bool at_end = result == 0 && chunk->have_bytes >= least_bytes; /* in the file's last page */
    if (chunk->have_bytes >= needed_bytes || at_end) return write ? false : settle_read(aio, chunk);
    if (result == 0) return settle_empty(chunk);
    /* After a short result go on behind it, through the page cache where the rest is no whole unit of direct I/O. */
    chunk->tries = 0;
    atomic_fetch_add_explicit(&aio->retries, 1, memory_order_relaxed);
    if (chunk->direct && chunk->have_bytes % piece->part->offset_align_bytes) chunk->direct = false;
    return true;
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

static void fail_ended(zpp_aio *aio, const struct zpp_aio_chunk *chunk, struct zpp_aio_failure *failure) {
    const zpp_aio_request *request = chunk->request;
    const struct zpp_file_part *part = chunk->piece.part;
    struct zpp_aio_stat seen = {.bytes = 0};
    (void)aio->sys.fstat(aio->sys.ctx, part->buffered_fd, &seen);
    /* The bytes of the request; in a striped file, those of this part's piece. */
    const bool striped = request->file->stripe_bytes != 0;
    const uint64_t offset = striped ? chunk->piece.offset_bytes + chunk->piece.head_bytes : request->offset_bytes;
    const size_t wanted = striped ? chunk->piece.wanted_bytes : request->bytes;
    failure->fault = (struct zpp_aio_fault){.offset_bytes = offset, .wanted_bytes = wanted};
    snprintf(failure->fault.path, sizeof failure->fault.path, "%s", part->path);
    zpp_fail(&failure->err, ZPP_TIER,
             "aio: \"%s\" ended during a read: it holds %" PRIu64 " bytes, wanted %zu at offset %" PRIu64
             "; it is shorter than what was written, or another program cut it",
             part->path, seen.bytes, wanted, offset);
}

static void fail_sum(const struct zpp_aio_chunk *chunk, struct zpp_aio_failure *failure) {
    const char *path = chunk->piece.part->path;
    const struct zpp_checksums_bad *bad = &chunk->bad;
    failure->fault = (struct zpp_aio_fault){.offset_bytes = bad->offset_bytes, .wanted_bytes = bad->bytes};
    snprintf(failure->fault.path, sizeof failure->fault.path, "%s", path);
    zpp_fail(&failure->err, ZPP_TIER,
             "aio: \"%s\" does not hold what was written: %zu bytes at offset %" PRIu64
             " have the checksum %08x, written was %08x, and so again when read a second time. The disk or the way "
             "to it changes data, or another program wrote there: use another disk, and go on from a checkpoint",
             path, bad->bytes, bad->offset_bytes, bad->read, bad->wrote);
}

/* Of the chunk's wanted bytes, those that come before what failed. */
static size_t good_bytes(const struct zpp_aio_chunk *chunk) {
    const struct zpp_file_piece *piece = &chunk->piece;
    const size_t seen =
        chunk->bad.bytes ? (size_t)(chunk->bad.offset_bytes - piece->offset_bytes) : chunk->have_bytes;
    const size_t good = seen > piece->head_bytes ? seen - piece->head_bytes : 0;
    return good < piece->wanted_bytes ? good : piece->wanted_bytes - 1;
}

static void fail_request(zpp_aio *aio, const struct zpp_aio_chunk *chunk) {
    struct zpp_aio_failure *failure = zpp_aio_new_failure(chunk->request);
    if (!failure) return;
    if (chunk->bad.bytes) {
        fail_sum(chunk, failure);
    } else if (chunk->ended) {
        fail_ended(aio, chunk, failure);
    } else {
        const struct zpp_file_piece *piece = &chunk->piece;
        zpp_file_fail(&aio->sys, chunk->request->write ? "cannot write" : "cannot read", piece->part->path,
                      piece->offset_bytes + chunk->have_bytes, piece->op_bytes - chunk->have_bytes, chunk->os_errno,
                      piece->part->buffered_fd, &failure->fault, &failure->err);
    }
    failure->fault.into_bytes = (uint64_t)(chunk->memory - chunk->request->memory) + good_bytes(chunk);
}

static void free_chunk(zpp_aio *aio, struct zpp_aio_chunk *chunk) {
    if (chunk->bounce) aio->bounce_free[aio->bounce_free_count++] = chunk->bounce;
    chunk->next = aio->free_chunks;
    aio->free_chunks = chunk;
    --aio->inflight;
    aio->inflight_bytes -= chunk->piece.wanted_bytes;
}

static void count_result(zpp_aio *aio, const struct zpp_aio_chunk *chunk) {
    const struct zpp_file_piece *piece = &chunk->piece;
    const bool write = chunk->request->write;
    if (chunk->os_errno || chunk->ended || chunk->bad.bytes) fail_request(aio, chunk);
    else *(write ? &aio->written_bytes : &aio->read_bytes) += piece->wanted_bytes;
    aio->checked_bytes += chunk->checked_bytes;
    if (write && chunk->os_errno && piece->part->checksums)
        zpp_checksums_clear(piece->part->checksums, piece->offset_bytes, piece->wanted_bytes);
}

void zpp_aio_finish(zpp_aio *aio, struct zpp_aio_chunk *chunk) {
    zpp_aio_request *request = chunk->request;
    count_result(aio, chunk);
    free_chunk(aio, chunk);
    --request->flying;
    const bool over = request->taken_bytes == request->bytes || request->cancelled || request->failure;
    if (over && request->flying == 0) zpp_aio_complete(aio, request);
    else if (request->failure) zpp_aio_unqueue(aio, request);
}
