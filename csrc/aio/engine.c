/* SPDX-License-Identifier: Apache-2.0
 *
 * The calls of engine.h on requests and files: submit, wait, cancel, flush, forget.
 */
#include "engine.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum {
    IDLE_FILES = 256,
    TICK_NS = 100 * 1000 * 1000,
};
static const uint64_t second_ns = 1000000000u;

/* --- submission --- */

static zpp_status usable(const zpp_aio *aio, struct zpp_err *err) {
    if (aio->owner == getpid()) return ZPP_OK;
    return zpp_fail(err, ZPP_STATE,
                    "aio: this engine belongs to process %ld, and this is process %ld (forked from it?); "
                    "make an engine of its own here",
                    (long)aio->owner, (long)getpid());
}

static zpp_status check_job(const struct zpp_aio_job *job, struct zpp_err *err) {
    if (!job->path || !job->path[0]) return zpp_fail(err, ZPP_INVALID, "aio: path is empty, wanted a file");
    if (job->bytes && !job->memory) return zpp_fail(err, ZPP_INVALID, "aio: memory for %zu bytes is NULL", job->bytes);
    if (job->offset_bytes > (uint64_t)INT64_MAX || job->bytes > (uint64_t)INT64_MAX - job->offset_bytes) {
        return zpp_fail(err, ZPP_INVALID, "aio: %zu bytes at offset %" PRIu64 " of \"%s\" end beyond 2^63 - 1",
                        job->bytes, job->offset_bytes, job->path);
    }
    return ZPP_OK;
}

static zpp_aio_request *new_request(zpp_aio *aio, const struct zpp_aio_job *job) {
    zpp_aio_request *request = calloc(1, sizeof *request);
    if (!request) return NULL;
    request->engine = aio;
    request->memory = job->memory;
    request->bytes = job->bytes;
    request->offset_bytes = job->offset_bytes;
    request->write = job->write;
    request->urgent = job->priority == ZPP_AIO_BY_KIND ? !job->write : job->priority == ZPP_AIO_URGENT;
    request->refs = 2; /* the caller's and the engine's */
    return request;
}

/* Close files that the table need not keep, but not `wanted`, which is still idle; files_lock held. */
static void bound_files(zpp_aio *aio, struct zpp_file *wanted, struct zpp_file *dropped) {
    pthread_mutex_lock(&aio->lock);
    if (wanted) ++wanted->refs;
    if (dropped) zpp_aio_drop_file(aio, dropped);
    while (aio->files.count > IDLE_FILES) {
        struct zpp_file *idle = zpp_files_take(&aio->files, NULL);
        if (!idle) break;
        for (unsigned part = 0; idle->dirty && part < idle->parts_count; ++part) {
            aio->sys.sync(aio->sys.ctx, idle->parts[part].buffered_fd); /* a later durable flush cannot reach it */
        }
        zpp_aio_close_file(aio, idle);
    }
    if (wanted) --wanted->refs;
    pthread_mutex_unlock(&aio->lock);
}

static void tell_if_not_direct(zpp_aio *aio, const struct zpp_file *file) {
    unsigned part = 0;
    if (!aio->config.direct || atomic_load_explicit(&aio->told_direct, memory_order_relaxed)) return;
    while (part < file->parts_count && file->parts[part].direct_fd >= 0) ++part;
    if (part == file->parts_count || atomic_exchange(&aio->told_direct, true)) return;
    char text[640];
    snprintf(text, sizeof text,
             "aio: the file system of \"%s\" has no O_DIRECT; reading and writing through the page cache",
             file->parts[part].path);
    zpp_aio_log(aio, text);
}

static void tell_if_not_locked(zpp_aio *aio) {
    struct zpp_aio_arena_figures arena;
    zpp_aio_arena_figures(aio->arena, &arena);
    if (arena.lock_errno) zpp_aio_tell_lock(aio, arena.lock_errno);
}

