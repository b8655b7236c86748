/* SPDX-License-Identifier: Apache-2.0
 *
 * The reserved address range of released units: mem.h.
 *
 * Two reservations of the same length, both without access at first: `home`, whose addresses the units' views hold, and
 * `park`, where the pages of released units stay warm. Pages move by
 *
 *     mremap(from, bytes, bytes, MAYMOVE | FIXED | DONTUNMAP, to)
 *
 * which moves the page table entries and leaves an empty mapping behind, so that there is no moment at which the hole
 * is free and another thread's mmap could land in it (plain mremap has that moment). The hole is then closed with
 * mprotect(PROT_NONE). What is released at offset o is parked at offset o, so the parking place needs no allocator: the
 * place is free because home was mapped there, and mapping [o, o + bytes) uses what is parked in it first.
 *
 * Where the kernel refuses DONTUNMAP (gVisor, Linux before 5.7) released pages go back to the system, and a map costs
 * page faults instead of page moves. This is slower and has the same results.
 *
 * A segment is one kernel mapping (mremap refuses to cross two), so segments are moved exactly as they were made, or
 * cut.
 *
 * Pages of 2 MiB are requested: a page table entry to move in place of 512, and one segment for the disk in place of
 * 512 (docs/design/0020). Both reservations begin at multiples of 2 MiB. A caller that wants these pages to stay whole
 * maps large pieces at multiples of 2 MiB (zpp_range_place); parked pages then fit any of them.
 *
 * A stray read (stray.h) leaves pages of NaN in a hole of home. They are in no segment: mmap and mremap with FIXED
 * replace them when the hole is mapped.
 */
#include "range.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "stray.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

enum { HUGE_BYTES = 2 << 20, HUGE_FROM_BYTES = 2 * HUGE_BYTES };

struct segment {
    size_t offset_bytes, bytes;
};

/* Sorted by offset, never overlapping. */
struct segments {
    struct segment *at;
    size_t count, capacity;
    size_t total_bytes;
};

struct zpp_range {
    char *home, *park;
    size_t bytes;
    size_t warm_limit_bytes;
    bool moves;
    struct segments mapped, parked;
    zpp_stray_area *stray; /* of home */
};

/* --- segment lists ------------------------------------------------------------------------------------------------ */
/* Reserve capacity for `more` segments, so that later changes cannot fail half-way. */
static zpp_status reserve(struct segments *list, size_t more, struct zpp_err *err) {
    if (list->count + more <= list->capacity) return ZPP_OK;
    const size_t capacity = 2 * (list->count + more) + 16;
    struct segment *at = realloc(list->at, capacity * sizeof *at);
    if (!at) return zpp_fail(err, ZPP_NOMEM, "address range: no memory for %zu segments", capacity);
    list->at = at;
    list->capacity = capacity;
    return ZPP_OK;
}

