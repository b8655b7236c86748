/* SPDX-License-Identifier: Apache-2.0
 *
 * The NVMe engine (DeepNVMe of ZeRO-Infinity, arXiv:2104.07857, section 6.3): reads and writes between memory and files
 * at the device's limit, many at once, beside the computation.
 *
 * A request is cut into pieces of `block_bytes`; up to `depth` pieces are in flight, or `flight_bytes`. A device ends
 * pieces in any order, so requests end one after the other only if it has few at once. Pieces of urgent requests (by
 * default: reads, because a caller will wait for them) go before those of background ones (write-backs), but every
 * eighth place belongs to the background, so that it cannot starve. One thread drives an io_uring. Where io_uring is
 * refused or not built, a few threads do the same with pread and pwrite, and the log says so once.
 *
 * Order: two requests that touch the same bytes of one file, one of them a write, run in the order of their submission,
 * whatever their priority. Others run in any order.
 *
 * A request borrows its memory from zpp_aio_submit until it is done. Memory of the engine's arena and at aligned file
 * offsets moves without a copy. Other memory and offsets work too, edges through bounce buffers (file.h).
 *
 * With `checksums` the engine keeps a sum of each page that it writes (checksums.h), and compares what it reads. A
 * device, a cable or a driver that changes bytes is then an error. The thread that drives the I/O computes the sums.
 * zpp_aio_forget drops those of a file, and the end of the engine drops all. What another engine wrote is not checked,
 * unless the two share a table.
 *
 * Errors are status TIER, with a struct zpp_aio_fault: which file, which bytes, how many the file system has free.
 *
 * Threads: every function may be called from any thread, but zpp_aio_destroy: once, last, when no other call is
 * running. Locks nest in this order: files, engine, arena. After fork() the child must not use the engine; calls there
 * fail with STATE.
 *
 * GPUDirect Storage would be a third driver beside uring.c and pread.c, for requests whose memory is the device's;
 * nothing else would change.
 */
#ifndef ZPP_AIO_ENGINE_H
#define ZPP_AIO_ENGINE_H

#include "../base/wait.h"
#include "arena.h"
#include "file.h"

typedef struct zpp_aio zpp_aio;
typedef struct zpp_aio_request zpp_aio_request;

enum zpp_aio_backend { ZPP_AIO_AUTO, ZPP_AIO_URING, ZPP_AIO_THREADS };
enum zpp_aio_priority { ZPP_AIO_BY_KIND, ZPP_AIO_URGENT, ZPP_AIO_BACKGROUND };

enum { ZPP_AIO_MAX_DEPTH = 1024, ZPP_AIO_DEFAULT_THREADS = 8 };

/* Stripes of the tiers (docs/design/0009): a page of 2 MiB, so that no operation of 1 or 2 MiB is cut in two. */
enum { ZPP_AIO_STRIPE_BYTES = 2 << 20 };

struct zpp_aio_config {
    unsigned depth;               /* operations in flight, 1 .. ZPP_AIO_MAX_DEPTH */
    size_t block_bytes;           /* of one operation; a multiple of 4096, at most 1 GiB */
    size_t flight_bytes;          /* with that many in flight, no operation begins; 0: no bound */
    bool direct;                  /* O_DIRECT where the file system has it */
    bool sqpoll;                  /* a kernel thread submits: fewer system calls, a core that polls */
    bool checksums;               /* what is read must be what was written */
    enum zpp_aio_backend backend; /* URING: without a fallback */
    unsigned threads;             /* of the fallback; 0: the default */
    size_t arena_bytes;           /* bound of the arena; 0: none */
    const char *const *stripes;   /* folders that relative paths are striped over; borrowed during create */
    unsigned stripes_count;       /* 0: none */
    size_t stripe_bytes;          /* a multiple of 4096 */
    void (*log)(void *log_ctx, const char *text); /* warnings; any thread, no lock of the engine held; may be NULL */
    void *log_ctx;
    const struct zpp_aio_sys *sys; /* copied; NULL: the real calls */
};