/* Link the request; `lock` held. Return false where there is no memory; nothing is linked then. */
static bool begin(zpp_aio *aio, zpp_aio_request *request, struct zpp_file *file) {
    request->number = aio->numbers + 1;
    request->began_ns = zpp_span_begin();
    if (!zpp_aio_join_hazards(aio, file) || !zpp_aio_add_dependencies(file, request)) return false;
    aio->numbers = request->number;
    ++aio->refs;
    request->file = file;
    ++file->refs;
    if (request->write) file->dirty = true;
    zpp_aio_list_hazard(file, request);
    request->previous = aio->last;
    if (aio->last) aio->last->next = request;
    else aio->first = request;
    aio->last = request;
    ++aio->outstanding;
    if (request->dependencies == 0) zpp_aio_enqueue(aio, request);
    return true;
}

static zpp_status submit_to(zpp_aio *aio, struct zpp_file *file, const struct zpp_aio_job *job, zpp_aio_request **out,
                            struct zpp_err *err) {
    zpp_aio_request *request = new_request(aio, job);
    if (!request) return zpp_fail(err, ZPP_NOMEM, "aio: no memory for a request");
    request->slab = zpp_aio_arena_find(aio->arena, job->memory, job->bytes);
    zpp_status status = ZPP_OK;
    pthread_mutex_lock(&aio->lock);
    if (aio->broken) {
        status = zpp_fail_again(err, &aio->broken_err);
    } else if (aio->stopping) {
        status = zpp_fail(err, ZPP_STATE, "aio: the engine is closed");
    } else if (!begin(aio, request, file)) {
        zpp_aio_drop_dependencies(aio, request);
        status = zpp_fail(err, ZPP_NOMEM, "aio: no memory for a request");
    }
    pthread_mutex_unlock(&aio->lock);
    if (status != ZPP_OK) free(request);
    else *out = request;
    return status;
}

/* Complete a request without bytes at once. */
static zpp_status submit_nothing(zpp_aio *aio, const struct zpp_aio_job *job, zpp_aio_request **out,
                                 struct zpp_err *err) {
    zpp_aio_request *request = new_request(aio, job);
    if (!request) return zpp_fail(err, ZPP_NOMEM, "aio: no memory for a request");
    request->refs = 1;
    atomic_store(&request->done, true);
    pthread_mutex_lock(&aio->lock);
    ++aio->refs;
    pthread_mutex_unlock(&aio->lock);
    *out = request;
    return ZPP_OK;
}

/* Return the open file of a job, with its space reserved where the job writes; files_lock held. */
static zpp_status open_for(zpp_aio *aio, const struct zpp_aio_job *job, struct zpp_file **file,
                           struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_file *dropped = NULL;
    zpp_status status = zpp_files_get(&aio->files, job->path, job->write, file, &dropped, fault, err);
    if (dropped || aio->files.count > IDLE_FILES) bound_files(aio, *file, dropped);
    if (status == ZPP_OK && job->write) {
        status = zpp_file_reserve(&aio->files, *file, job->offset_bytes, job->bytes, fault, err);
    }
    if (status == ZPP_OK) tell_if_not_direct(aio, *file);
    return status;
}

zpp_status zpp_aio_submit(zpp_aio *aio, const struct zpp_aio_job *job, zpp_aio_request **out,
                          struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_aio_fault unused;
    struct zpp_file *file = NULL;
    zpp_status status = usable(aio, err);
    if (status == ZPP_OK) status = check_job(job, err);
    if (status != ZPP_OK) return status;
    if (!fault) fault = &unused;
    pthread_mutex_lock(&aio->files_lock);
    status = open_for(aio, job, &file, fault, err);
    if (!aio->ring && !atomic_load_explicit(&aio->told_lock, memory_order_relaxed)) tell_if_not_locked(aio);
    if (status == ZPP_OK)
        status = job->bytes ? submit_to(aio, file, job, out, err) : submit_nothing(aio, job, out, err);
    pthread_mutex_unlock(&aio->files_lock);
    return status;
}

/* --- waiting --- */

static struct timespec at(uint64_t ns) {
    return (struct timespec){.tv_sec = (time_t)(ns / second_ns), .tv_nsec = (long)(ns % second_ns)};
}

