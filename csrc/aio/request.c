/* SPDX-License-Identifier: Apache-2.0
 *
 * Outstanding requests: their references, the two queues, the hazards between them, and their completion.
 *
 * A hazard is two requests that touch the same bytes of one file, one of them a write. The later request waits for the
 * earlier one, whatever their priorities, so that a prefetch never overtakes the write-back whose bytes it reads.
 * Outstanding requests are listed by where they start, so that a new request is compared with few of thousands.
 *
 * Files are told apart by device and inode: a link, another spelling of the path, and a second opening (first for
 * reading, then for writing) share one list.
 *
 * Requests on a file with checksums collide when they touch the same page: a read checks whole pages, so no write may
 * change a neighbour's bytes in the middle of it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "../base/mem.h"
#include "internal.h"

enum { NARROW_SHIFT = 20 /* requests up to 1 MiB are listed by the mebibyte that they start in */ };

static struct zpp_aio_failure no_memory_failure = {
    .err = {ZPP_NOMEM, ENOMEM, ZPP_NO_RANK, "aio: a request failed, and there was no memory to say why"}};

void zpp_aio_log(zpp_aio *aio, const char *text) {
    if (aio->config.log) aio->config.log(aio->config.log_ctx, text);
}

void zpp_aio_tell_lock(zpp_aio *aio, int os_errno) {
    struct rlimit limit = {0};
    char text[512];
    if (atomic_exchange(&aio->told_lock, true)) return;
    (void)getrlimit(RLIMIT_MEMLOCK, &limit);
    snprintf(text, sizeof text,
             "aio: buffers could not be locked in memory: %s; the memlock limit is %llu bytes, raise it (ulimit -l, "
             "LimitMEMLOCK=) for less work on the CPU. Going on with unlocked buffers",
             strerror(os_errno), (unsigned long long)limit.rlim_cur);
    zpp_aio_log(aio, text);
}

/* --- references --- */

void zpp_aio_unref(zpp_aio_request *request) {
    if (--request->refs) return;
    if (request->failure != &no_memory_failure) free(request->failure);
    --request->engine->refs;
    free(request);
}

struct zpp_aio_failure *zpp_aio_new_failure(zpp_aio_request *request) {
    if (request->failure) return NULL;
    struct zpp_aio_failure *failure = calloc(1, sizeof *failure);
    request->failure = failure ? failure : &no_memory_failure;
    return failure;
}

/* --- queues --- */

static struct zpp_aio_queue *queue_of(zpp_aio *aio, const zpp_aio_request *request) {
    return request->urgent ? &aio->urgent : &aio->background;
}

static void wake_driver(zpp_aio *aio) {
    if (!aio->ring) {
        pthread_cond_signal(&aio->work);
    } else if (aio->sleeping) {
        aio->sleeping = false;
        zpp_ring_wake(aio->ring);
    }
}

void zpp_aio_enqueue(zpp_aio *aio, zpp_aio_request *request) {
    struct zpp_aio_queue *queue = queue_of(aio, request);
    request->queued = true;
    request->queue_next = NULL;
    if (queue->last) queue->last->queue_next = request;
    else queue->first = request;
    queue->last = request;
    if (aio->free_chunks) wake_driver(aio); /* else the driver takes it when a chunk is free */
}

void zpp_aio_unqueue(zpp_aio *aio, zpp_aio_request *request) {
    if (!request->queued) return;
    struct zpp_aio_queue *queue = queue_of(aio, request);
    zpp_aio_request *before = NULL;
    for (zpp_aio_request *seen = queue->first; seen != request; seen = seen->queue_next) before = seen;
    if (before) before->queue_next = request->queue_next;
    else queue->first = request->queue_next;
    if (queue->last == request) queue->last = before;
    request->queued = false;
}

/* --- hazards --- */

bool zpp_aio_join_hazards(zpp_aio *aio, struct zpp_file *file) {
    const struct zpp_file_part *part = &file->parts[0];
    struct zpp_aio_hazards *hazards = aio->hazards;
    if (file->hazards) return true;
    while (hazards && (hazards->device != part->device || hazards->inode != part->inode ||
                       hazards->parts_count != file->parts_count))
        hazards = hazards->next;
    if (!hazards) {
        hazards = calloc(1, sizeof *hazards);
        if (!hazards) return false;
        hazards->next = aio->hazards;
        hazards->device = part->device;
        hazards->inode = part->inode;
        hazards->parts_count = file->parts_count;
        aio->hazards = hazards;
    }
    ++hazards->refs;
    file->hazards = hazards;
    return true;
}

void zpp_aio_leave_hazards(zpp_aio *aio, struct zpp_file *file) {
    struct zpp_aio_hazards *hazards = file->hazards, **link = &aio->hazards;
    file->hazards = NULL;
    if (!hazards || --hazards->refs) return;
    while (*link != hazards) link = &(*link)->next;
    *link = hazards->next;
    free(hazards);
}

static zpp_aio_request **hazard_list(struct zpp_aio_hazards *hazards, const zpp_aio_request *request) {
    if (request->bytes > (size_t)1 << NARROW_SHIFT) return &hazards->wide;
    return &hazards->narrow[(request->offset_bytes >> NARROW_SHIFT) % ZPP_AIO_HAZARD_LISTS];
}

