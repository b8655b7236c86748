/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine's beginning and end: checking the configuration, choosing the driver, stopping.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/mem.h"
#include "internal.h"

enum {
    MOST_BOUNCES = 16,
    BOUNCE_BYTES = 512 << 10, /* sixteen of them stay in the cache, which makes the copy cheap */
};

void zpp_aio_free(zpp_aio *aio) {
    pthread_cond_destroy(&aio->finished);
    pthread_cond_destroy(&aio->work);
    pthread_mutex_destroy(&aio->lock);
    pthread_mutex_destroy(&aio->files_lock);
    free(aio->threads);
    free(aio->bounce_free);
    free(aio->chunks);
    free(aio->write_failure);
    for (unsigned stripe = 0; stripe < aio->files.stripes_count; ++stripe) free(aio->files.stripes[stripe]);
    free(aio);
}

zpp_aio_arena *zpp_aio_get_arena(zpp_aio *aio) { return aio->arena; }

void zpp_aio_figures(zpp_aio *aio, struct zpp_aio_figures *out) {
    struct zpp_aio_arena_figures arena;
    zpp_aio_arena_figures(aio->arena, &arena);
    pthread_mutex_lock(&aio->files_lock);
    pthread_mutex_lock(&aio->lock);
    *out = (struct zpp_aio_figures){
        .uring = aio->ring != NULL,
        .depth = aio->config.depth,
        .outstanding = aio->outstanding,
        .block_bytes = aio->config.block_bytes,
        .read_bytes = aio->read_bytes,
        .written_bytes = aio->written_bytes,
        .operations = aio->operations,
        .bounced_bytes = aio->bounced_bytes,
        .retries = atomic_load(&aio->retries),
        .checked_bytes = aio->checked_bytes,
        .checksums_bytes = zpp_files_checksums_bytes(&aio->files),
        .registered_bytes = aio->registered_bytes,
        .arena_held_bytes = arena.held_bytes,
        .arena_used_bytes = arena.used_bytes,
        .open_files = aio->files.count,
    };
    pthread_mutex_unlock(&aio->lock);
    pthread_mutex_unlock(&aio->files_lock);
}

static zpp_status check_config(const struct zpp_aio_config *config, struct zpp_err *err) {
    if (config->depth < 1 || config->depth > ZPP_AIO_MAX_DEPTH) {
        return zpp_fail(err, ZPP_INVALID, "aio: depth is %u, wanted 1 to %d", config->depth, ZPP_AIO_MAX_DEPTH);
    }
    if (config->stripes_count > ZPP_AIO_PARTS) {
        return zpp_fail(err, ZPP_INVALID, "aio: %u paths, wanted at most %d", config->stripes_count, ZPP_AIO_PARTS);
    }
    /* Checked before block_bytes, which may have been chosen to fit the stripes. */
    if (config->stripes_count && (!config->stripe_bytes || config->stripe_bytes % ZPP_BLOCK_BYTES)) {
        return zpp_fail(err, ZPP_INVALID, "aio: stripe_bytes is %zu, wanted a multiple of %d", config->stripe_bytes,
                        ZPP_BLOCK_BYTES);
    }
    if (!config->block_bytes || config->block_bytes % ZPP_BLOCK_BYTES || config->block_bytes > (size_t)1 << 30) {
        return zpp_fail(err, ZPP_INVALID, "aio: block_bytes is %zu, wanted a multiple of %d up to 1 GiB",
                        config->block_bytes, ZPP_BLOCK_BYTES);
    }
    if (config->threads > ZPP_AIO_MAX_DEPTH) {
        return zpp_fail(err, ZPP_INVALID, "aio: threads is %u, wanted at most %d", config->threads, ZPP_AIO_MAX_DEPTH);
    }
    return ZPP_OK;
}