/* Called with `lock` held, and returns with it held. Return OK when the request is done. */
static zpp_status wait_locked(zpp_aio *aio, zpp_aio_request *request, const struct zpp_wait *wait,
                              struct zpp_err *err) {
    const uint64_t started_ns = zpp_now_ns();
    const uint64_t end_ns = wait->timeout_ns ? started_ns + wait->timeout_ns : UINT64_MAX;
    zpp_status status = ZPP_OK;
    ++request->waiters;
    while (!atomic_load_explicit(&request->done, memory_order_acquire) && status == ZPP_OK) {
        const uint64_t now_ns = zpp_now_ns(), tick_ns = now_ns + TICK_NS;
        if (now_ns >= end_ns) {
            status =
                zpp_fail(err, ZPP_TIMEOUT, "aio: %zu bytes at offset %" PRIu64 " of \"%s\" were not %s after %.3f s",
                         request->bytes, request->offset_bytes, request->file->path,
                         request->write ? "written" : "read", (double)(now_ns - started_ns) / 1e9);
            break;
        }
        const struct timespec until = at(end_ns < tick_ns ? end_ns : tick_ns);
        if (pthread_cond_timedwait(&aio->finished, &aio->lock, &until) != ETIMEDOUT || !wait->tick) continue;
        pthread_mutex_unlock(&aio->lock);
        status = wait->tick(wait->ctx, err);
        pthread_mutex_lock(&aio->lock);
    }
    --request->waiters;
    return status;
}

static zpp_status outcome(const zpp_aio_request *request, struct zpp_err *err) {
    if (request->failure) return zpp_fail_again(err, &request->failure->err);
    if (!request->cancelled || request->taken_bytes == request->bytes) return ZPP_OK;
    return zpp_fail(err, ZPP_ABORTED, "aio: %s of %zu bytes at offset %" PRIu64 " was cancelled",
                    request->write ? "a write" : "a read", request->bytes, request->offset_bytes);
}

bool zpp_aio_done(const zpp_aio_request *request) { return atomic_load_explicit(&request->done, memory_order_acquire); }

zpp_status zpp_aio_wait(zpp_aio_request *request, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_aio *aio = request->engine;
    zpp_status status = ZPP_OK;
    if (!zpp_aio_done(request)) {
        if (!wait) return ZPP_AGAIN;
        if ((status = usable(aio, err)) != ZPP_OK) return status;
        pthread_mutex_lock(&aio->lock);
        status = wait_locked(aio, request, wait, err);
        pthread_mutex_unlock(&aio->lock);
        if (status != ZPP_OK) return status;
    }
    if (!request->failure) return outcome(request, err);
    pthread_mutex_lock(&aio->lock); /* the waiter has the error: the flush need not report it again */
    if (aio->write_failure && aio->write_failure_number == request->number) {
        free(aio->write_failure);
        aio->write_failure = NULL;
    }
    pthread_mutex_unlock(&aio->lock);
    return outcome(request, err);
}

const struct zpp_aio_fault *zpp_aio_request_fault(const zpp_aio_request *request) {
    if (!zpp_aio_done(request) || !request->failure || request->failure->err.status != ZPP_TIER) return NULL;
    return &request->failure->fault;
}

bool zpp_aio_cancel(zpp_aio_request *request) {
    zpp_aio *aio = request->engine;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_aio_done(request) || usable(aio, &err) != ZPP_OK) return false;
    pthread_mutex_lock(&aio->lock);
    const bool running = !zpp_aio_done(request);
    if (running) {
        request->cancelled = true;
        if (request->flying == 0) zpp_aio_complete(aio, request);
        else zpp_aio_unqueue(aio, request);
    }
    pthread_mutex_unlock(&aio->lock);
    return running;
}

void zpp_aio_release(zpp_aio_request *request) {
    if (!request) return;
    zpp_aio *aio = request->engine;
    pthread_mutex_lock(&aio->lock);
    zpp_aio_unref(request);
    const bool last = aio->refs == 0;
    pthread_mutex_unlock(&aio->lock);
    if (last) zpp_aio_free(aio);
}

/* --- flush --- */

