/* SPDX-License-Identifier: Apache-2.0
 *
 * Internals of the engine, shared by engine.c (submission, waiting, flushing), request.c (queues, hazards, completion),
 * chunk.c (cutting requests, judging results) and the two drivers: uring.c (one thread over a ring) and pread.c (a few
 * threads).
 *
 * Life of a chunk:  take (lock) -> op -> [kernel] -> settle (again? -> op) -> finish (lock).
 */
#ifndef ZPP_AIO_INTERNAL_H
#define ZPP_AIO_INTERNAL_H

#include <pthread.h>

#include "../base/timeline.h"
#include "engine.h"
#include "ring.h"

enum { ZPP_AIO_HAZARD_LISTS = 64 };

struct zpp_aio_failure {
    struct zpp_err err;
    struct zpp_aio_fault fault;
};

/* A later request that waits for this one, with a reference to it. */
struct zpp_aio_dependency {
    struct zpp_aio_dependency *next;
    zpp_aio_request *later;
};

/* Outstanding requests on one file of the disk, however it is spelled and however often it is open. */
struct zpp_aio_hazards {
    struct zpp_aio_hazards *next;
    uint64_t device, inode; /* of the first part */
    unsigned parts_count;
    size_t refs; /* files */
    zpp_aio_request *narrow[ZPP_AIO_HAZARD_LISTS], *wide; /* by where they start */
};

/* Everything but `done`, `engine` and the job's fields is guarded by the engine's lock. */
struct zpp_aio_request {
    zpp_aio *engine;           /* a reference */
    struct zpp_file *file;     /* a reference until done */
    struct zpp_aio_slab *slab; /* of the arena, where the memory is there */
    unsigned char *memory;     /* borrowed */
    size_t bytes;
    uint64_t offset_bytes;
    uint64_t number;   /* order of submission */
    uint64_t began_ns; /* for zeropp.trace */
    bool write, urgent;
    atomic_bool done;

    bool cancelled, queued;
    size_t taken_bytes; /* given out as chunks */
    unsigned flying;    /* chunks not finished */
    unsigned dependencies; /* earlier requests that it waits for */
    unsigned refs;         /* the caller's, the engine's until done, dependencies' */
    unsigned waiters;
    struct zpp_aio_failure *failure; /* owned */
    struct zpp_aio_dependency *dependents;
    zpp_aio_request *next, *previous;            /* outstanding, by number */
    zpp_aio_request *queue_next;                 /* queue */
    zpp_aio_request *hazard_next, **hazard_link; /* the file's list */
};

struct zpp_aio_chunk {
    struct zpp_aio_chunk *next; /* free list */
    zpp_aio_request *request;
    struct zpp_file_piece piece;
    unsigned char *memory; /* of the request, for the wanted bytes */
    unsigned char *bounce; /* or NULL */
    size_t have_bytes;     /* of the operation, so far */
    unsigned tries;        /* in a row without progress */
    int os_errno;          /* why it failed; 0: it succeeded */
    bool ended;            /* the file ended before the wanted bytes did */
    bool direct, filled;
    bool reread;             /* its sum was wrong once */
    size_t checked_bytes;    /* of the wanted ones */
    struct zpp_checksums_bad bad; /* bytes > 0: its sum is wrong */
};

struct zpp_aio_queue {
    zpp_aio_request *first, *last;
};

struct zpp_aio {
    struct zpp_aio_config config;
    struct zpp_aio_sys sys;
    zpp_aio_arena *arena;
    zpp_ring *ring; /* NULL: pread.c drives */
    pid_t owner;

    pthread_mutex_t files_lock; /* guards `files`; taken before `lock` */
    struct zpp_files files;