static zpp_status allocate(zpp_aio *aio, struct zpp_err *err) {
    const struct zpp_aio_config *config = &aio->config;
    const unsigned depth = config->depth;
    aio->bounce_count = depth < MOST_BOUNCES ? depth : MOST_BOUNCES;
    aio->bounce_bytes = config->block_bytes < BOUNCE_BYTES ? config->block_bytes : BOUNCE_BYTES;
    aio->chunks = calloc(depth, sizeof *aio->chunks);
    aio->bounce_free = calloc(aio->bounce_count, sizeof *aio->bounce_free);
    aio->threads = calloc(config->threads > ZPP_AIO_DEFAULT_THREADS ? config->threads : ZPP_AIO_DEFAULT_THREADS,
                          sizeof *aio->threads);
    bool all = aio->chunks && aio->bounce_free && aio->threads;
    for (unsigned index = 0; all && index < depth; ++index) {
        aio->chunks[index].next = aio->free_chunks;
        aio->free_chunks = &aio->chunks[index];
    }
    aio->files = (struct zpp_files){.sys = &aio->sys,
                                    .stripe_bytes = config->stripe_bytes,
                                    .direct = config->direct,
                                    .checksums = config->checksums};
    for (unsigned index = 0; all && index < config->stripes_count; ++index) {
        aio->files.stripes[index] = strdup(config->stripes[index]);
        all = aio->files.stripes[index] != NULL;
        aio->files.stripes_count = index + 1;
    }
    if (!all) return zpp_fail(err, ZPP_NOMEM, "aio: no memory for an engine of depth %u", depth);
    return zpp_aio_arena_create(config->arena_bytes, &aio->sys, &aio->arena, err);
}

static void init_locks(zpp_aio *aio) {
    zpp_cond_init(&aio->finished);
    pthread_cond_init(&aio->work, NULL);
    pthread_mutex_init(&aio->lock, NULL);
    pthread_mutex_init(&aio->files_lock, NULL);
}

static zpp_status start(zpp_aio *aio, struct zpp_err *err) {
    const struct zpp_aio_config *config = &aio->config;
    if (config->backend != ZPP_AIO_THREADS) {
        const zpp_status status = zpp_ring_create(config->depth, config->sqpoll, &aio->sys, &aio->ring, err);
        if (status == ZPP_OK) return zpp_aio_uring_start(aio, err);
        if (status != ZPP_NOT_BUILT || config->backend == ZPP_AIO_URING) return status;
        char text[ZPP_ERR_TEXT_BYTES + 128];
        snprintf(text, sizeof text, "%s. Reading and writing with threads instead, at more CPU time a byte", err->text);
        zpp_aio_log(aio, text);
    }
    return zpp_aio_pread_start(aio, err);
}

zpp_status zpp_aio_create(const struct zpp_aio_config *config, zpp_aio **out, struct zpp_err *err) {
    struct zpp_err unused = ZPP_ERR_INIT;
    if (!err) err = &unused;
    zpp_status status = check_config(config, err);
    if (status != ZPP_OK) return status;
    zpp_aio *aio = calloc(1, sizeof *aio);
    if (!aio) return zpp_fail(err, ZPP_NOMEM, "aio: no memory for an engine");
    aio->config = *config;
    aio->sys = config->sys ? *config->sys : *zpp_aio_sys_real();
    aio->owner = getpid();
    aio->refs = 1;
    init_locks(aio);
    status = allocate(aio, err);
    if (status == ZPP_OK) status = start(aio, err);
    if (status != ZPP_OK) {
        zpp_aio_destroy(aio);
        return status;
    }
    *out = aio;
    return ZPP_OK;
}

/* Cancel what has not begun, and make the threads end when the rest is done. */
static void stop(zpp_aio *aio) {
    pthread_mutex_lock(&aio->lock);
    for (zpp_aio_request *request = aio->first, *next; request; request = next) {
        request->cancelled = true;
        ++request->refs; /* completing it may begin `next`, but not free it: that one is outstanding itself */
        if (request->flying == 0) zpp_aio_complete(aio, request);
        else zpp_aio_unqueue(aio, request);
        next = request->next;
        zpp_aio_unref(request);
    }
    aio->stopping = true;
    pthread_cond_broadcast(&aio->work);
    if (aio->ring) zpp_ring_wake(aio->ring);
    pthread_mutex_unlock(&aio->lock);
    for (unsigned index = 0; index < aio->threads_count; ++index) pthread_join(aio->threads[index], NULL);
}

void zpp_aio_destroy(zpp_aio *aio) {
    if (!aio || aio->owner != getpid()) return; /* a forked child has none of the threads, and changes nothing */
    stop(aio);
    if (aio->arena) zpp_aio_arena_unfollow(aio->arena);
    zpp_ring_destroy(aio->ring);
    aio->ring = NULL;
    if (aio->bounce_memory) zpp_aio_arena_free(aio->arena, aio->bounce_memory);
    zpp_aio_arena_unref(aio->arena);
    for (struct zpp_file *file; (file = zpp_files_take(&aio->files, NULL));) {
        zpp_aio_leave_hazards(aio, file);
        zpp_file_close(&aio->sys, file);
    }
    zpp_files_drop_checksums(&aio->files, NULL);
    pthread_mutex_lock(&aio->lock);
    const bool last = --aio->refs == 0;
    pthread_mutex_unlock(&aio->lock);
    if (last) zpp_aio_free(aio);
}
