/* SPDX-License-Identifier: Apache-2.0
 *
 * Files of the engine: how they are opened, what O_DIRECT requires, and how a request is cut into pieces that meet the
 * requirements.
 *
 * One logical file is one file, or, where the engine was given several folders and the path is relative, stripes of
 * `stripe_bytes` dealt out in turn to files of that name in each folder.
 *
 * Size rules. O_DIRECT moves whole units (512 bytes or more) to and from aligned memory. So
 *   - whole units in aligned memory go directly;
 *   - reads of anything else read the surrounding units into a bounce buffer;
 *   - writes of whole pages from unaligned memory go through a bounce buffer, and bytes that do not fill a page are
 *     written through a second, buffered descriptor. A page is written directly only by a request that covers all
 *     of it: two requests that share a page both write it through the page cache, which keeps neighbours' bytes.
 * Where checksums are kept (checksums.h), reads fetch whole pages, so that all bytes of a page's sum can be checked.
 *
 * Threads: a zpp_files object is used under its owner's lock; zpp_file_piece only reads what does not change while
 * open.
 */
#ifndef ZPP_AIO_FILE_H
#define ZPP_AIO_FILE_H

#include <stdatomic.h>
#include "../base/status.h"
#include "checksums.h"
#include "sys.h"

enum { ZPP_AIO_PARTS = 16 };

/* The file and the bytes of a failure; it completes the sentence in struct zpp_err. */
struct zpp_aio_fault {
    char path[512]; /* truncated, never overrun */
    uint64_t offset_bytes, wanted_bytes, free_bytes;
    uint64_t into_bytes; /* of the request, that come before what failed */
    bool has_free;
    int os_errno;
};

struct zpp_file_part {
    char *path;    /* owned */
    int direct_fd; /* -1: the file system has no O_DIRECT for this file */
    int buffered_fd;
    int slot; /* the ring's thread owns it: place of direct_fd in the ring's table, or -1 */
    bool slot_tried;
    uint32_t memory_align_bytes, offset_align_bytes;
    uint64_t device, inode;
    atomic_bool direct_refused; /* an operation on direct_fd gave EINVAL: buffered from then on */
    zpp_checksums *checksums;   /* a reference, or NULL */
};

/* Checksums of one file on the disk; they outlive its descriptors. */
struct zpp_file_checksums {
    struct zpp_file_checksums *next;
    char *path; /* owned; of the part */
    bool known; /* device and inode are */
    uint64_t device, inode;
    zpp_checksums *checksums; /* a reference */
};

struct zpp_aio_hazards;

struct zpp_file {
    struct zpp_file *next; /* most recently used first */
    char *path;            /* owned; as the caller spelled it */
    struct zpp_file_part parts[ZPP_AIO_PARTS];
    unsigned parts_count;
    uint64_t stripe_bytes; /* 0: one part */
    bool writable;
    bool checksummed; /* some part has checksums */
    /* below: guarded by the engine's lock */
    bool gone;                       /* out of the table; closed with its last request */
    size_t refs;                     /* outstanding requests */
    bool dirty;                      /* written since the last durable flush */
    struct zpp_aio_hazards *hazards; /* a reference, from the first request on; request.c */
};

struct zpp_files {
    const struct zpp_aio_sys *sys; /* borrowed */
    char *stripes[ZPP_AIO_PARTS];  /* owned; folders */
    unsigned stripes_count;
    uint64_t stripe_bytes;
    bool direct, checksums;
    struct zpp_file *first;
    size_t count;
    struct zpp_file_checksums *kept_checksums;
};

/* Return the file for a request, opened (and for writing created) or taken from the table. A file that was replaced or
 * removed since is not used again: it leaves the table, and `dropped` gets it; the caller must set `gone`, and
 * close it once its `refs` are 0. On failure `fault` and `err` say why. */
zpp_status zpp_files_get(struct zpp_files *files, const char *path, bool write, struct zpp_file **out,
                         struct zpp_file **dropped, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Take a file out of the table: by path, however it was spelled, or the least recently used that has no requests (path
 * NULL; under the engine's lock). Return NULL if there is none. */
struct zpp_file *zpp_files_take(struct zpp_files *files, const char *path);
/* Return the bytes that one of `parts` parts has of a file of `bytes`. `stripe_bytes` 0: there is one part. */
uint64_t zpp_file_part_bytes(unsigned parts, uint64_t stripe_bytes, unsigned part, uint64_t bytes);
/* zpp_aio_make. */
zpp_status zpp_files_make(const struct zpp_files *files, const char *path, uint64_t bytes, struct zpp_aio_fault *fault,
                          struct zpp_err *err);
/* Keep `sums`, a reference that this takes, for a part of a file; and drop those of all parts of a path, or of all
 * files (NULL). */
zpp_status zpp_files_share_checksums(struct zpp_files *files, const char *path, unsigned part, zpp_checksums *checksums,
                                     struct zpp_err *err);
void zpp_files_drop_checksums(struct zpp_files *files, const char *path);
size_t zpp_files_checksums_bytes(const struct zpp_files *files);
void zpp_file_close(const struct zpp_aio_sys *sys, struct zpp_file *file);

/* Reserve blocks for [offset, offset + bytes) where that grows the file by a megabyte or more, so that a full disk is
 * found before anything is written, and writes into fresh files need not wait for each other. */
zpp_status zpp_file_reserve(const struct zpp_files *files, struct zpp_file *file, uint64_t offset_bytes, uint64_t bytes,
                            struct zpp_aio_fault *fault, struct zpp_err *err);

/* One operation of a request. */
struct zpp_file_piece {
    struct zpp_file_part *part;
    uint64_t offset_bytes; /* in the part; of the operation */
    size_t op_bytes;       /* of the operation */
    size_t head_bytes;     /* operation's bytes before the wanted ones (reads through a bounce buffer) */
    size_t wanted_bytes;   /* bytes of the request that it serves; > 0 */
    bool direct, bounce;
};

/* Cut the first piece of the rest of a request. `block_bytes` bounds an operation, `bounce_bytes` one through a bounce
 * buffer; both are multiples of 4096. */
void zpp_file_piece(struct zpp_file *file, bool write, const void *memory, uint64_t offset_bytes, size_t left_bytes,
                    size_t block_bytes, size_t bounce_bytes, struct zpp_file_piece *out);

/* Fill `fault` and `err` for a failed call on bytes of a file; With `free_fd` >= 0 ask its file system for free bytes
 * where os_errno says that it is full. */
zpp_status zpp_file_fail(const struct zpp_aio_sys *sys, const char *what, const char *path, uint64_t offset_bytes,
                         uint64_t wanted_bytes, int os_errno, int free_fd, struct zpp_aio_fault *fault,
                         struct zpp_err *err);

#endif
