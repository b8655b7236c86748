/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening, alignment and size rules: file.h.
 */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/mem.h"

enum {
    UNKNOWN_ALIGN_BYTES = ZPP_BLOCK_BYTES, /* for every device where the kernel has no answer */
    SMALL_BYTES = 64 << 10,     /* up to here one more operation costs more than copying */
    RESERVE_FROM_BYTES = 1 << 20,
};

zpp_status zpp_file_fail(const struct zpp_aio_sys *sys, const char *what, const char *path, uint64_t offset_bytes,
                         uint64_t wanted_bytes, int os_errno, int free_fd, struct zpp_aio_fault *fault,
                         struct zpp_err *err) {
    *fault = (struct zpp_aio_fault){.offset_bytes = offset_bytes, .wanted_bytes = wanted_bytes, .os_errno = os_errno};
    snprintf(fault->path, sizeof fault->path, "%s", path);
    const bool full = os_errno == ENOSPC || os_errno == EDQUOT;
    if (full && free_fd >= 0) fault->has_free = sys->free_bytes(sys->ctx, free_fd, &fault->free_bytes) == 0;
    zpp_status status;
    if (wanted_bytes == 0) { /* a flush has no bytes */
        char free_space[64] = "";
        if (full && fault->has_free)
            snprintf(free_space, sizeof free_space, ": its file system has %" PRIu64 " bytes free", fault->free_bytes);
        status = zpp_fail(err, ZPP_TIER, "aio: %s \"%s\"%s: %s", what, path, free_space, strerror(os_errno));
    } else if (full && fault->has_free) {
        const bool enough = fault->free_bytes >= wanted_bytes; /* another writer may have released some */
        status = zpp_fail(err, ZPP_TIER,
                          "aio: %s \"%s\": wanted %" PRIu64 " bytes at offset %" PRIu64 ", its file system has %" PRIu64
                          " free%s; free some, or choose another folder: %s",
                          what, path, wanted_bytes, offset_bytes, fault->free_bytes,
                          enough ? " by now (a quota is met, or another program held them)" : "",
                          strerror(os_errno));
    } else {
        status = zpp_fail(err, ZPP_TIER, "aio: %s \"%s\": %" PRIu64 " bytes at offset %" PRIu64 ": %s", what, path,
                          wanted_bytes, offset_bytes, strerror(os_errno));
    }
    if (err) err->os_errno = os_errno;
    return status;
}

/* --- parts -------------------------------------------------------------------------------------------------------- */

static unsigned parts_of(const struct zpp_files *files, const char *path) {
    return files->stripes_count && path[0] != '/' ? files->stripes_count : 1;
}

/* New; NULL: no memory. */
static char *part_path(const struct zpp_files *files, const char *path, unsigned part) {
    char *joined = NULL;
    if (files->stripes_count == 0 || path[0] == '/') return strdup(path);
    return asprintf(&joined, "%s/%s", files->stripes[part], path) < 0 ? NULL : joined;
}