/* New; end with zpp_aio_destroy. */
zpp_status zpp_aio_create(const struct zpp_aio_config *config, zpp_aio **out, struct zpp_err *err);
/* Cancels what has not begun, waits for what has, ends the threads. Requests that the caller still holds stay good for
 * zpp_aio_wait, _done, _fault and _release. NULL is fine. */
void zpp_aio_destroy(zpp_aio *aio);

struct zpp_aio_job {
    const char *path; /* borrowed during submit */
    void *memory;     /* borrowed until the request is done; only read for writes */
    size_t bytes;
    uint64_t offset_bytes; /* in the file */
    bool write;            /* creates the file, and grows it */
    enum zpp_aio_priority priority;
};
/* Begin. The caller releases the request. `fault` is written on status TIER only. */
zpp_status zpp_aio_submit(zpp_aio *aio, const struct zpp_aio_job *job, zpp_aio_request **out,
                          struct zpp_aio_fault *fault, struct zpp_err *err);

bool zpp_aio_done(const zpp_aio_request *request);
/* The request's own status once done: OK, TIER, or ABORTED where it was cancelled. Before: as base/wait.h says, AGAIN
 * (`wait` NULL), TIMEOUT, or the tick's error; the request then goes on. */
zpp_status zpp_aio_wait(zpp_aio_request *request, const struct zpp_wait *wait, struct zpp_err *err);
/* Of a request that ended with TIER; else NULL. Lives as long as the request. */
const struct zpp_aio_fault *zpp_aio_request_fault(const zpp_aio_request *request);
/* Drop what has not begun. The memory stays borrowed until the request is done. False: it was done already. */
bool zpp_aio_cancel(zpp_aio_request *request);
/* Give the reference back. The request itself goes on. */
void zpp_aio_release(zpp_aio_request *request);

/* Wait until everything submitted before is done. The first failure of a write since the last flush is this call's
 * failure, once. `durable`: the data of all files written have reached the device as well. */
zpp_status zpp_aio_flush(zpp_aio *aio, bool durable, const struct zpp_wait *wait, struct zpp_aio_fault *fault,
                         struct zpp_err *err);
/* Close the descriptors kept for a file (a removed one's space comes free then), whatever it was called when it was
 * opened, and drop its checksums. Requests that run keep theirs. */
void zpp_aio_forget(zpp_aio *aio, const char *path);
/* A file that several engines write, each its own bytes: checksums of one of its parts (zpp_checksums_attach; the
 * engine takes this reference, also on failure). `part` counts the folders of a striped path; else it is 0. Before the
 * first request on the file; only with `checksums`. */
zpp_status zpp_aio_share_checksums(zpp_aio *aio, const char *path, unsigned part, zpp_checksums *checksums,
                                   struct zpp_err *err);
/* Make a new file of zeros at its full length, with every block reserved where the file system can, so that a full
 * disk is detected here. A striped file gets a part in each of its folders; after a failure the caller removes the
 * parts that were made. */
zpp_status zpp_aio_make(zpp_aio *aio, const char *path, uint64_t bytes, struct zpp_aio_fault *fault,
                        struct zpp_err *err);

/* Borrowed; zpp_aio_arena_alloc gives memory that moves without a copy. */
zpp_aio_arena *zpp_aio_get_arena(zpp_aio *aio);

struct zpp_aio_figures {
    bool uring;
    unsigned depth, outstanding; /* requests not done */
    size_t block_bytes;
    uint64_t read_bytes, written_bytes, operations, bounced_bytes, retries;
    uint64_t checked_bytes; /* bytes read that had a checksum, and a correct one */
    size_t checksums_bytes; /* of the tables of checksums */
    size_t registered_bytes, arena_held_bytes, arena_used_bytes;
    size_t open_files;
};
void zpp_aio_figures(zpp_aio *aio, struct zpp_aio_figures *out);

#endif