/* True if the requests touch the same `unit`, a power of two. */
static bool collide(const zpp_aio_request *a, const zpp_aio_request *b, uint64_t unit) {
    const uint64_t a_end = (a->offset_bytes + a->bytes + unit - 1) & ~(unit - 1);
    const uint64_t b_end = (b->offset_bytes + b->bytes + unit - 1) & ~(unit - 1);
    return (a->write || b->write) && a->offset_bytes < b_end && b->offset_bytes < a_end;
}

/* Make `later` wait for each request of the list that it collides with. Return false where there is no memory. */
static bool add_dependencies_on(zpp_aio_request *list, zpp_aio_request *later, uint64_t unit) {
    for (zpp_aio_request *earlier = list; earlier; earlier = earlier->hazard_next) {
        if (!collide(earlier, later, unit)) continue;
        struct zpp_aio_dependency *dependency = malloc(sizeof *dependency);
        if (!dependency) return false;
        *dependency = (struct zpp_aio_dependency){earlier->dependents, later};
        earlier->dependents = dependency;
        ++later->dependencies;
        ++later->refs;
    }
    return true;
}

bool zpp_aio_add_dependencies(struct zpp_file *file, zpp_aio_request *later) {
    const uint64_t unit = file->checksummed ? ZPP_BLOCK_BYTES : 1;
    if (!add_dependencies_on(file->hazards->wide, later, unit)) return false;
    const uint64_t first = later->offset_bytes >> NARROW_SHIFT;
    const uint64_t last = (later->offset_bytes + later->bytes - 1) >> NARROW_SHIFT;
    /* A narrow request that reaches into the first mebibyte may start in the mebibyte before. */
    const uint64_t from = first ? first - 1 : 0, lists = last - from + 1;
    for (uint64_t index = 0; index < lists && index < ZPP_AIO_HAZARD_LISTS; ++index) {
        if (!add_dependencies_on(file->hazards->narrow[(from + index) % ZPP_AIO_HAZARD_LISTS], later, unit))
            return false;
    }
    return true;
}

void zpp_aio_list_hazard(struct zpp_file *file, zpp_aio_request *request) {
    zpp_aio_request **list = hazard_list(file->hazards, request);
    request->hazard_next = *list;
    request->hazard_link = list;
    if (*list) (*list)->hazard_link = &request->hazard_next;
    *list = request;
}

static void unlist_hazard(zpp_aio_request *request) {
    *request->hazard_link = request->hazard_next;
    if (request->hazard_next) request->hazard_next->hazard_link = request->hazard_link;
}

static void release_dependents(zpp_aio *aio, zpp_aio_request *request) {
    while (request->dependents) {
        struct zpp_aio_dependency *dependency = request->dependents;
        request->dependents = dependency->next;
        zpp_aio_request *later = dependency->later;
        if (--later->dependencies == 0 && !atomic_load(&later->done)) zpp_aio_enqueue(aio, later);
        zpp_aio_unref(later);
        free(dependency);
    }
}

/* Remove the dependencies of a request that could not begin. */
void zpp_aio_drop_dependencies(zpp_aio *aio, const zpp_aio_request *request) {
    for (zpp_aio_request *earlier = aio->first; earlier; earlier = earlier->next) {
        for (struct zpp_aio_dependency **link = &earlier->dependents; *link;) {
            struct zpp_aio_dependency *dependency = *link;
            if (dependency->later == request) {
                *link = dependency->next;
                free(dependency);
            } else {
                link = &dependency->next;
            }
        }
    }
}

/* --- completion --- */

void zpp_aio_close_file(zpp_aio *aio, struct zpp_file *file) {
    for (unsigned index = 0; index < file->parts_count; ++index) {
        const int slot = file->parts[index].slot;
        if (slot >= 0) aio->retired_slots[aio->retired_count++] = slot;
    }
    if (aio->retired_count && aio->ring) wake_driver(aio);
    zpp_aio_leave_hazards(aio, file);
    zpp_file_close(&aio->sys, file);
}

void zpp_aio_drop_file(zpp_aio *aio, struct zpp_file *file) {
    file->gone = true;
    if (file->refs == 0) zpp_aio_close_file(aio, file);
}

void zpp_aio_unref_file(zpp_aio *aio, struct zpp_file *file) {
    if (--file->refs == 0 && file->gone) zpp_aio_close_file(aio, file);
}

static void unlink_outstanding(zpp_aio *aio, zpp_aio_request *request) {
    if (request->previous) request->previous->next = request->next;
    else aio->first = request->next;
    if (request->next) request->next->previous = request->previous;
    else aio->last = request->previous;
    --aio->outstanding;
}

static void keep_write_failure(zpp_aio *aio, const zpp_aio_request *request) {
    if (aio->write_failure) return;
    aio->write_failure = malloc(sizeof *aio->write_failure);
    if (aio->write_failure) *aio->write_failure = *request->failure;
    aio->write_failure_number = request->number;
}

void zpp_aio_complete(zpp_aio *aio, zpp_aio_request *request) {
    zpp_span_end(request->began_ns, request->write ? ZPP_SPAN_WRITE : ZPP_SPAN_READ, request->file->path,
                 request->bytes);
    zpp_aio_unqueue(aio, request);
    unlink_outstanding(aio, request);
    unlist_hazard(request);
    if (request->write && request->failure) keep_write_failure(aio, request);
    atomic_store_explicit(&request->done, true, memory_order_release);
    release_dependents(aio, request);
    zpp_aio_unref_file(aio, request->file);
    request->file = NULL;
    if (request->waiters) pthread_cond_broadcast(&aio->finished);
    zpp_aio_unref(request); /* the engine's reference */
}