uint64_t zpp_file_part_bytes(unsigned parts, uint64_t stripe_bytes, unsigned part, uint64_t bytes) {
    if (parts == 1 || !stripe_bytes) return bytes;
    const uint64_t row_bytes = stripe_bytes * parts;
    const uint64_t in_row = bytes % row_bytes, before = stripe_bytes * part;
    uint64_t extra = in_row > before ? in_row - before : 0;
    if (extra > stripe_bytes) extra = stripe_bytes;
    return bytes / row_bytes * stripe_bytes + extra;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

static void close_part(const struct zpp_aio_sys *sys, struct zpp_file_part *part) {
    if (part->direct_fd >= 0) sys->close(sys->ctx, part->direct_fd);
    if (part->buffered_fd >= 0) sys->close(sys->ctx, part->buffered_fd);
    zpp_checksums_unref(part->checksums);
    free(part->path);
}

void zpp_file_close(const struct zpp_aio_sys *sys, struct zpp_file *file) {
    if (!file) return;
    for (unsigned part = 0; part < file->parts_count; ++part) close_part(sys, &file->parts[part]);
    free(file->path);
    free(file);
}

static void open_direct(const struct zpp_files *files, struct zpp_file_part *part, int flags) {
    const struct zpp_aio_sys *sys = files->sys;
    part->direct_fd = -1;
    if (!files->direct) return;
    const int fd = sys->open(sys->ctx, part->path, (flags & ~O_CREAT) | O_DIRECT);
    if (fd < 0) return; /* tmpfs and others refuse with EINVAL: the buffered descriptor serves */
    uint32_t memory_bytes = 0, offset_bytes = 0;
    if (sys->direct_align(sys->ctx, fd, &memory_bytes, &offset_bytes) < 0)
        memory_bytes = offset_bytes = UNKNOWN_ALIGN_BYTES;
    if (!memory_bytes || !offset_bytes || offset_bytes > UNKNOWN_ALIGN_BYTES || memory_bytes > UNKNOWN_ALIGN_BYTES) {
        sys->close(sys->ctx, fd); /* 0 means no O_DIRECT on this file */
        return;
    }
    part->direct_fd = fd;
    part->memory_align_bytes = memory_bytes;
    part->offset_align_bytes = offset_bytes;
}

/* --- checksums ---------------------------------------------------------------------------------------------------- */

static struct zpp_file_checksums **find_checksums(struct zpp_files *files, const char *path) {
    struct zpp_file_checksums **link = &files->kept_checksums;
    while (*link && strcmp((*link)->path, path) != 0) link = &(*link)->next;
    return link;
}

static bool is_of(const struct zpp_file_checksums *entry, uint64_t device, uint64_t inode) {
    return entry->known && entry->device == device && entry->inode == inode;
}

static void drop_checksums(struct zpp_file_checksums **link) {
    struct zpp_file_checksums *dropped = *link;
    *link = dropped->next;
    zpp_checksums_unref(dropped->checksums);
    free(dropped->path);
    free(dropped);
}

/* Keep checksums for the part at `path`. */
static zpp_status keep_checksums(struct zpp_files *files, const char *path, zpp_checksums *checksums,
                                 struct zpp_err *err) {
    struct zpp_file_checksums **link = find_checksums(files, path), *entry = calloc(1, sizeof *entry);
    char *copy = strdup(path);
    if (!checksums || !entry || !copy) {
        zpp_checksums_unref(checksums);
        free(entry);
        free(copy);
        return zpp_fail(err, ZPP_NOMEM, "aio: no memory for the checksums of \"%s\"", path);
    }
    if (*link) drop_checksums(link);
    *entry = (struct zpp_file_checksums){.next = files->kept_checksums, .path = copy, .checksums = checksums};
    files->kept_checksums = entry;
    return ZPP_OK;
}

zpp_status zpp_files_share_checksums(struct zpp_files *files, const char *path, unsigned part, zpp_checksums *checksums,
                                     struct zpp_err *err) {
    if (part >= parts_of(files, path)) {
        zpp_checksums_unref(checksums);
        return zpp_fail(err, ZPP_INVALID, "aio: part %u of \"%s\" has checksums, it has %u parts", part, path,
                        parts_of(files, path));
    }
    char *name = part_path(files, path, part);
    const zpp_status status = keep_checksums(files, name ? name : path, name ? checksums : NULL, err);
    if (!name) zpp_checksums_unref(checksums);
    free(name);
    return status;
}

static void drop_checksums_of(struct zpp_files *files, uint64_t device, uint64_t inode) {
    for (struct zpp_file_checksums **link = &files->kept_checksums; *link;) {
        if (is_of(*link, device, inode)) drop_checksums(link);
        else link = &(*link)->next;
    }
}

/* Look up what a part of a path names now. Return false if there is nothing. */
static bool look_at(const struct zpp_files *files, const char *path, unsigned part, struct zpp_aio_stat *out) {
    char *name = part_path(files, path, part);
    const bool exists = name && files->sys->stat(files->sys->ctx, name, out) == 0;
    free(name);
    return exists;
}

static void drop_checksums_of_part(struct zpp_files *files, const char *path, unsigned part) {
    struct zpp_aio_stat seen;
    char *name = part_path(files, path, part);
    struct zpp_file_checksums **link = name ? find_checksums(files, name) : NULL;
    if (link && *link) drop_checksums(link);
    free(name);
    if (look_at(files, path, part, &seen)) drop_checksums_of(files, seen.device, seen.inode);
}

void zpp_files_drop_checksums(struct zpp_files *files, const char *path) {
    while (!path && files->kept_checksums) drop_checksums(&files->kept_checksums);
    for (unsigned part = 0; path && files->kept_checksums && part < parts_of(files, path); ++part)
        drop_checksums_of_part(files, path, part);
}

size_t zpp_files_checksums_bytes(const struct zpp_files *files) {
    size_t bytes = 0;
    for (const struct zpp_file_checksums *entry = files->kept_checksums; entry; entry = entry->next)
        bytes += zpp_checksums_bytes(entry->checksums);
    return bytes;
}

/* Return a reference to the sums of a file that is open under another name, because it was renamed or linked; NULL:
 * none. An inode that is not open proves nothing: it may be another file's by now. */
static zpp_checksums *checksums_of_open(const struct zpp_files *files, const struct zpp_file_part *part) {
    for (const struct zpp_file *file = files->first; file; file = file->next)
        for (unsigned index = 0; index < file->parts_count; ++index) {
            const struct zpp_file_part *seen = &file->parts[index];
            if (seen->checksums && seen->device == part->device && seen->inode == part->inode)
                return zpp_checksums_ref(seen->checksums);
        }
    return NULL;
}

/* Find or make the part's sums, and drop those of a file that had its name before. Return 0 or the errno. */
static int join_checksums(struct zpp_files *files, struct zpp_file_part *part, uint64_t seen_bytes, bool write) {
    struct zpp_file_checksums **link = find_checksums(files, part->path), *entry = *link;
    struct zpp_err err = ZPP_ERR_INIT;
    if (entry && entry->known && !is_of(entry, part->device, part->inode)) {
        drop_checksums(link);
        entry = NULL;
    }
    if (!entry) {
        zpp_checksums *checksums = checksums_of_open(files, part);
        if (!checksums && !write) return 0; /* it has no sums */
        if (!checksums) { /* sums under a name that is not open belong to bytes that are about to be overwritten */
            drop_checksums_of(files, part->device, part->inode);
            checksums = zpp_checksums_create();
        }
        if (keep_checksums(files, part->path, checksums, &err) != ZPP_OK) return ENOMEM;
        entry = files->kept_checksums;
    }
    if (!seen_bytes) zpp_checksums_clear_all(entry->checksums); /* inodes are reused, and the file is empty then */
    entry->known = true;
    entry->device = part->device;
    entry->inode = part->inode;
    part->checksums = zpp_checksums_ref(entry->checksums);
    return 0;
}

/* --- files -------------------------------------------------------------------------------------------------------- */

/* Open a part. Return 0 or the errno. */
static int open_part(struct zpp_files *files, struct zpp_file_part *part, bool write) {
    const struct zpp_aio_sys *sys = files->sys;
    const int flags = write ? O_RDWR | O_CREAT : O_RDONLY;
    struct zpp_aio_stat seen;
    part->buffered_fd = sys->open(sys->ctx, part->path, flags);
    if (part->buffered_fd < 0) return -part->buffered_fd;
    const int failed = sys->fstat(sys->ctx, part->buffered_fd, &seen);
    if (failed < 0) return -failed;
    part->device = seen.device;
    part->inode = seen.inode;
    /* Readahead around a tail would read neighbours into the page cache, and direct writes would have to evict them. */
    posix_fadvise(part->buffered_fd, 0, 0, POSIX_FADV_RANDOM);
    open_direct(files, part, flags);
    return files->checksums ? join_checksums(files, part, seen.bytes, write) : 0;
}

/* Return the part before this one that is the same file, because a folder was named twice, or NULL. */
static const struct zpp_file_part *same_part(const struct zpp_file *file, const struct zpp_file_part *part) {
    const struct zpp_file_part *other = file->parts;
    while (other != part && (other->device != part->device || other->inode != part->inode)) ++other;
    return other == part ? NULL : other;
}

static zpp_status open_file(struct zpp_files *files, const char *path, bool write, struct zpp_file **out,
                            struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct zpp_file *file = calloc(1, sizeof *file);
    if (!file) return zpp_fail(err, ZPP_NOMEM, "aio: no memory to open \"%s\"", path);
    const unsigned count = parts_of(files, path);
    file->path = strdup(path);
    file->writable = write;
    file->stripe_bytes = count > 1 ? files->stripe_bytes : 0;
    for (unsigned index = 0; index < count; ++index) {
        struct zpp_file_part *part = &file->parts[index];
        *part = (struct zpp_file_part){.direct_fd = -1, .buffered_fd = -1, .slot = -1};
        part->path = part_path(files, path, index);
        file->parts_count = index + 1;
        const int failed = part->path && file->path ? open_part(files, part, write) : ENOMEM;
        if (failed) {
            zpp_file_fail(files->sys, write ? "cannot open for writing" : "cannot open for reading",
                          part->path ? part->path : path, 0, 0, failed, -1, fault, err);
            zpp_file_close(files->sys, file);
            return ZPP_TIER;
        }
        const struct zpp_file_part *same = same_part(file, part);
        if (same) {
            zpp_fail(err, ZPP_INVALID,
                     "aio: \"%s\" and \"%s\" are one file, wanted a folder of its own for each stripe", same->path,
                     part->path);
            zpp_file_close(files->sys, file);
            return ZPP_INVALID;
        }
        file->checksummed |= part->checksums != NULL;
    }
    *out = file;
    return ZPP_OK;
}

/* True if the paths still name the open files. */
static bool still_there(const struct zpp_files *files, const struct zpp_file *file) {
    for (unsigned index = 0; index < file->parts_count; ++index) {
        const struct zpp_file_part *part = &file->parts[index];
        struct zpp_aio_stat seen;
        if (files->sys->stat(files->sys->ctx, part->path, &seen) < 0) return false;
        if (seen.device != part->device || seen.inode != part->inode) return false;
    }
    return true;
}

static struct zpp_file *take(struct zpp_files *files, struct zpp_file **link) {
    struct zpp_file *file = *link;
    *link = file->next;
    file->next = NULL;
    --files->count;
    return file;
}

zpp_status zpp_files_get(struct zpp_files *files, const char *path, bool write, struct zpp_file **out,
                         struct zpp_file **dropped, struct zpp_aio_fault *fault, struct zpp_err *err) {
    *dropped = NULL;
    struct zpp_file **link = &files->first;
    while (*link && strcmp((*link)->path, path) != 0) link = &(*link)->next;
    struct zpp_file *file = *link;
    if (file && (!still_there(files, file) || (write && !file->writable))) {
        *dropped = take(files, link);
        file = NULL;
    } else if (file) {
        *link = file->next;
    }
    if (!file) {
        const zpp_status status = open_file(files, path, write, &file, fault, err);
        if (status != ZPP_OK) return status;
        ++files->count;
    }
    file->next = files->first;
    files->first = file;
    *out = file;
    return ZPP_OK;
}

struct zpp_file *zpp_files_take(struct zpp_files *files, const char *path) {
    struct zpp_aio_stat seen;
    const bool exists = path && look_at(files, path, 0, &seen);
    struct zpp_file **found = NULL;
    for (struct zpp_file **link = &files->first; *link; link = &(*link)->next) {
        const struct zpp_file_part *part = &(*link)->parts[0];
        const bool same = exists && (*link)->parts_count == parts_of(files, path) && part->device == seen.device &&
                          part->inode == seen.inode;
        if (path ? same || strcmp((*link)->path, path) == 0 : (*link)->refs == 0) found = link;
    }
    return found ? take(files, found) : NULL;
}

/* --- room --------------------------------------------------------------------------------------------------------- */

/* Return the end of the logical range [0, end) within one part. */
static uint64_t part_end(const struct zpp_file *file, unsigned part, uint64_t end_bytes) {
    return zpp_file_part_bytes(file->parts_count, file->stripe_bytes, part, end_bytes);
}

zpp_status zpp_file_reserve(const struct zpp_files *files, struct zpp_file *file, uint64_t offset_bytes, uint64_t bytes,
                            struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct zpp_aio_sys *sys = files->sys;
    if (bytes < RESERVE_FROM_BYTES) return ZPP_OK;
    for (unsigned index = 0; index < file->parts_count; ++index) {
        struct zpp_file_part *part = &file->parts[index];
        const uint64_t end_bytes = part_end(file, index, offset_bytes + bytes);
        struct zpp_aio_stat seen;
        if (sys->fstat(sys->ctx, part->buffered_fd, &seen) < 0 || end_bytes < seen.bytes + RESERVE_FROM_BYTES) continue;
        /* Reserve from the first new byte, so that a hole before it stays one. */
        const uint64_t start_bytes =
            part_end(file, index, offset_bytes) > seen.bytes ? part_end(file, index, offset_bytes) : seen.bytes;
        const int failed = -sys->reserve(sys->ctx, part->buffered_fd, start_bytes, end_bytes - start_bytes);
        if (failed != ENOSPC && failed != EDQUOT && failed != EFBIG) continue; /* EOPNOTSUPP: it is optional */
        if (file->refs == 0)
            sys->truncate(sys->ctx, part->buffered_fd, seen.bytes); /* release what was reserved */
        return zpp_file_fail(sys, "no room in", part->path, start_bytes, end_bytes - start_bytes, failed,
                             part->buffered_fd, fault, err);
    }
    return ZPP_OK;
}

static zpp_status make_part(const struct zpp_aio_sys *sys, const char *path, uint64_t bytes,
                            struct zpp_aio_fault *fault, struct zpp_err *err) {
    const int fd = sys->open(sys->ctx, path, O_RDWR | O_CREAT | O_EXCL);
    if (fd < 0) return zpp_file_fail(sys, "cannot make", path, 0, bytes, -fd, -1, fault, err);
    int done = bytes ? sys->reserve(sys->ctx, fd, 0, bytes) : 0;
    if (done == -EOPNOTSUPP || done == -ENOSYS) done = sys->truncate(sys->ctx, fd, bytes);
    zpp_status status = ZPP_OK;
    if (done < 0) {
        sys->truncate(sys->ctx, fd, 0); /* release what was reserved, so that it counts as free */
        status = zpp_file_fail(sys, "cannot reserve", path, 0, bytes, -done, fd, fault, err);
    }
    sys->close(sys->ctx, fd);
    return status;
}

zpp_status zpp_files_make(const struct zpp_files *files, const char *path, uint64_t bytes, struct zpp_aio_fault *fault,
                          struct zpp_err *err) {
    const unsigned parts = parts_of(files, path);
    zpp_status status = ZPP_OK;
    for (unsigned part = 0; part < parts && status == ZPP_OK; ++part) {
        char *name = part_path(files, path, part);
        const uint64_t part_bytes = zpp_file_part_bytes(parts, files->stripe_bytes, part, bytes);
        if (!name) return zpp_fail(err, ZPP_NOMEM, "aio: no memory to make \"%s\"", path);
        status = make_part(files->sys, name, part_bytes, fault, err);
        free(name);
    }
    return status;
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static bool aligned(const void *memory, uint32_t align_bytes) { return ((uintptr_t)memory & (align_bytes - 1)) == 0; }

static void write_piece(const struct zpp_file_part *part, const unsigned char *memory, size_t span, size_t bounce_bytes,
                        struct zpp_file_piece *out) {
    const size_t unit = ZPP_BLOCK_BYTES;
    const size_t into = (size_t)(out->offset_bytes % unit);
    out->direct = false;
    out->bounce = false;
    if (span <= SMALL_BYTES && (into || span % unit)) {
        out->wanted_bytes = span;
    } else if (into) {
        out->wanted_bytes = least(span, unit - into);
    } else if (span < unit) {
        out->wanted_bytes = span;
    } else {
        out->direct = true;
        out->bounce = !aligned(memory, part->memory_align_bytes);
        out->wanted_bytes = (out->bounce ? least(span, bounce_bytes) : span) / unit * unit;
    }
    out->op_bytes = out->wanted_bytes;
}

/* Cut a piece of a read, `direct` or not: whole `unit`s, in memory aligned to `align_bytes`. */
static void read_piece(bool direct, size_t unit, uint32_t align_bytes, const unsigned char *memory, size_t span,
                       size_t bounce_bytes, struct zpp_file_piece *out) {
    const size_t into = (size_t)(out->offset_bytes % unit);
    const bool fits = into == 0 && aligned(memory, align_bytes);
    out->direct = direct;
    if (fits && span >= unit && (span % unit == 0 || span > SMALL_BYTES)) {
        out->wanted_bytes = out->op_bytes = span / unit * unit;
        return;
    }
    /* Through a bounce buffer, from the unit's beginning. If only the beginning is unaligned, only the first piece
     * needs it. */
    out->bounce = true;
    out->offset_bytes -= into;
    out->head_bytes = into;
    out->wanted_bytes = least(span, bounce_bytes - into);
    if (into && span > SMALL_BYTES && aligned(memory + (unit - into), align_bytes)) {
        out->wanted_bytes = unit - into;
    }
    out->op_bytes = (into + out->wanted_bytes + unit - 1) / unit * unit;
}

void zpp_file_piece(struct zpp_file *file, bool write, const void *memory, uint64_t offset_bytes, size_t left_bytes,
                    size_t block_bytes, size_t bounce_bytes, struct zpp_file_piece *out) {
    size_t span = least(left_bytes, block_bytes);
    *out = (struct zpp_file_piece){.part = &file->parts[0], .offset_bytes = offset_bytes};
    if (file->stripe_bytes) {
        const uint64_t stripe = offset_bytes / file->stripe_bytes, into = offset_bytes % file->stripe_bytes;
        out->part = &file->parts[stripe % file->parts_count];
        out->offset_bytes = stripe / file->parts_count * file->stripe_bytes + into;
        if (file->stripe_bytes - into < span) span = (size_t)(file->stripe_bytes - into);
    }
    const struct zpp_file_part *part = out->part;
    const bool direct = part->direct_fd >= 0 && !atomic_load_explicit(&part->direct_refused, memory_order_relaxed);
    const size_t over = (size_t)((out->offset_bytes + span) % ZPP_BLOCK_BYTES);
    if (part->checksums && span < left_bytes && over < span) span -= over; /* a page is not cut in two without need */
    if (!write && part->checksums) {
        read_piece(direct, ZPP_BLOCK_BYTES, direct ? part->memory_align_bytes : 1, memory, span, bounce_bytes, out);
    } else if (!direct) {
        out->op_bytes = out->wanted_bytes = span;
    } else if (write) {
        write_piece(part, memory, span, bounce_bytes, out);
    } else {
        read_piece(true, part->offset_align_bytes, part->memory_align_bytes, memory, span, bounce_bytes, out);
    }
}
