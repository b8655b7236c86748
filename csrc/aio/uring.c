/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine over io_uring: one thread takes chunks, submits them in one system call, sleeps until results or a wake-up
 * arrive, and judges them. It also keeps the ring's tables: arena slabs as registered buffers (their pages are locked
 * once instead of at each operation), files as registered files.
 */
#include <stdlib.h>

#include "internal.h"

enum {
    PIECE_SHIFT = 30,   /* ring.h: one slot a GiB */
    SUMMED_AT_ONCE = 2, /* the disk works on them while the next ones are summed */
};

/* The state that the thread keeps from one round to the next. */
struct round {
    struct zpp_aio_chunk **fresh, **again;
    struct zpp_ring_result *results;
    size_t again_count;
    size_t added_bytes, removed_bytes; /* registered buffers, this round */
    int lock_errno;
    zpp_aio *aio;
};

static void slab_appeared(void *ctx, struct zpp_aio_slab *slab) {
    struct round *round = ctx;
    int os_errno = 0;
    slab->first_slot = zpp_ring_add_buffer(round->aio->ring, slab->base, slab->bytes, &slab->slots, &os_errno);
    if (slab->first_slot >= 0) round->added_bytes += slab->bytes;
    else if (os_errno) round->lock_errno = os_errno;
}

static void slab_leaves(void *ctx, struct zpp_aio_slab *slab) {
    struct round *round = ctx;
    if (slab->first_slot < 0) return;
    zpp_ring_remove_buffer(round->aio->ring, slab->first_slot, slab->slots);
    round->removed_bytes += slab->bytes;
}

static int buffer_slot(const struct zpp_aio_slab *slab, const struct zpp_aio_op *op) {
    if (!slab || slab->first_slot < 0) return -1;
    const size_t first = (size_t)((unsigned char *)op->memory - slab->base), last = first + op->bytes - 1;
    return first >> PIECE_SHIFT == last >> PIECE_SHIFT ? slab->first_slot + (int)(first >> PIECE_SHIFT) : -1;
}

static void push(zpp_aio *aio, struct zpp_aio_chunk *chunk) {
    struct zpp_aio_op op;
    zpp_aio_chunk_op(chunk, &op);
    struct zpp_file_part *part = chunk->piece.part;
    if (chunk->direct) {
        if (!part->slot_tried) {
            part->slot_tried = true;
            part->slot = zpp_ring_add_file(aio->ring, part->direct_fd);
        }
        op.file_slot = part->slot;
    }
    op.buffer_slot = buffer_slot(chunk->bounce ? aio->bounce_slab : chunk->request->slab, &op);
    zpp_ring_push(aio->ring, &op, chunk);
}

/* End every request, and every later one, with the error of the ring itself. */
static void break_engine(zpp_aio *aio, const struct zpp_err *err) {
    pthread_mutex_lock(&aio->lock);
    aio->broken = err->status;
    aio->broken_err = *err;
    while (aio->first) {
        zpp_aio_request *request = aio->first;
        struct zpp_aio_failure *failure = zpp_aio_new_failure(request);
        if (failure) failure->err = *err;
        request->flying = 0;
        zpp_aio_complete(aio, request);
    }
    aio->inflight = 0;
    aio->inflight_bytes = 0;
    pthread_mutex_unlock(&aio->lock);
}

/* Plan a round under the lock. Return false when the engine stops and nothing is left to do. */
static bool plan(zpp_aio *aio, struct round *round, size_t most, size_t *fresh_count) {
    pthread_mutex_lock(&aio->lock);
    aio->registered_bytes += round->added_bytes;
    aio->registered_bytes -= round->removed_bytes;
    round->added_bytes = round->removed_bytes = 0;
    for (unsigned index = 0; index < aio->retired_count; ++index)
        zpp_ring_remove_file(aio->ring, aio->retired_slots[index]);
    aio->retired_count = 0;
    *fresh_count = zpp_aio_take(aio, round->fresh, most);
    const bool idle = aio->inflight == 0;
    aio->sleeping = true;
    const bool over = aio->stopping && idle && !aio->urgent.first && !aio->background.first;
    pthread_mutex_unlock(&aio->lock);
    return !over;
}

static void judge(zpp_aio *aio, struct round *round, size_t count) {
    size_t over = 0;
    for (size_t index = 0; index < count; ++index) {
        struct zpp_aio_chunk *chunk = round->results[index].tag;
        if (zpp_aio_settle(aio, chunk, round->results[index].result)) round->again[round->again_count++] = chunk;
        else round->results[over++].tag = chunk;
    }
    pthread_mutex_lock(&aio->lock);
    aio->sleeping = false;
    for (size_t index = 0; index < over; ++index) zpp_aio_finish(aio, round->results[index].tag);
    pthread_mutex_unlock(&aio->lock);
}

static void work(zpp_aio *aio, struct round *round) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_status status = zpp_ring_start(aio->ring, &err);
    const bool checksums = aio->config.checksums && aio->config.depth > SUMMED_AT_ONCE;
    const size_t most = checksums ? (size_t)SUMMED_AT_ONCE : aio->config.depth;
    size_t fresh = 0;
    while (status == ZPP_OK) {
        zpp_aio_arena_changes(aio->arena, slab_appeared, slab_leaves, round);
        if (round->lock_errno) zpp_aio_tell_lock(aio, round->lock_errno);
        round->lock_errno = 0;
        if (!plan(aio, round, most, &fresh)) return;
        for (size_t index = 0; index < round->again_count; ++index) push(aio, round->again[index]);
        for (size_t index = 0; index < fresh; ++index) push(aio, round->fresh[index]);
        round->again_count = 0;
        size_t count = 0;
        const bool waits = !checksums || fresh < most; /* else there may be more to take */
        status = zpp_ring_run(aio->ring, waits, round->results, aio->config.depth, &count, &err);
        if (status == ZPP_OK) judge(aio, round, count);
    }
    break_engine(aio, &err);
}

static void *thread(void *ctx) {
    zpp_aio *aio = ctx;
    const unsigned depth = aio->config.depth;
    struct round round = {.aio = aio};
    struct zpp_err err = ZPP_ERR_INIT;
    round.fresh = calloc(depth, sizeof *round.fresh);
    round.again = calloc(depth, sizeof *round.again);
    round.results = calloc(depth, sizeof *round.results);
    if (round.fresh && round.again && round.results) {
        work(aio, &round);
    } else {
        zpp_fail(&err, ZPP_NOMEM, "aio: no memory for %u operations", depth);
        break_engine(aio, &err);
    }
    free(round.fresh);
    free(round.again);
    free(round.results);
    return NULL;
}

static void notify(void *ring) { zpp_ring_wake(ring); }

zpp_status zpp_aio_uring_start(zpp_aio *aio, struct zpp_err *err) {
    zpp_aio_arena_follow(aio->arena, notify, aio->ring);
    const int failed = pthread_create(&aio->threads[0], NULL, thread, aio);
    if (failed) return zpp_fail_os(err, failed, "aio: no thread");
    aio->threads_count = 1;
    return ZPP_OK;
}