/* Return the index of the first segment that ends after `offset_bytes`. */
static size_t find(const struct segments *list, size_t offset_bytes) {
    size_t low = 0, high = list->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (list->at[middle].offset_bytes + list->at[middle].bytes <= offset_bytes) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void insert(struct segments *list, struct segment segment) {
    assert(list->count < list->capacity);
    const size_t index = find(list, segment.offset_bytes);
    memmove(list->at + index + 1, list->at + index, (list->count - index) * sizeof *list->at);
    list->at[index] = segment;
    list->count += 1;
    list->total_bytes += segment.bytes;
}

/* Remove [begin, end), which lies in segment `index`, from the list; needs capacity for one more. */
static void cut(struct segments *list, size_t index, size_t begin_bytes, size_t end_bytes) {
    const struct segment whole = list->at[index];
    memmove(list->at + index, list->at + index + 1, (list->count - index - 1) * sizeof *list->at);
    list->count -= 1;
    list->total_bytes -= whole.bytes;
    const size_t whole_end = whole.offset_bytes + whole.bytes;
    if (begin_bytes > whole.offset_bytes) {
        insert(list, (struct segment){whole.offset_bytes, begin_bytes - whole.offset_bytes});
    }
    if (end_bytes < whole_end) insert(list, (struct segment){end_bytes, whole_end - end_bytes});
}

static bool covered(const struct segments *list, size_t begin_bytes, size_t end_bytes) {
    for (size_t index = find(list, begin_bytes); index < list->count && begin_bytes < end_bytes; ++index) {
        if (list->at[index].offset_bytes > begin_bytes) return false;
        begin_bytes = list->at[index].offset_bytes + list->at[index].bytes;
    }
    return begin_bytes >= end_bytes;
}

static bool touched(const struct segments *list, size_t begin_bytes, size_t end_bytes) {
    const size_t index = find(list, begin_bytes);
    return index < list->count && list->at[index].offset_bytes < end_bytes;
}

/* --- pages -------------------------------------------------------------------------------------------------------- */
/* Reserve addresses that begin at a multiple of 2 MiB: map more than needed, and unmap the ends. */
static void *reserve_addresses(size_t bytes) {
    char *whole = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return whole;
    const size_t head_bytes = (size_t)(-(uintptr_t)whole & (HUGE_BYTES - 1));
    if (head_bytes) munmap(whole, head_bytes);
    munmap(whole + head_bytes + bytes, HUGE_BYTES - head_bytes);
    return whole + head_bytes;
}

static bool move_pages(char *to, char *from, size_t bytes) {
    return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == to;
}

/* True if this kernel moves pages and leaves the hole mapped: tried once, on one page of each reservation. */
static bool can_move(zpp_range *range) {
    if (mprotect(range->home, zpp_page_bytes(), PROT_READ | PROT_WRITE) != 0) return false;
    *(volatile char *)range->home = 1;
    const bool moved = move_pages(range->park, range->home, zpp_page_bytes()) && *(volatile char *)range->park == 1;
    madvise(range->home, zpp_page_bytes(), MADV_DONTNEED);
    mprotect(range->home, zpp_page_bytes(), PROT_NONE);
    if (moved) {
        madvise(range->park, zpp_page_bytes(), MADV_DONTNEED);
        mprotect(range->park, zpp_page_bytes(), PROT_NONE);
    }
    return moved;
}

/* Move the parked piece [from, from + bytes) of segment `index` to home + to. */
static zpp_status unpark(zpp_range *range, size_t index, size_t from, size_t to, size_t bytes, struct zpp_err *err) {
    if (!move_pages(range->home + to, range->park + from, bytes)) {
        return zpp_fail_os(err, errno, "address range: moving %zu warm bytes to offset %zu", bytes, to);
    }
    /* Without PROT_NONE the empty mapping would count against RLIMIT_DATA and strict overcommit. */
    mprotect(range->park + from, bytes, PROT_NONE);
    cut(&range->parked, index, from, from + bytes);
    insert(&range->mapped, (struct segment){to, bytes});
    return ZPP_OK;
}

static zpp_status map_fresh(zpp_range *range, size_t offset_bytes, size_t bytes, struct zpp_err *err) {
    /* A new mapping, not mprotect: earlier moves left several kernel mappings here, and a segment must be one. */
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(range->home + offset_bytes, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
        return zpp_fail_os(err, errno, "address range: mapping %zu bytes at offset %zu", bytes, offset_bytes);
    }
    if (bytes >= HUGE_BYTES) madvise(range->home + offset_bytes, bytes, MADV_HUGEPAGE); /* a hint: it may fail */
    insert(&range->mapped, (struct segment){offset_bytes, bytes});
    return ZPP_OK;
}

/* Choose warm pages for the hole of `*bytes` at `begin`, and return their segment: a parked piece of that length, else
 * the longest that fits with its pages of 2 MiB whole, else the end of the last one. `*bytes` may become less. */
static size_t choose_parked(const struct segments *parked, size_t begin_bytes, size_t *from_bytes, size_t *bytes) {
    const size_t hole_bytes = *bytes;
    size_t best = parked->count - 1, most_bytes = 0;
    const struct segment last = parked->at[best];
    *bytes = hole_bytes < last.bytes ? hole_bytes : last.bytes;
    *from_bytes = last.offset_bytes + last.bytes - *bytes;
    for (size_t index = 0; index < parked->count && hole_bytes >= HUGE_BYTES; ++index) {
        const struct segment segment = parked->at[index];
        const size_t skipped_bytes = (begin_bytes - segment.offset_bytes) & (HUGE_BYTES - 1);
        if (skipped_bytes >= segment.bytes) continue;
        size_t fits_bytes = segment.bytes - skipped_bytes;
        if (fits_bytes < hole_bytes) fits_bytes = fits_bytes / HUGE_BYTES * HUGE_BYTES;
        if (fits_bytes > hole_bytes) fits_bytes = hole_bytes;
        const bool exact = segment.bytes == hole_bytes && !skipped_bytes;
        if (!exact && fits_bytes <= most_bytes) continue;
        best = index;
        most_bytes = *bytes = fits_bytes;
        *from_bytes = segment.offset_bytes + skipped_bytes;
        if (exact) break;
    }
    return best;
}

/* Return [offset, offset + bytes) of `area` to the system and remove access to it. */
static void drop(char *area, size_t offset_bytes, size_t bytes) {
    madvise(area + offset_bytes, bytes, MADV_DONTNEED);
    mprotect(area + offset_bytes, bytes, PROT_NONE);
}

/* Release the mapped piece [begin, end) of one segment: park as much as the limit allows, and drop the rest. */
static zpp_status release_piece(zpp_range *range, size_t index, size_t begin_bytes, size_t end_bytes,
                                struct zpp_err *err) {
    const size_t spare_bytes = range->warm_limit_bytes > range->parked.total_bytes
                                  ? range->warm_limit_bytes - range->parked.total_bytes : 0;
    size_t keep_bytes = range->moves ? end_bytes - begin_bytes : 0;
    if (keep_bytes > spare_bytes) keep_bytes = spare_bytes / zpp_page_bytes() * zpp_page_bytes();
    if (keep_bytes) {
        if (!move_pages(range->park + begin_bytes, range->home + begin_bytes, keep_bytes)) {
            return zpp_fail_os(err, errno, "address range: parking %zu bytes of offset %zu", keep_bytes, begin_bytes);
        }
        mprotect(range->home + begin_bytes, keep_bytes, PROT_NONE);
        insert(&range->parked, (struct segment){begin_bytes, keep_bytes});
    }
    if (begin_bytes + keep_bytes < end_bytes) {
        drop(range->home, begin_bytes + keep_bytes, end_bytes - begin_bytes - keep_bytes);
    }
    cut(&range->mapped, index, begin_bytes, end_bytes);
    return ZPP_OK;
}

/* --- stray reads -------------------------------------------------------------------------------------------------- */
static bool is_hole(const void *ctx, size_t offset_bytes, size_t *begin_bytes, size_t *end_bytes) {
    const zpp_range *range = ctx;
    const struct segments *mapped = &range->mapped;
    const size_t index = find(mapped, offset_bytes);
    if (index < mapped->count && mapped->at[index].offset_bytes <= offset_bytes) {
        *begin_bytes = mapped->at[index].offset_bytes;
        *end_bytes = *begin_bytes + mapped->at[index].bytes;
        return false;
    }
    *begin_bytes = index ? mapped->at[index - 1].offset_bytes + mapped->at[index - 1].bytes : 0;
    *end_bytes = index < mapped->count ? mapped->at[index].offset_bytes : range->bytes;
    return true;
}

static void close_hole(const void *ctx, size_t begin_bytes, size_t end_bytes) {
    const zpp_range *range = ctx;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    /* If this fails, the pages of NaN stay. */
    (void)mmap(range->home + begin_bytes, end_bytes - begin_bytes, PROT_NONE, flags, -1, 0);
}

/* --- exported ----------------------------------------------------------------------------------------------------- */
zpp_status zpp_range_create(size_t bytes, zpp_range **out, struct zpp_err *err) {
    if (!bytes || bytes > SIZE_MAX / 4) {
        return zpp_fail(err, ZPP_INVALID, "address range: bytes is %zu, wanted 1 to %zu", bytes, SIZE_MAX / 4);
    }
    zpp_range *range = calloc(1, sizeof *range);
    if (!range) return zpp_fail(err, ZPP_NOMEM, "address range: no memory for its record");
    range->bytes = (bytes + zpp_page_bytes() - 1) / zpp_page_bytes() * zpp_page_bytes();
    range->home = reserve_addresses(range->bytes);
    range->park = reserve_addresses(range->bytes);
    if (range->home == MAP_FAILED || range->park == MAP_FAILED) {
        const int failed = errno;
        zpp_range_destroy(range);
        return zpp_fail_os(err, failed, "address range: reserving twice %zu bytes of addresses", bytes);
    }
    range->warm_limit_bytes = range->bytes;
    range->moves = can_move(range);
    const struct zpp_stray_spec watched = { range->home, range->bytes, range, is_hole, close_hole };
    const zpp_status status = zpp_stray_watch(&watched, &range->stray, err);
    if (status != ZPP_OK) {
        zpp_range_destroy(range);
        return status;
    }
    *out = range;
    return ZPP_OK;
}

void zpp_range_destroy(zpp_range *range) {
    if (!range) return;
    zpp_stray_unwatch(range->stray);
    if (range->home && range->home != MAP_FAILED) munmap(range->home, range->bytes);
    if (range->park && range->park != MAP_FAILED) munmap(range->park, range->bytes);
    free(range->mapped.at);
    free(range->parked.at);
    free(range);
}

void *zpp_range_base(const zpp_range *range) { return range->home; }

static zpp_status check_piece(const zpp_range *range, size_t offset_bytes, size_t bytes, struct zpp_err *err) {
    if (offset_bytes % zpp_page_bytes() || bytes % zpp_page_bytes()) {
        return zpp_fail(err, ZPP_INVALID, "address range: offset %zu and %zu bytes, wanted multiples of %zu",
                        offset_bytes, bytes, zpp_page_bytes());
    }
    if (offset_bytes > range->bytes || bytes > range->bytes - offset_bytes) {
        return zpp_fail(err, ZPP_INVALID, "address range: offset %zu and %zu bytes end after its %zu bytes",
                        offset_bytes, bytes, range->bytes);
    }
    return ZPP_OK;
}

/* Unpark what is parked at these same offsets. */
static zpp_status unpark_own(zpp_range *range, size_t offset_bytes, size_t end_bytes, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (size_t index; !status && (index = find(&range->parked, offset_bytes)) < range->parked.count;) {
        const struct segment found = range->parked.at[index];
        if (found.offset_bytes >= end_bytes) break;
        const size_t found_end = found.offset_bytes + found.bytes;
        const size_t begin = found.offset_bytes > offset_bytes ? found.offset_bytes : offset_bytes;
        const size_t end = found_end < end_bytes ? found_end : end_bytes;
        status = unpark(range, index, begin, begin, end - begin, err);
    }
    return status;
}

/* Map the hole that begins at `begin`: with other warm pages while there are any, then with fresh ones. `*hole_bytes`
 * becomes the bytes that were mapped. */
static zpp_status fill_hole(zpp_range *range, size_t begin, size_t *hole_bytes, struct zpp_err *err) {
    if (!range->parked.count) return map_fresh(range, begin, *hole_bytes, err);
    size_t from;
    const size_t index = choose_parked(&range->parked, begin, &from, hole_bytes);
    return unpark(range, index, from, begin, *hole_bytes, err);
}

static zpp_status fill_holes(zpp_range *range, size_t offset_bytes, size_t end_bytes, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (size_t begin = offset_bytes; !status && begin < end_bytes;) {
        const size_t next = find(&range->mapped, begin);
        const size_t next_begin = next < range->mapped.count ? range->mapped.at[next].offset_bytes : end_bytes;
        if (next_begin <= begin) { /* filled already */
            begin = next_begin + range->mapped.at[next].bytes;
            continue;
        }
        size_t hole_bytes = (next_begin < end_bytes ? next_begin : end_bytes) - begin;
        status = fill_hole(range, begin, &hole_bytes, err);
        begin += hole_bytes;
    }
    return status;
}

static void unmap(zpp_range *range, size_t offset_bytes, size_t end_bytes) {
    for (size_t index; (index = find(&range->mapped, offset_bytes)) < range->mapped.count;) {
        const struct segment found = range->mapped.at[index];
        if (found.offset_bytes >= end_bytes) return;
        drop(range->home, found.offset_bytes, found.bytes);
        cut(&range->mapped, index, found.offset_bytes, found.offset_bytes + found.bytes);
    }
}

static zpp_status map_piece(zpp_range *range, size_t offset_bytes, size_t bytes, struct zpp_err *err) {
    const size_t end_bytes = offset_bytes + bytes;
    if (touched(&range->mapped, offset_bytes, end_bytes)) {
        return zpp_fail(err, ZPP_STATE, "address range: offset %zu and %zu bytes: some of it is mapped already",
                        offset_bytes, bytes);
    }
    /* Each step consumes a parked segment, cuts one, or is the last: this capacity is enough for all of them. */
    zpp_status status = reserve(&range->mapped, 2 * range->parked.count + 2, err);
    if (!status) status = reserve(&range->parked, range->parked.count + 2, err);
    if (!status) status = unpark_own(range, offset_bytes, end_bytes, err);
    if (!status) status = fill_holes(range, offset_bytes, end_bytes, err);
    if (status) unmap(range, offset_bytes, end_bytes); /* leave nothing half mapped */
    return status;
}

zpp_status zpp_range_map(zpp_range *range, size_t offset_bytes, size_t bytes, struct zpp_err *err) {
    zpp_status status = check_piece(range, offset_bytes, bytes, err);
    if (status) return status;
    zpp_stray_lock(range->stray);
    status = map_piece(range, offset_bytes, bytes, err);
    zpp_stray_unlock(range->stray);
    return status;
}

static zpp_status unmap_piece(zpp_range *range, size_t offset_bytes, size_t bytes, struct zpp_err *err) {
    const size_t end_bytes = offset_bytes + bytes;
    if (!covered(&range->mapped, offset_bytes, end_bytes)) {
        return zpp_fail(err, ZPP_STATE, "address range: offset %zu and %zu bytes: some of it is not mapped",
                        offset_bytes, bytes);
    }
    zpp_status status = reserve(&range->mapped, 2, err);
    if (!status) status = reserve(&range->parked, range->mapped.count + 1, err);
    while (!status && offset_bytes < end_bytes) {
        const size_t index = find(&range->mapped, offset_bytes);
        const size_t segment_end = range->mapped.at[index].offset_bytes + range->mapped.at[index].bytes;
        const size_t end = segment_end < end_bytes ? segment_end : end_bytes;
        status = release_piece(range, index, offset_bytes, end, err);
        offset_bytes = end;
    }
    return status;
}

zpp_status zpp_range_unmap(zpp_range *range, size_t offset_bytes, size_t bytes, struct zpp_err *err) {
    zpp_status status = check_piece(range, offset_bytes, bytes, err);
    if (status) return status;
    zpp_stray_keep_handler();
    zpp_stray_lock(range->stray);
    status = unmap_piece(range, offset_bytes, bytes, err);
    zpp_stray_unlock(range->stray);
    return status;
}

void zpp_range_set_warm(zpp_range *range, size_t warm_bytes) {
    range->warm_limit_bytes = warm_bytes;
    while (range->parked.total_bytes > warm_bytes) {
        const struct segment last = range->parked.at[range->parked.count - 1];
        drop(range->park, last.offset_bytes, last.bytes);
        cut(&range->parked, range->parked.count - 1, last.offset_bytes, last.offset_bytes + last.bytes);
    }
}

size_t zpp_range_place(size_t used_bytes, size_t bytes) {
    const size_t unit_bytes = bytes >= HUGE_FROM_BYTES ? HUGE_BYTES : zpp_page_bytes();
    return (used_bytes + unit_bytes - 1) / unit_bytes * unit_bytes;
}

size_t zpp_range_held_bytes(const zpp_range *range) { return range->mapped.total_bytes + range->parked.total_bytes; }
bool zpp_range_moves(const zpp_range *range) { return range->moves; }
void zpp_range_forbid_moves(zpp_range *range) { range->moves = false; }