    pthread_mutex_t lock;          /* guards everything below, and requests */
    pthread_cond_t finished;       /* a request with waiters is done */
    pthread_cond_t work;           /* pread.c: there are chunks to take */
    zpp_aio_request *first, *last; /* outstanding */
    struct zpp_aio_hazards *hazards;
    unsigned outstanding;
    uint64_t numbers;
    struct zpp_aio_queue urgent, background;
    unsigned urgent_taken; /* chunks taken from urgent while background waited */
    struct zpp_aio_chunk *chunks, *free_chunks;
    unsigned inflight;
    size_t inflight_bytes;
    unsigned char *bounce_memory;
    struct zpp_aio_slab *bounce_slab;
    unsigned char **bounce_free;
    size_t bounce_bytes;
    unsigned bounce_count, bounce_free_count;
    struct zpp_aio_failure *write_failure; /* first since the last flush */
    uint64_t write_failure_number;
    int retired_slots[ZPP_RING_FILES];
    unsigned retired_count;
    uint64_t read_bytes, written_bytes, checked_bytes, operations, bounced_bytes;
    atomic_uint_fast64_t retries;
    size_t registered_bytes;
    bool sleeping, stopping;
    zpp_status broken; /* the ring failed: every request fails */
    struct zpp_err broken_err;
    size_t refs; /* the owner, and each request */
    atomic_bool told_direct, told_lock;

    pthread_t *threads;
    unsigned threads_count;
};

/* chunk.c; `lock` held. Fill `out` with up to `capacity` chunks. */
size_t zpp_aio_take(zpp_aio *aio, struct zpp_aio_chunk **out, size_t capacity);
/* chunk.c; no lock. Fill in the operation that a chunk needs next; slots are -1. */
void zpp_aio_chunk_op(struct zpp_aio_chunk *chunk, struct zpp_aio_op *out);
/* chunk.c; no lock. Judge a result. Return true if the chunk needs another operation. */
bool zpp_aio_settle(zpp_aio *aio, struct zpp_aio_chunk *chunk, ssize_t result);
/* chunk.c; `lock` held. End the chunk, and its request with the last one. */
void zpp_aio_finish(zpp_aio *aio, struct zpp_aio_chunk *chunk);

/* request.c; `lock` held. */
void zpp_aio_complete(zpp_aio *aio, zpp_aio_request *request);
void zpp_aio_enqueue(zpp_aio *aio, zpp_aio_request *request);
void zpp_aio_unqueue(zpp_aio *aio, zpp_aio_request *request);
void zpp_aio_unref(zpp_aio_request *request); /* the caller releases the request's reference to the engine */
struct zpp_aio_failure *zpp_aio_new_failure(zpp_aio_request *request); /* NULL: there is one already, or no memory */
void zpp_aio_close_file(zpp_aio *aio, struct zpp_file *file); /* it has no requests; frees its slots in the ring */
void zpp_aio_drop_file(zpp_aio *aio, struct zpp_file *file);  /* it left the table: its last request closes it */
void zpp_aio_unref_file(zpp_aio *aio, struct zpp_file *file); /* the last one closes a file that left the table */
/* request.c; no lock held. */
void zpp_aio_tell_lock(zpp_aio *aio, int os_errno); /* once */
void zpp_aio_log(zpp_aio *aio, const char *text);

/* request.c; `lock` held. Join a file to the hazards of its inode (false: no memory), and leave them. */
bool zpp_aio_join_hazards(zpp_aio *aio, struct zpp_file *file);
void zpp_aio_leave_hazards(zpp_aio *aio, struct zpp_file *file);
/* request.c; `lock` held. Make `later` wait for the requests that it collides with. Return false where there is no
 * memory: call zpp_aio_drop_dependencies then. */
bool zpp_aio_add_dependencies(struct zpp_file *file, zpp_aio_request *later);
void zpp_aio_drop_dependencies(zpp_aio *aio, const zpp_aio_request *request);
void zpp_aio_list_hazard(struct zpp_file *file, zpp_aio_request *request);

/* lifecycle.c. Free the engine after its last reference. */
void zpp_aio_free(zpp_aio *aio);

/* Drivers: start the threads, and wake one when `lock` is held and chunks may be taken. Threads end once `stopping` is
 * set and nothing is in flight or queued. */
zpp_status zpp_aio_uring_start(zpp_aio *aio, struct zpp_err *err);
zpp_status zpp_aio_pread_start(zpp_aio *aio, struct zpp_err *err);

#endif