static zpp_status wait_for_all(zpp_aio *aio, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    pthread_mutex_lock(&aio->lock);
    const uint64_t last = aio->numbers;
    while (status == ZPP_OK && aio->first && aio->first->number <= last) {
        zpp_aio_request *request = aio->first;
        if (!wait) {
            status = ZPP_AGAIN;
            break;
        }
        ++request->refs;
        status = wait_locked(aio, request, wait, err);
        zpp_aio_unref(request);
    }
    pthread_mutex_unlock(&aio->lock);
    return status;
}

static zpp_status sync_file(zpp_aio *aio, const struct zpp_file *file, struct zpp_aio_fault *fault,
                            struct zpp_err *err) {
    for (unsigned index = 0; index < file->parts_count; ++index) {
        const struct zpp_file_part *part = &file->parts[index];
        const int failed = -aio->sys.sync(aio->sys.ctx, part->buffered_fd);
        if (failed > 0)
            return zpp_file_fail(&aio->sys, "cannot sync", part->path, 0, 0, failed, part->buffered_fd, fault, err);
    }
    return ZPP_OK;
}

/* Return the next file to sync, with a reference; NULL: none is dirty. */
static struct zpp_file *next_dirty(zpp_aio *aio) {
    pthread_mutex_lock(&aio->files_lock);
    pthread_mutex_lock(&aio->lock);
    struct zpp_file *file = aio->files.first;
    while (file && !file->dirty) file = file->next;
    if (file) {
        file->dirty = false;
        ++file->refs;
    }
    pthread_mutex_unlock(&aio->lock);
    pthread_mutex_unlock(&aio->files_lock);
    return file;
}

static zpp_status sync_all(zpp_aio *aio, struct zpp_aio_fault *fault, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    struct zpp_file *file;
    while (status == ZPP_OK && (file = next_dirty(aio))) {
        status = sync_file(aio, file, fault, err);
        pthread_mutex_lock(&aio->lock);
        if (status != ZPP_OK) file->dirty = true;
        zpp_aio_unref_file(aio, file);
        pthread_mutex_unlock(&aio->lock);
    }
    return status;
}

zpp_status zpp_aio_flush(zpp_aio *aio, bool durable, const struct zpp_wait *wait, struct zpp_aio_fault *fault,
                         struct zpp_err *err) {
    struct zpp_aio_fault unused;
    if (!fault) fault = &unused;
    zpp_status status = usable(aio, err);
    if (status == ZPP_OK) status = wait_for_all(aio, wait, err);
    if (status != ZPP_OK) return status;
    pthread_mutex_lock(&aio->lock);
    struct zpp_aio_failure *failure = aio->write_failure;
    aio->write_failure = NULL;
    pthread_mutex_unlock(&aio->lock);
    if (failure) {
        *fault = failure->fault;
        status = zpp_fail_again(err, &failure->err);
        free(failure);
        return status;
    }
    return durable ? sync_all(aio, fault, err) : ZPP_OK;
}

void zpp_aio_forget(zpp_aio *aio, const char *path) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (usable(aio, &err) != ZPP_OK) return;
    pthread_mutex_lock(&aio->files_lock);
    pthread_mutex_lock(&aio->lock);
    for (struct zpp_file *file; (file = zpp_files_take(&aio->files, path));) zpp_aio_drop_file(aio, file);
    pthread_mutex_unlock(&aio->lock);
    zpp_files_drop_checksums(&aio->files, path);
    pthread_mutex_unlock(&aio->files_lock);
}

zpp_status zpp_aio_share_checksums(zpp_aio *aio, const char *path, unsigned part, zpp_checksums *checksums,
                                   struct zpp_err *err) {
    pthread_mutex_lock(&aio->files_lock);
    const zpp_status status = zpp_files_share_checksums(&aio->files, path, part, checksums, err);
    pthread_mutex_unlock(&aio->files_lock);
    return status;
}

zpp_status zpp_aio_make(zpp_aio *aio, const char *path, uint64_t bytes, struct zpp_aio_fault *fault,
                        struct zpp_err *err) {
    const zpp_status status = usable(aio, err);
    if (status != ZPP_OK) return status;
    return zpp_files_make(&aio->files, path, bytes, fault, err); /* no lock: it reads constant fields only */
}
